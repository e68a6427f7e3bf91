"""Scheduler, block manager and torch runner together: a pool too small, prefixes shared, plans made ahead."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from octavo.model import CausalLM, ModelConfig, dense_logits
from octavo.model.attention.interface import AttentionInputs, get_backend
from octavo.model.attention.kv_pool import KvPool
from octavo.wire.messages import Pooling, SamplingParams
from octavo.worker.runners.oracle.model import OracleModel
from octavo.worker.runners.torch.runner import TorchRunner, TorchRunnerConfig
from tests.support.model import slow_sampler
from tests.support.worker.scheduling import World, WorldConfig, key

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB = 120
CONFIG = ModelConfig(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    tie_word_embeddings=True,
)
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.2, "seed": 5},
    {"temperature": 0.0, "frequency_penalty": 0.7},
    {"temperature": 0.9, "seed": 6, "top_k": 12, "top_p": 0.9},
]


@pytest.fixture(scope="module")
def model() -> CausalLM:
    model = CausalLM.random(CONFIG, seed=4)
    for parameter in model.parameters():
        parameter.data *= 8
    return model


def world(model: CausalLM, monkeypatch: pytest.MonkeyPatch, *, num_blocks: int, max_in_flight: int) -> World:
    config = WorldConfig(
        num_blocks=num_blocks,
        block_size=4,
        max_num_seqs=4,
        max_batch_tokens=16,
        max_model_len=48,
        max_in_flight=max_in_flight,
        model=OracleModel(vocab_size=VOCAB, eos_token_ids=()),
    )
    runner_config = TorchRunnerConfig(
        num_blocks=num_blocks,
        block_size=4,
        max_slots=4,
        max_model_len=48,
        vocab_size=VOCAB,
        max_in_flight=max_in_flight,
    )
    monkeypatch.setattr(WorldConfig, "runner", lambda self: TorchRunner(model, runner_config))
    return World(config)


def expected(model: CausalLM, ids: list[int], count: int, sampling: dict[str, Any]) -> list[int]:
    output: list[int] = []
    for _ in range(count):
        logits_V = dense_logits(model, torch.tensor(ids + output))[-1, :VOCAB]
        output.append(slow_sampler.sample(logits_V.numpy(), ids, output, SamplingParams(**sampling)))
    return output


@dataclass(frozen=True)
class Work:
    """Prompts with shared beginnings, and what must come out."""

    prompts: list[list[int]]
    outputs: list[list[int]]


@pytest.fixture(scope="module")
def work(model: CausalLM) -> Work:
    rng = np.random.default_rng(0)
    shared = rng.integers(0, VOCAB, 12).tolist()
    prompts = [shared[: rng.integers(4, 13)] + rng.integers(0, VOCAB, rng.integers(1, 8)).tolist() for _ in range(9)]
    sampling = [SAMPLING[handle % len(SAMPLING)] for handle in range(len(prompts))]
    outputs = [
        expected(model, ids, int(rng.integers(6, 16)), params) for ids, params in zip(prompts, sampling, strict=True)
    ]
    return Work(prompts, outputs)


def ask_all(here: World, work: Work) -> list[tuple[int, int]]:
    """Every prompt, for as many tokens as are expected of it."""
    return [
        here.add(handle, prompt, max_tokens=len(output), **SAMPLING[handle % len(SAMPLING)])
        for handle, (prompt, output) in enumerate(zip(work.prompts, work.outputs, strict=True))
    ]


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("num_blocks", [11, 64])
def test_outputs_are_those_of_the_oracle_whatever_the_pool_and_the_pipeline(
    model: CausalLM, work: Work, monkeypatch: pytest.MonkeyPatch, num_blocks: int, max_in_flight: int
) -> None:
    here = world(model, monkeypatch, num_blocks=num_blocks, max_in_flight=max_in_flight)
    keys = ask_all(here, work)
    here.run()
    assert [here.streams[which].tokens for which in keys] == work.outputs
    here.check_quiet()
    assert (here.scheduler.counters.num_preemptions > 0) == (num_blocks == 11)
    assert here.blocks.num_hit_tokens > 0


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("num_blocks", [11, 64])
def test_callers_that_stop_reading_and_read_on_change_no_token(
    model: CausalLM, work: Work, monkeypatch: pytest.MonkeyPatch, num_blocks: int, max_in_flight: int
) -> None:
    here = world(model, monkeypatch, num_blocks=num_blocks, max_in_flight=max_in_flight)
    keys = ask_all(here, work)
    for turn in range(40):
        here.pause(turn % len(keys))
        here.step()
        here.resume((turn + 7) % len(keys))
    here.resume_all()
    here.run()
    assert [here.streams[which].tokens for which in keys] == work.outputs
    here.check_quiet()
    assert here.scheduler.counters.num_pauses > 20


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_embeddings_are_the_models_last_hidden_states_among_other_work(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch, max_in_flight: int
) -> None:
    small = world(model, monkeypatch, num_blocks=14, max_in_flight=max_in_flight)
    prompts = {index: np.random.default_rng(index).integers(0, VOCAB, 21 + index).tolist() for index in range(4)}
    poolings = {index: Pooling.MEAN if index % 2 else Pooling.LAST_TOKEN for index in prompts}
    small.add(90, prompts[0][:12], max_tokens=20)
    keys = {index: small.add(index, ids, pooling=poolings[index]) for index, ids in prompts.items()}
    small.add(91, prompts[1][:9], max_tokens=20, priority=1)
    small.run()
    small.check_quiet()
    assert sum(stream.finished.preemptions for stream in small.streams.values() if stream.finished) > 0
    for index, ids in prompts.items():
        hidden_TD = last_hidden(model, ids)
        expected_D = hidden_TD.mean(dim=0) if poolings[index] is Pooling.MEAN else hidden_TD[-1]
        assert small.streams[keys[index]].embedding == pytest.approx(
            expected_D.tolist(), abs=2e-4
        )  # weights that amplify


WANTED: list[dict[str, Any]] = [
    {"temperature": 1.2, "seed": 2**64 - 2, "top_n_sigma": 2.0},
    {"temperature": 0.9, "seed": 6, "top_k": 12, "typical_p": 0.9, "repetition_penalty": 1.3},
    {"temperature": 1.5, "seed": 7, "logit_bias": {3: 2.0, 9: -50.0}, "bad_words": ((4, 5), (11,))},
    {"temperature": 1.1, "seed": 8, "allowed_token_ids": tuple(range(20, 60)), "presence_penalty": 0.5},
]


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("num_blocks", [12, 64])
def test_output_i_is_what_a_request_with_seed_plus_i_gives_alone_in_any_company(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch, num_blocks: int, max_in_flight: int
) -> None:
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, VOCAB, 9 + index).tolist() for index in range(4)]
    together = world(model, monkeypatch, num_blocks=num_blocks, max_in_flight=max_in_flight)
    for index, (ids, sampling) in enumerate(zip(prompts, WANTED, strict=True)):
        together.add(index, ids, num_outputs=3, max_tokens=14, **sampling)
    together.run()
    together.check_quiet()
    assert (together.scheduler.counters.num_preemptions > 0) == (num_blocks == 12)
    for index, (ids, sampling) in enumerate(zip(prompts, WANTED, strict=True)):
        for output in range(3):
            alone = world(model, monkeypatch, num_blocks=64, max_in_flight=1)
            seed = (sampling["seed"] + output) % 2**64
            which = alone.add(7, ids, max_tokens=14, **sampling | {"seed": seed})
            alone.run()
            stream = together.streams[key(index + 1000 * output)]
            assert stream.tokens == alone.streams[which].tokens, (index, output)
    outputs = {tuple(stream.tokens) for stream in together.streams.values()}
    assert len(outputs) >= 6


def test_log_probabilities_of_a_prompt_are_those_of_the_whole_model_a_few_positions_at_a_time(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = np.random.default_rng(2).integers(0, VOCAB, 40).tolist()
    here = world(model, monkeypatch, num_blocks=64, max_in_flight=2)
    here.add(1, ids, max_tokens=1)
    here.run()
    heights, logits = [], model.logits
    monkeypatch.setattr(model, "logits", lambda hidden_SD: heights.append(len(hidden_SD)) or logits(hidden_SD))
    here = world(model, monkeypatch, num_blocks=64, max_in_flight=2)
    which = here.add(2, ids, num_prompt_logprobs=3, max_tokens=2)
    here.run()
    assert sum(heights) >= 39
    assert max(heights) <= 32
    raw_TV = torch.log_softmax(dense_logits(model, torch.tensor(ids))[:, :VOCAB].double(), dim=-1)
    got = here.streams[which].prompt_logprobs
    assert len(got) == 39
    for position, each in enumerate(got, start=1):
        best = raw_TV[position - 1].topk(3)
        assert each.logprob == pytest.approx(float(raw_TV[position - 1, ids[position]]), abs=2e-3)
        assert each.top_logprobs == pytest.approx(best.values.tolist(), abs=2e-3)
    assert here.streams[which].finished is not None
    assert here.streams[which].finished.cached_tokens == 0


def last_hidden(model: CausalLM, ids: list[int]) -> torch.Tensor:
    """hidden_TD of the whole prompt in one step of its own."""
    num_tokens = len(ids)
    kv = KvPool(model.config, 1, num_tokens, model.dtype, model.device)
    positions_T = torch.arange(num_tokens)
    inputs = AttentionInputs(
        slot_mapping_T=positions_T,
        table_SM=torch.zeros(1, 1, dtype=torch.int32),
        cu_query_lens_S1=torch.tensor([0, num_tokens], dtype=torch.int32),
        context_lens_S=torch.tensor([num_tokens], dtype=torch.int32),
        max_query_len=num_tokens,
        max_context_len=num_tokens,
    )
    return model(torch.tensor(ids), positions_T, kv, inputs, get_backend("reference"))
