"""The torch runner on plans made by hand: whole results, isolation of rows, errors."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from octavo.model import CausalLM, ModelConfig, dense_logits, generate
from octavo.model.numerics import NumericFault, NumericFinding
from octavo.wire.messages import SamplingParams
from octavo.worker.loading.warmup import warm_up
from octavo.worker.runners.interface import RunnerError, RunnerOutOfMemory
from octavo.worker.runners.torch.runner import TorchRunner, TorchRunnerConfig
from octavo.worker.scheduler.plan import StepPlan
from tests.support.model import slow_sampler
from tests.support.worker.hand_plans import PlanWriter, chunk

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB = 300  # of the tokenizer; the embedding has more rows
BLOCK = 4
NUM_BLOCKS = 64
CONFIG = ModelConfig(
    vocab_size=320,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    tie_word_embeddings=True,
)
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def model() -> CausalLM:
    model = CausalLM.random(CONFIG, seed=1)
    for parameter in model.parameters():
        parameter.data *= 8  # logits that differ clearly, outputs that vary
    model.embed_tokens.weight.data[VOCAB:] *= 50  # what a slip past the tokenizer's ids would choose
    return model


class Hand(PlanWriter):
    """A runner whose plans are written by hand. Blocks are dealt in a shuffled order; a pool of NaN shows any read of
    what was not written."""

    def __init__(self, model: CausalLM, *, max_in_flight: int = 1, numerics_limit: float | None = None) -> None:
        order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(0))
        super().__init__(order.tolist(), block_size=BLOCK)
        self.findings: list[tuple[int, NumericFinding]] = []
        config = TorchRunnerConfig(
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK,
            max_slots=6,
            max_model_len=60,
            vocab_size=VOCAB,
            eos_token_ids=(7,),
            max_in_flight=max_in_flight,
            numerics_limit=numerics_limit,
        )
        self.runner = TorchRunner(model, config, on_numerics=lambda *found: self.findings.append(found))
        self.runner.kv.k_pool_LPKBH.fill_(torch.nan)
        self.runner.kv.v_pool_LPKBH.fill_(torch.nan)

    def join(  # type: ignore[override]
        self, slot: int, tokens: list[int], *, num_prompt: int | None = None, sampling: SamplingParams = GREEDY
    ) -> None:
        self.free += self.tables.pop(slot, [])
        super().join(slot, tokens, sampling, num_prompt=num_prompt)

    def step(self, **what: Any) -> list[int]:
        self.runner.launch(self.plan(**what))
        return self.runner.collect().tokens_S.tolist()


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def oracle(model: CausalLM, ids: list[int], count: int, sampling: SamplingParams = GREEDY) -> list[int]:
    """The output by recomputing everything for every token, and the slow sampler."""
    params = SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        frequency_penalty=sampling.frequency_penalty,
    )
    output: list[int] = []
    for _ in range(count):
        logits_V = dense_logits(model, torch.tensor(ids + output))[-1, :VOCAB]
        output.append(slow_sampler.sample(logits_V.numpy(), ids, output, params))
    return output


@pytest.mark.parametrize("chunk_len", [1, 3, 4, 7, 33])
def test_a_prompt_in_chunks_beside_decodes_gives_the_tokens_of_the_oracle(model: CausalLM, chunk_len: int) -> None:
    hand, first, second = Hand(model), prompt(0, 9), prompt(1, 21)
    hand.join(3, first)
    outputs: dict[int, list[int]] = {3: hand.step(prefill=[chunk(3, 0, 9)]), 1: []}
    hand.join(1, second)
    for start in range(0, 21, chunk_len):
        num_tokens = min(chunk_len, 21 - start)
        is_last = start + num_tokens == 21
        position = 9 + len(outputs[3]) - 1
        tokens = hand.step(decode={3: position}, prefill=[chunk(1, start, num_tokens, last=is_last)])
        outputs[3].append(tokens[0])
        outputs[1] += tokens[1:]
    for _ in range(5):
        positions = {1: 21 + len(outputs[1]) - 1, 3: 9 + len(outputs[3]) - 1}
        for slot, token in zip(positions, hand.step(decode=positions), strict=True):
            outputs[slot].append(token)
    assert outputs == {slot: oracle(model, ids, len(outputs[slot])) for slot, ids in ((3, first), (1, second))}


def test_a_decode_planned_ahead_finds_the_token_that_nobody_has_collected(model: CausalLM) -> None:
    hand, ids = Hand(model, max_in_flight=2), prompt(2, 6)
    hand.join(0, ids)
    hand.runner.launch(hand.plan(prefill=[chunk(0, 0, 6)]))
    tokens = []
    for position in range(6, 12):
        hand.runner.launch(hand.plan(decode={0: position}))
        tokens += hand.runner.collect().tokens_S.tolist()
    tokens += hand.runner.collect().tokens_S.tolist()
    assert tokens == oracle(model, ids, 7)


def test_one_step_too_many_in_flight_is_refused_and_changes_nothing(model: CausalLM) -> None:
    hand = Hand(model)
    hand.join(0, prompt(2, 6))
    hand.runner.launch(hand.plan(prefill=[chunk(0, 0, 6)]))
    with pytest.raises(RunnerError, match="more in flight than 1"):
        hand.runner.launch(hand.plan(decode={0: 6}))
    assert hand.runner.collect().step == 1


def test_collecting_without_a_launch_is_a_lookup_error(model: CausalLM) -> None:
    with pytest.raises(LookupError):
        Hand(model).runner.collect()


def test_a_copied_block_is_written_without_changing_its_source(model: CausalLM) -> None:
    hand, ids = Hand(model), prompt(3, 6)
    hand.join(0, ids)
    [first] = hand.step(prefill=[chunk(0, 0, 6)])
    other = (first + 1) % VOCAB
    child = [*ids, other]
    hand.join(1, child, num_prompt=6)
    shared, source, copy = hand.tables[0][0], hand.tables[0][1], hand.free.pop(0)
    hand.tables[1] = [shared, copy]
    hand.updates = [(1, 0, shared), (1, 1, copy)]
    plan = hand.plan(decode={0: 6}, prefill=[chunk(1, 6, 1)])
    copies_C2 = np.asarray([[source, copy]], np.int32)
    hand.runner.launch(replace(plan, block_copies_C2=copies_C2))
    tokens = hand.runner.collect().tokens_S.tolist()
    assert tokens == [oracle(model, ids, 2)[1], oracle(model, child, 1)[0]]
    assert hand.step(decode={0: 7, 1: 7}) == [oracle(model, ids, 3)[2], oracle(model, child, 2)[1]]


def test_a_new_request_in_a_slot_sees_nothing_of_the_last_one(model: CausalLM) -> None:
    hand = Hand(model)
    hand.join(0, prompt(4, 20), sampling=SamplingParams(temperature=0, frequency_penalty=5.0))
    hand.step(prefill=[chunk(0, 0, 20)])
    hand.step(decode={0: 20})
    ids = prompt(5, 3)
    hand.join(0, ids)
    assert hand.step(prefill=[chunk(0, 0, 3)]) == oracle(model, ids, 1)


RANDOM = SamplingParams(temperature=1.5, top_p=0.97, seed=77, frequency_penalty=0.4)


def test_a_seeded_output_is_the_same_alone_in_a_batch_and_after_a_preemption(model: CausalLM) -> None:
    ids, expected = prompt(6, 8), oracle(model, prompt(6, 8), 6, RANDOM)
    hand = Hand(model)
    hand.join(4, ids, sampling=RANDOM)
    hand.join(0, prompt(7, 3), sampling=SamplingParams(temperature=0.8, seed=1, top_k=4))
    tokens = hand.step(prefill=[chunk(0, 0, 3), chunk(4, 0, 8)])[1:]
    for step in range(2):
        tokens += hand.step(decode={0: 3 + step, 4: 8 + step})[1:]
    hand.join(2, [*ids, *tokens], num_prompt=8, sampling=RANDOM)  # preempted, and back in another slot
    tokens += hand.step(prefill=[chunk(2, 0, 11)])
    for step in range(2):
        tokens += hand.step(decode={2: 11 + step})
    assert tokens == expected
    assert len(set(expected)) > 3


def test_ids_past_the_tokenizer_are_never_sampled(model: CausalLM) -> None:
    assert int(dense_logits(model, torch.tensor(prompt(0, 9)))[-1].argmax()) >= VOCAB
    hand = Hand(model)
    for slot, sampling in enumerate([GREEDY, SamplingParams(temperature=1.0, seed=3), RANDOM]):
        hand.join(slot, prompt(0, 9), sampling=sampling)
    assert max(hand.step(prefill=[chunk(slot, 0, 9) for slot in range(3)])) < VOCAB


def test_end_and_stop_tokens_are_masked_until_min_tokens_unless_ends_are_ignored(model: CausalLM) -> None:
    ids = prompt(8, 5)
    likely = int(dense_logits(model, torch.tensor(ids))[-1, :VOCAB].argmax())
    for sampling, is_masked in [
        (SamplingParams(temperature=0.0, min_tokens=1, stop_token_ids=(likely,)), True),
        (SamplingParams(temperature=0.0, min_tokens=0, stop_token_ids=(likely,)), False),
        (SamplingParams(temperature=0.0, min_tokens=1), False),
    ]:
        hand = Hand(model)
        hand.join(0, ids, sampling=sampling)
        assert (hand.step(prefill=[chunk(0, 0, 5)]) != [likely]) == is_masked


def test_a_row_with_nan_in_its_cache_is_flagged_and_its_neighbour_is_not(model: CausalLM) -> None:
    hand, ids = Hand(model), prompt(9, 5)
    for slot in (0, 1):
        hand.join(slot, ids)
    hand.step(prefill=[chunk(0, 0, 5), chunk(1, 0, 5)])
    hand.runner.kv.v_pool_LPKBH[:, hand.tables[0][0]] = torch.nan
    hand.runner.launch(hand.plan(decode={0: 5, 1: 5}))
    result = hand.runner.collect()
    assert result.is_finite_S.tolist() == [False, True]
    assert result.tokens_S[1] == oracle(model, ids, 2)[1]


def test_logprobs_come_for_the_rows_that_asked(model: CausalLM) -> None:
    hand, ids = Hand(model), prompt(10, 7)
    hand.join(0, ids)
    hand.join(1, ids, sampling=SamplingParams(temperature=0.0, num_logprobs=3))
    hand.runner.launch(hand.plan(prefill=[chunk(0, 0, 7), chunk(1, 0, 7)]))
    result = hand.runner.collect()
    expected_V = dense_logits(model, torch.tensor(ids))[-1, :VOCAB].log_softmax(-1)
    top = expected_V.topk(3)
    assert list(result.logprobs) == [1]
    assert result.logprobs[1].top_ids == tuple(top.indices.tolist())
    assert result.logprobs[1].top_logprobs == pytest.approx(top.values.tolist(), abs=1e-4)
    assert result.logprobs[1].logprob == pytest.approx(float(top.values[0]), abs=1e-4)


def test_a_chunk_that_is_not_the_last_gives_no_token(model: CausalLM) -> None:
    hand = Hand(model)
    hand.join(0, prompt(11, 9))
    assert hand.step(prefill=[chunk(0, 0, 4, last=False)]) == []


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("an illegal memory access was encountered"), RunnerError),
        (torch.OutOfMemoryError("CUDA out of memory"), RunnerOutOfMemory),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:119] can't allocate memory"),
            RunnerOutOfMemory,
        ),
        (MemoryError(), RunnerOutOfMemory),
    ],
)
def test_what_goes_wrong_in_a_step_is_raised_by_its_collect_and_the_runner_goes_on(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[RunnerError]
) -> None:
    hand, ids = Hand(model), prompt(12, 6)
    hand.join(0, ids)

    def fail(*_args: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", fail)
        hand.runner.launch(hand.plan(prefill=[chunk(0, 0, 6)]))
        with pytest.raises(kind) as caught:
            hand.runner.collect()
    assert type(caught.value) is kind
    hand.join(0, ids)
    assert hand.step(prefill=[chunk(0, 0, 6)]) == oracle(model, ids, 1)


def test_a_real_allocation_that_fails_is_out_of_memory(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    hand = Hand(model)
    hand.join(0, prompt(12, 6))
    monkeypatch.setattr(model, "logits", lambda hidden_SD: torch.empty(1 << 55))
    hand.runner.launch(hand.plan(prefill=[chunk(0, 0, 6)]))
    with pytest.raises(RunnerOutOfMemory):
        hand.runner.collect()


def test_a_plan_without_a_block_for_its_tokens_fails_and_writes_nothing(model: CausalLM) -> None:
    hand = Hand(model)
    hand.join(0, prompt(13, 6))
    plan = hand.plan(prefill=[chunk(0, 0, 6)])
    hand.runner.launch(StepPlan(step=1, new_requests=plan.new_requests, prefill=plan.prefill))
    with pytest.raises(RunnerError, match="slot 0 has no block for position 0"):
        hand.runner.collect()
    assert bool(hand.runner.kv.k_pool_LPKBH.isnan().all())


def test_a_plan_of_joins_alone_is_a_step_without_tokens(model: CausalLM) -> None:
    hand = Hand(model)
    hand.join(0, prompt(14, 6))
    assert hand.step() == []
    assert hand.step(prefill=[chunk(0, 0, 6)]) == oracle(model, prompt(14, 6), 1)


def test_activations_over_the_limit_are_reported_with_step_and_module(model: CausalLM) -> None:
    hand = Hand(model, numerics_limit=1e-3)
    hand.join(0, prompt(15, 6))
    hand.step(prefill=[chunk(0, 0, 6)])
    hand.step(decode={0: 6})
    hand.runner.close()
    found = [(step, finding.module, finding.fault) for step, finding in hand.findings]
    assert found == [(step, "embed_tokens", NumericFault.OVER_LIMIT) for step in (1, 2)]


def test_warm_up_reports_every_step_and_leaves_nothing_behind(model: CausalLM) -> None:
    hand, progress, ids = Hand(model), [], prompt(16, 10)
    num_steps = warm_up(hand.runner, max_batch_tokens=40, on_progress=lambda *state: progress.append(state))
    assert progress == [(done, num_steps) for done in range(num_steps + 1)]
    hand.join(0, ids)
    tokens = hand.step(prefill=[chunk(0, 0, 10)])
    tokens += hand.step(decode={0: 10})
    assert tokens == oracle(model, ids, 2)


def test_the_oracle_here_is_the_library_s_where_every_row_may_be_sampled(model: CausalLM) -> None:
    whole = CausalLM.random(CONFIG, seed=2)
    whole.embed_tokens.weight.data[VOCAB:] = 0
    assert oracle(whole, prompt(17, 5), 4) == generate(whole, prompt(17, 5), max_new_tokens=4)
