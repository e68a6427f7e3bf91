"""The CUDA runner, kernel by kernel on a GPU or in Triton's interpreter, against the torch runner on the same plans."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from model.kernels import decode_work
from tests.support.cuda_twins import DEVICE, VOCAB, WISHES, Hand, chunk, prompt, twins, world
from worker.cuda_graphs import batch_sizes
from worker.plan import StepPlan
from worker.runner import RunnerError

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),  # triton's interpreter
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def few_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs programs one after the other, also those without work."""
    if DEVICE == "cpu":
        for name, value in (("TARGET_ITEMS", 8), ("TARGET_PROGRAMS", 16), ("MIN_CHUNK_TOKENS", 16)):
            monkeypatch.setattr(decode_work, name, value, raising=False)
        monkeypatch.setattr(decode_work, "CHUNK_MULTIPLE", 16)


@pytest.mark.slow
@pytest.mark.parametrize("num_blocks", [8, 64])
def test_served_requests_get_the_tokens_of_the_torch_runner(num_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    here = world(twins(num_blocks=num_blocks), monkeypatch, num_blocks=num_blocks)
    rng = np.random.default_rng(0)
    shared = rng.integers(0, VOCAB, 9).tolist()
    for handle in range(6):
        ids = shared[: rng.integers(4, 10)] + rng.integers(0, VOCAB, rng.integers(1, 9)).tolist()
        here.add(handle, ids, max_tokens=int(rng.integers(5, 9)), ignore_eos=True, **WISHES[handle % len(WISHES)])
    here.run()
    here.check_quiet()
    assert all(stream.finished and not stream.finished.error for stream in here.streams.values())
    assert (here.scheduler.counters.num_preemptions > 0) == (num_blocks == 8)
    assert here.blocks.num_hit_tokens > 0


def test_a_slot_taken_over_a_batch_that_shrinks_and_a_step_of_no_sample() -> None:
    hand = Hand(twins())
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


def test_two_steps_in_flight_feed_each_other_and_a_third_is_refused() -> None:
    hand = Hand(twins())
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
    hand = Hand(twins())
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
    hand = Hand(twins())
    hand.join(0, prompt(6, 5))
    hand.join(1, prompt(7, 5), num_logprobs=1)
    hand.join(2, prompt(8, 5), temperature=0.7, seed=1)
    hand.step(prefill=tuple(chunk(slot, 0, 5) for slot in range(3)))
    for pool in (hand.runner.slow.kv, hand.runner.fast.programs.kv):  # type: ignore[attr-defined]
        pool.k_pool_LPKBH[0, hand.tables[1][0]] = torch.nan
    hand.launch(decode={0: 5, 1: 5, 2: 5})
    slow, fast = hand.runner.slow.collect(), hand.runner.fast.collect()
    assert slow.is_finite_S.tolist() == fast.is_finite_S.tolist() == [True, False, True]
    assert slow.tokens_S[[0, 2]].tolist() == fast.tokens_S[[0, 2]].tolist()


def test_a_plan_without_a_block_is_refused_before_it_writes_anywhere() -> None:
    hand = Hand(twins())
    hand.join(0, prompt(9, 5))
    hand.step(prefill=(chunk(0, 0, 5),))
    bad = StepPlan(step=9, decode_slots_S=np.asarray([0], np.int32), decode_positions_S=np.asarray([8], np.int32))
    with pytest.raises(RunnerError, match="slot 0 has no block for position 8"):
        hand.runner.fast.launch(bad)
    with pytest.raises(RunnerError, match="slot 0 has no block somewhere in positions 6 to 9"):
        hand.runner.fast.launch(StepPlan(step=9, prefill=(chunk(0, 6, 4),)))
    hand.step(decode={0: 5})


def test_batch_sizes_end_with_the_largest() -> None:
    assert batch_sizes(1) == (1,)
    assert batch_sizes(6) == (1, 2, 4, 6)
    assert len(batch_sizes(256)) == 27
    assert batch_sizes(256)[-3:] == (224, 240, 256)
    assert batch_sizes(300)[-3:] == (256, 288, 300)
