"""The CUDA runner, kernel by kernel on a GPU or in Triton's interpreter, against the torch runner on the same plans."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from octavo.model.kernels.sampling.mask import packed_mask
from octavo.wire.messages import Grammar, GrammarKind
from octavo.worker.runners.cuda.graph_runner import batch_sizes
from octavo.worker.runners.interface import RunnerError
from octavo.worker.scheduler.plan import Chunk, Slot, StepMasks, StepPlan
from tests.support.model.interpreter import WARNINGS
from tests.support.worker.cuda_runners import SAMPLING, VOCAB, Hand, prompt, runner_pair, world
from tests.support.worker.hand_plans import chunk

pytestmark = [*WARNINGS, pytest.mark.usefixtures("few_items")]


@pytest.mark.slow
@pytest.mark.timeout(1500)  # half a minute of one core in the interpreter
@pytest.mark.parametrize("num_blocks", [8, 64])
def test_served_requests_get_the_tokens_of_the_torch_runner(num_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    here = world(runner_pair(num_blocks=num_blocks), monkeypatch, num_blocks=num_blocks)
    rng = np.random.default_rng(0)
    shared = rng.integers(0, VOCAB, 9).tolist()
    for handle in range(6):
        ids = shared[: rng.integers(4, 10)] + rng.integers(0, VOCAB, rng.integers(1, 9)).tolist()
        here.add(handle, ids, max_tokens=int(rng.integers(5, 9)), ignore_eos=True, **SAMPLING[handle % len(SAMPLING)])
    here.run()
    here.check_quiet()
    assert all(stream.finished and not stream.finished.error for stream in here.streams.values())
    assert (here.scheduler.counters.num_preemptions > 0) == (num_blocks == 8)
    assert here.blocks.num_hit_tokens > 0


def test_a_slot_taken_over_a_batch_that_shrinks_and_a_step_of_no_sample() -> None:
    hand = Hand(runner_pair())
    hand.join(0, prompt(0, 5))
    hand.join(2, prompt(1, 9), temperature=0.9, seed=2**63 + 17)
    hand.step(prefill=(chunk(0, 0, 5), chunk(2, 0, 9)))
    hand.join(3, prompt(2, 20), temperature=0.5, seed=3)
    hand.step(decode={0: 5, 2: 9}, prefill=(chunk(3, 0, 8, last=False),))
    assert hand.step(prefill=(chunk(3, 8, 4, last=False),)) == []
    hand.step(decode={0: 6, 2: 10}, prefill=(chunk(3, 12, 8),))
    hand.step(decode={0: 7, 2: 11, 3: 20})
    hand.step(decode={2: 12, 3: 21})
    hand.join(0, prompt(3, 6), temperature=1.1, seed=9)
    hand.step(decode={2: 13, 3: 22}, prefill=(chunk(0, 0, 6),))
    for i in range(4):
        hand.step(decode={0: 6 + i, 2: 14 + i, 3: 23 + i})
    hand.step(decode={3: 27})


def test_a_row_that_is_left_out_of_steps_goes_on_where_it_was() -> None:
    """A request whose caller does not read: paused, and then in the steps again, with a seed and without."""
    hand = Hand(runner_pair())
    hand.join(0, prompt(0, 5))
    hand.join(1, prompt(1, 6), temperature=0.8, seed=11)
    hand.join(2, prompt(2, 7))
    hand.step(prefill=(chunk(0, 0, 5), chunk(1, 0, 6), chunk(2, 0, 7)))
    hand.step(decode={0: 5, 1: 6, 2: 7})
    hand.step(decode={2: 8})
    hand.step(decode={1: 7, 2: 9})
    hand.step(decode={0: 6, 2: 10})
    hand.step(decode={0: 7, 1: 8, 2: 11})


def test_two_steps_in_flight_feed_each_other_and_a_third_is_refused() -> None:
    hand = Hand(runner_pair())
    hand.join(1, prompt(4, 7))
    hand.launch(prefill=(chunk(1, 0, 7),))
    for position in range(7, 12):
        hand.launch(decode={1: position})
        hand.runner.collect()
    hand.launch(decode={1: 12})
    with pytest.raises(RunnerError, match="more in flight than 2"):
        hand.runner.fast.launch(StepPlan(step=99))
    hand.runner.collect()
    hand.runner.collect()
    with pytest.raises(LookupError):
        hand.runner.fast.collect()


def test_a_row_that_starts_with_a_decode_and_a_copied_block() -> None:
    hand = Hand(runner_pair())
    hand.join(0, prompt(5, 6))
    hand.step(prefill=(chunk(0, 0, 6),))
    child = [*prompt(5, 6), 11]
    hand.join(1, child)
    shared, source, copy = hand.tables[0][0], hand.tables[0][1], hand.free.pop(0)
    hand.tables[1] = [shared, copy]
    hand.updates = [(1, 0, source), (1, 0, shared), (1, 1, copy)]  # the last of two values for a place is the one
    hand.step(decode={0: 6, 1: 6}, block_copies_C2=np.asarray([[source, copy]], np.int32))
    hand.step(decode={0: 7, 1: 7})


def test_rows_of_nan_are_told_and_leave_the_others_alone() -> None:
    hand = Hand(runner_pair())
    hand.join(0, prompt(6, 5))
    hand.join(1, prompt(7, 5), num_logprobs=1)
    hand.join(2, prompt(8, 5), temperature=0.7, seed=1)
    hand.step(prefill=tuple(chunk(slot, 0, 5) for slot in range(3)))
    for pool in (hand.runner.slow.kv, hand.runner.fast.graphs.kv):  # type: ignore[attr-defined]
        pool.k_pool_LPKBH[0, hand.tables[1][0]] = torch.nan
    hand.launch(decode={0: 5, 1: 5, 2: 5})
    slow, fast = hand.runner.slow.collect(), hand.runner.fast.collect()
    assert slow.is_finite_S.tolist() == fast.is_finite_S.tolist() == [True, False, True]
    assert slow.tokens_S[[0, 2]].tolist() == fast.tokens_S[[0, 2]].tolist()


def forked(slot: int, start: int, num_tokens: int, forks: tuple[int, ...]) -> Chunk:
    return Chunk(slot=Slot(slot), start=start, num_tokens=num_tokens, is_last=True, forks=tuple(map(Slot, forks)))


def test_forks_of_a_prompt_draw_their_own_tokens_from_its_last_logits() -> None:
    hand = Hand(runner_pair())
    hand.join(0, prompt(10, 5), temperature=60.0, seed=1)
    hand.step(prefill=(chunk(0, 0, 5),))
    sampling = ({"temperature": 60.0, "seed": 2}, {"temperature": 60.0, "seed": 3, "num_logprobs": 2}, {"top_k": 3})
    for slot, params in zip((1, 3, 2), sampling, strict=True):
        hand.join(slot, prompt(11, 6), **params)
    first, second = hand.free.pop(0), hand.free.pop(0)
    for slot in (1, 3, 2):
        hand.tables[slot] = [first, second]
        hand.updates += [(slot, 0, first), (slot, 1, second)]
    hand.step(decode={0: 5}, prefill=(forked(1, 0, 6, (3, 2)),))
    for slot in (3, 2):  # the half full block becomes each one's own
        hand.tables[slot][1] = hand.free.pop(0)
        hand.updates.append((slot, 1, hand.tables[slot][1]))
    copies = np.asarray([(second, hand.tables[slot][1]) for slot in (3, 2)], np.int32)
    hand.step(decode={2: 6, 0: 6, 1: 6, 3: 6}, block_copies_C2=copies)
    hand.step(decode={2: 7, 0: 7, 1: 7, 3: 7})


ONE_OF = Grammar(kind=GrammarKind.REGEX, source="unread here")


def masks_of(allowed: dict[int, list[int]]) -> StepMasks:
    """By position in the sampled slots."""
    bits_NV = np.zeros((len(allowed), VOCAB), np.bool_)
    for n, ids in enumerate(allowed.values()):
        bits_NV[n, ids] = True
    return StepMasks(
        index_N=np.asarray(list(allowed), np.int64), bits_NW=np.stack([packed_mask(row) for row in bits_NV])
    )


def test_a_step_holds_its_tokens_back_until_the_masks_come() -> None:
    hand = Hand(runner_pair())
    hand.join(0, prompt(12, 5), grammar=ONE_OF)
    hand.join(1, prompt(13, 5))
    hand.join(2, prompt(14, 7), grammar=ONE_OF, temperature=60.0, seed=5, num_logprobs=3, logit_bias={4: 9.0})
    hand.launch(prefill=(chunk(0, 0, 5), chunk(1, 0, 5)))
    hand.runner.constrain(masks_of({0: [3, 9]}))
    assert hand.runner.collect().tokens_S[0] in (3, 9)
    hand.launch(decode={1: 5, 0: 5}, prefill=(chunk(2, 0, 7),))
    with pytest.raises(LookupError, match="waits for masks"):
        hand.runner.fast.collect()
    hand.runner.constrain(masks_of({1: [8, 11, 60], 2: [4, 7, 119]}))
    tokens = hand.runner.collect().tokens_S.tolist()
    assert (tokens[1] in (8, 11, 60), tokens[2] in (4, 7, 119)) == (True, True)
    for position in range(6, 9):
        hand.launch(decode={0: position, 1: position, 2: position + 1})
        hand.runner.constrain(masks_of({0: [position, 80], 2: list(range(50))}))
        assert hand.runner.collect().tokens_S[0] in (position, 80)
    hand.launch(decode={0: 9, 2: 10})
    hand.runner.constrain(masks_of({0: [], 1: [5]}))
    result = hand.runner.collect()
    assert (result.is_exhausted_S is not None, result.tokens_S[1]) == (True, 5)


def test_masks_overtake_the_tokens_of_the_step_before_in_flight() -> None:
    hand = Hand(runner_pair())
    hand.join(0, prompt(15, 5), grammar=ONE_OF)
    hand.launch(prefill=(chunk(0, 0, 5),))
    hand.runner.constrain(masks_of({0: [1]}))
    for position in range(5, 9):
        hand.launch(decode={0: position})
        assert hand.runner.collect().tokens_S.tolist() == [position - 4]
        hand.runner.constrain(masks_of({0: [position - 3]}))
    assert hand.runner.collect().tokens_S.tolist() == [5]


def test_a_choice_that_fails_is_told_where_the_step_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    hand = Hand(runner_pair())
    hand.join(0, prompt(16, 5), grammar=ONE_OF)
    hand.launch(prefill=(chunk(0, 0, 5),))
    fast = hand.runner.fast
    with monkeypatch.context() as patch:
        patch.setattr(fast.graphs, "run_sampling", lambda *args: (_ for _ in ()).throw(RuntimeError("no luck")))  # type: ignore[attr-defined]
        fast.constrain(masks_of({0: [1]}))
    with pytest.raises(RunnerError, match="no luck"):
        fast.collect()


def test_parameters_without_room_on_the_device_are_served_by_the_whole_sampler() -> None:
    hand = Hand(runner_pair())
    hand.join(0, prompt(17, 5), num_logprobs=25, bad_words=((1, 2),))
    hand.join(1, prompt(18, 5), bad_words=(tuple(range(40)),), allowed_token_ids=(5, 6, 7), temperature=60.0, seed=1)
    hand.join(2, prompt(19, 5), temperature=60.0, seed=2, num_logprobs=1)
    hand.step(prefill=tuple(chunk(slot, 0, 5) for slot in range(3)))
    for position in range(5, 9):
        hand.step(decode={0: position, 1: position, 2: position})
    hand.join(1, prompt(20, 5), temperature=60.0, seed=1)  # the slot's next request wants nothing special
    hand.step(decode={0: 9, 2: 9}, prefill=(chunk(1, 0, 5),))
    hand.step(decode={0: 10, 2: 10, 1: 5})


def test_log_probabilities_are_of_the_raw_logits_where_the_whole_sampler_serves_a_grammar() -> None:
    hand = Hand(runner_pair())
    hand.join(0, prompt(21, 5), grammar=ONE_OF, num_logprobs=25, temperature=60.0, seed=3)
    hand.join(1, prompt(22, 5), num_logprobs=2)
    hand.join(2, prompt(23, 5), grammar=ONE_OF, num_logprobs=4)
    hand.join(3, prompt(24, 5), grammar=ONE_OF, num_logprobs=0, bad_words=(tuple(range(40)),))
    hand.launch(prefill=tuple(chunk(slot, 0, 5) for slot in range(4)))
    hand.runner.constrain(masks_of({0: [3, 9], 2: [8, 11, 60], 3: [7]}))
    tokens = hand.runner.collect().tokens_S.tolist()
    assert (tokens[0] in (3, 9), tokens[2] in (8, 11, 60), tokens[3]) == (True, True, 7)
    hand.launch(decode={3: 5, 1: 5, 0: 5})
    hand.runner.constrain(masks_of({0: [40, 50], 2: [90]}))
    tokens = hand.runner.collect().tokens_S.tolist()
    assert (tokens[0] in (40, 50), tokens[2]) == (True, 90)


def test_a_plan_without_a_block_is_refused_before_it_writes_anywhere() -> None:
    hand = Hand(runner_pair())
    hand.join(0, prompt(9, 5))
    hand.step(prefill=(chunk(0, 0, 5),))
    bad = StepPlan(step=9, decode_slots_S=np.asarray([0], np.int32), decode_positions_S=np.asarray([8], np.int32))
    with pytest.raises(RunnerError, match="slot 0 has no block for position 8"):
        hand.runner.fast.launch(bad)
    with pytest.raises(RunnerError, match="slot 0 has no block somewhere in positions 6 to 9"):
        hand.runner.fast.launch(StepPlan(step=9, prefill=(chunk(0, 6, 4),)))
    hand.step(decode={0: 5})


def test_ways_are_timed_over_a_context_and_padding_has_none_behind_that(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, positions = runner_pair(max_slots=2, max_model_len=48).fast.graphs, []
    monkeypatch.setattr(
        graphs.step.autotuner, "choose", lambda sizes, run: positions.append(graphs.state.position_R.tolist())
    )
    graphs.choose_ways()
    assert (positions, graphs.state.position_R.tolist()) == ([[0, 0, 51]], [0, 0, 0])


def test_batch_sizes_end_with_the_largest() -> None:
    assert batch_sizes(1) == (1,)
    assert batch_sizes(6) == (1, 2, 4, 6)
    assert len(batch_sizes(256)) == 27
    assert batch_sizes(256)[-3:] == (224, 240, 256)
    assert batch_sizes(300)[-3:] == (256, 288, 300)
