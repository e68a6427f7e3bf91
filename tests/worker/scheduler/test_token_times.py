"""Gaps between tokens, and blocks over time, against sums by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.worker.scheduler.request import block_seconds, gap_percentiles, tick
from tests.support.worker.scheduling import World, WorldConfig


@given(st.lists(st.integers(1, 10**9), max_size=50), st.integers(0, 2**33))
def test_percentiles_are_numpys_also_where_ticks_wrap(gaps: list[int], start: int) -> None:
    ticks_T = (np.cumsum([start, *gaps]) % 2**32).astype(np.uint32)
    expected = (np.percentile(gaps, [50, 99]) / 1e6).tolist() if gaps else [0.0, 0.0]
    assert list(gap_percentiles(ticks_T)) == pytest.approx(expected)


def test_no_token_and_one_have_no_gap() -> None:
    assert gap_percentiles(np.empty(0, np.uint32)) == (0.0, 0.0)
    assert gap_percentiles(np.zeros(1, np.uint32)) == (0.0, 0.0)


def test_blocks_that_come_later_count_from_then() -> None:
    start_s = 4294.0  # ticks wrap at 4294.967 s
    ticks_T = np.asarray([tick(start_s + index) for index in range(8)], np.uint32)
    # 3 tokens in 2 blocks of 2 from second 0; blocks of tokens 4 and 6 from then; now is second 8.
    seconds = block_seconds(ticks_T, since_s=start_s, now_s=start_s + 8, block_size=2, num_tokens_then=3, num_blocks=4)
    assert seconds == pytest.approx(2 * 8 + 4 + 2, abs=1e-4)


def test_a_block_may_be_held_for_hours() -> None:
    hour_s = 3600.0
    ticks_T = np.asarray([tick(index * hour_s) for index in range(5)], np.uint32)
    seconds = block_seconds(ticks_T, since_s=0.0, now_s=5 * hour_s, block_size=2, num_tokens_then=1, num_blocks=3)
    assert seconds == pytest.approx((5 + 3 + 1) * hour_s, abs=1e-3)


def test_a_receipt_has_gaps_and_blocks_over_preemptions() -> None:
    world = World(WorldConfig(num_blocks=8, block_size=2, max_num_seqs=2, max_batch_tokens=16))
    low = world.add(1, [3, 4, 5, 6], max_tokens=6, priority=0)
    for _ in range(3):
        world.step()  # one token each at seconds 0, 1, 2
    high = world.add(2, list(range(3, 15)), max_tokens=2, priority=1)
    world.run()
    world.check_complete()
    finished = world.streams[low].finished
    assert finished is not None
    assert finished.preemptions > 0
    # Six tokens a second apart, but for the time out of its slot.
    gaps = sorted([1.0] * 4 + [finished.decode_s - 4])
    assert finished.decode_s > 5
    assert finished.inter_token_p50_s == pytest.approx(1.0, abs=1e-5)
    assert finished.inter_token_p99_s == pytest.approx(np.percentile(gaps, 99), abs=1e-5)
    other = world.streams[high].finished
    assert other is not None
    assert (other.inter_token_p50_s, other.inter_token_p99_s) == (pytest.approx(1.0), pytest.approx(1.0))
    assert other.block_seconds == pytest.approx(7, abs=1e-4)  # 12 tokens in 6 blocks and one more, seconds 3 to 4


def test_a_request_that_ends_before_its_next_token_had_its_last_one_before_the_preemption() -> None:
    world = World(WorldConfig(num_blocks=8, block_size=2, max_num_seqs=2, max_batch_tokens=16))
    low = world.add(1, [3, 4, 5, 6], max_tokens=6, priority=0)
    for _ in range(3):
        world.step()  # one token each at seconds 0, 1, 2
    world.add(2, list(range(3, 15)), max_tokens=2, priority=1)
    request = world.scheduler.requests.find(low)
    assert request is not None
    for is_running in (False, True):
        while request.is_running != is_running:
            world.launch()
            if request.is_running != is_running:
                world.step()
    num_tokens = len(world.streams[low].tokens)
    world.cancel(1)
    world.run()
    finished = world.streams[low].finished
    assert finished is not None
    assert (finished.preemptions, finished.completion_tokens) == (1, num_tokens)
    assert finished.decode_s == num_tokens - 1


def test_a_traced_request_says_when_it_had_no_slot_and_another_one_does_not() -> None:
    ids = f"00-{'a' * 32}-{'b' * 16}"
    for traceparent, is_told in (("", False), (f"{ids}-00", False), (f"{ids}-01", True)):
        world = World(WorldConfig(num_blocks=8, block_size=2, max_num_seqs=2, max_batch_tokens=16))
        low = world.add(1, [3, 4, 5, 6], max_tokens=6, priority=0, traceparent=traceparent)
        for _ in range(3):
            world.step()  # one token each at seconds 0, 1, 2
        world.add(2, list(range(3, 15)), max_tokens=2, priority=1, traceparent=traceparent)
        world.run()
        finished = world.streams[low].finished
        assert finished is not None
        assert finished.preemptions > 0
        assert len(finished.preempted) == (finished.preemptions if is_told else 0)
        for lost_s, back_s in finished.preempted:
            assert finished.queue_s + finished.prefill_s <= lost_s <= back_s
            assert back_s <= finished.queue_s + finished.prefill_s + finished.decode_s


def test_the_sum_of_receipts_is_what_the_pool_saw() -> None:
    world = World(WorldConfig(num_blocks=10, block_size=2, max_num_seqs=3, max_in_flight=1))
    for handle in range(5):
        world.add(handle, list(range(3, 6 + handle)), max_tokens=5, salt=str(handle))
    held = 0.0
    while world.scheduler.has_work:
        before = {id(request): request for request in world.scheduler.requests.running}
        world.step()  # one second
        held += sum(
            world.blocks.capacity(request.held_slot) // 2 for request in before.values() if request.slot is not None
        )
    told = sum(stream.finished.block_seconds for stream in world.streams.values() if stream.finished)
    num_steps = len(world.trace)
    assert abs(told - held) <= 2 * num_steps * 3  # to within a step or two for each block that came or went
    assert told > 0
