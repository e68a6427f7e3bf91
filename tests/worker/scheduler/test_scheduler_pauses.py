"""Requests whose callers do not read: in no step, in nobody's way, and afterwards as if nothing had been."""

from dataclasses import replace

import pytest

from octavo.blockmgr.ids import PrefixCache
from octavo.wire.messages import WireFinishReason
from octavo.worker.scheduler.request import Phase, failure
from tests.support.worker.scheduling import GATEWAY, World, WorldConfig, key

WIDE = WorldConfig(num_blocks=64, block_size=2, max_num_seqs=4, max_batch_tokens=32)


def phase(world: World, handle: int) -> Phase | None:
    request = world.scheduler.requests.find(key(handle))
    return None if request is None else request.phase


def steps(world: World, count: int) -> None:
    for _ in range(count):
        world.step()


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_paused_request_is_in_no_step_and_goes_on_with_the_same_tokens(max_in_flight: int) -> None:
    world = World(replace(WIDE, max_in_flight=max_in_flight))
    world.add(1, [3, 4, 5], max_tokens=20)
    world.add(2, [6, 7, 8], max_tokens=20)
    steps(world, 4)
    num_computed = world.scheduler.counters.num_prefill_tokens
    world.pause(1)
    world.pause(1)
    steps(world, max_in_flight)  # what was in flight still comes
    num_tokens = len(world.streams[key(1)].tokens)
    steps(world, 5)
    assert phase(world, 1) is Phase.PAUSED
    assert len(world.streams[key(1)].tokens) == num_tokens
    assert (world.scheduler.num_running, world.scheduler.num_waiting, world.scheduler.num_paused) == (1, 0, 1)
    world.resume(1)
    world.resume(1)
    world.run()
    world.check_complete()
    world.check_quiet()
    assert world.scheduler.counters.num_prefill_tokens == num_computed  # nothing was computed twice
    assert (world.scheduler.counters.num_pauses, world.scheduler.counters.num_preemptions) == (1, 0)


def test_tokens_of_steps_in_flight_come_after_the_pause_and_may_be_the_last_ones() -> None:
    world = World(replace(WIDE, max_in_flight=2))
    world.add(1, [3, 4], max_tokens=2)
    world.launch()
    world.launch()
    world.pause(1)
    world.collect()
    world.collect()
    assert world.streams[key(1)].tokens == world.expected(key(1))
    world.check_quiet()


def test_nobody_waits_for_the_slot_of_a_paused_request() -> None:
    world = World(replace(WIDE, max_num_seqs=1))
    world.add(1, [3, 4, 5], max_tokens=20)
    steps(world, 5)
    world.pause(1)
    world.add(2, [6, 7, 8], max_tokens=3, priority=-1)
    world.step()
    assert (phase(world, 1), phase(world, 2)) == (Phase.PARKED, Phase.DECODING)
    world.run()
    assert world.streams[key(2)].tokens == world.expected(key(2))
    world.resume(1)
    assert phase(world, 1) is Phase.WAITING
    world.run()
    world.check_complete()
    world.check_quiet()
    finished = world.streams[key(1)].finished
    assert finished is not None
    assert finished.preemptions == 1


def test_what_is_left_in_the_prefix_cache_is_not_computed_again() -> None:
    world = World(replace(WIDE, max_num_seqs=1))
    world.add(1, [3, 4, 5, 6, 7, 8], max_tokens=20)
    steps(world, 5)
    world.pause(1)
    world.add(2, [9, 10], max_tokens=1)
    world.run()
    num_computed = world.scheduler.counters.num_prefill_tokens
    world.resume(1)
    world.run()
    world.check_complete()
    assert world.scheduler.counters.num_prefill_tokens - num_computed <= 2


def test_blocks_of_paused_requests_go_before_anybody_is_preempted() -> None:
    world = World(replace(WIDE, num_blocks=10, prefix_cache=PrefixCache.OFF))
    world.add(1, [3, 4, 5, 6, 7, 8], max_tokens=4, priority=5)
    world.add(2, [3, 4], max_tokens=18)
    steps(world, 2)
    world.pause(1)
    world.run()
    assert phase(world, 1) is Phase.PARKED
    finished = world.streams[key(2)].finished
    assert finished is not None
    assert (finished.reason, finished.preemptions, finished.completion_tokens) == (WireFinishReason.LENGTH, 0, 18)
    world.resume(1)
    world.run()
    world.check_complete()
    world.check_quiet()


def test_a_prompt_that_needs_the_whole_pool_gets_it_from_paused_requests() -> None:
    world = World(replace(WIDE, num_blocks=8, max_batch_tokens=8))
    for handle in (1, 2, 3):
        world.add(handle, [3, 4, handle], max_tokens=4)
    steps(world, 2)
    for handle in (1, 2, 3):
        world.pause(handle)
    world.add(9, [9] * 15, max_tokens=2)
    world.run()
    assert world.streams[key(9)].tokens == world.expected(key(9))
    world.resume_all()
    world.run()
    world.check_complete()
    world.check_quiet()


def test_paused_requests_are_no_work_and_drains_cancels_and_deadlines_end_them() -> None:
    world = World(WIDE)
    for handle, timeout_s in ((1, None), (2, 5.0), (3, None)):
        world.add(handle, [3, 4, handle], max_tokens=20, timeout_s=timeout_s)
    steps(world, 3)
    for handle in (1, 2, 3):
        world.pause(handle)
    assert not world.scheduler.has_work
    assert not world.scheduler.is_empty
    assert world.launch() is None
    world.now_s += 10
    assert world.launch() is None
    world.cancel(1)
    assert phase(world, 2) is None
    world.take(world.scheduler.flush())
    world.resume(3)
    world.run()
    assert world.reasons() == {1: "CANCELLED", 2: "DEADLINE", 3: "LENGTH"}
    world.check_complete()
    world.check_quiet()


def test_a_request_that_waits_or_is_in_its_prompt_can_be_paused_too() -> None:
    world = World(replace(WIDE, max_num_seqs=1, max_chunk_tokens=2))
    world.add(1, [3] * 9, max_tokens=3)
    world.add(2, [4] * 5, max_tokens=3)
    world.step()
    world.pause(1)
    world.pause(2)
    assert (phase(world, 1), phase(world, 2)) == (Phase.PAUSED, Phase.PARKED)
    assert world.launch() is None
    world.resume(1)
    assert phase(world, 1) is Phase.PREFILLING
    world.resume(2)
    world.run()
    world.check_complete()
    world.check_quiet()


def test_outputs_of_one_prompt_are_paused_each_for_itself() -> None:
    world = World(replace(WIDE, num_blocks=24))
    world.add(1, [3, 4, 5], num_outputs=3, max_tokens=8)
    steps(world, 2)
    world.pause(1)
    world.pause(2001)
    world.run()
    assert world.reasons() == {1001: "LENGTH"}
    world.resume_all()
    world.run()
    world.check_complete()
    world.check_quiet()


@pytest.mark.parametrize("paused", [1, 1001])
def test_outputs_that_wait_for_a_prompt_do_not_wait_for_its_reader(paused: int) -> None:
    world = World(replace(WIDE, max_num_seqs=1, max_chunk_tokens=2))
    world.add(1, [3, 4, 5, 6, 7], num_outputs=3, max_tokens=3)
    world.step()
    world.pause(paused)
    world.run()
    assert set(world.reasons()) == {1, 1001, 2001} - {paused}
    world.resume(paused)
    world.run()
    world.check_complete()
    world.check_quiet()


def test_a_step_out_of_memory_leaves_a_paused_request_out_of_the_queue() -> None:
    world = World(replace(WIDE, max_in_flight=2))
    world.add(1, [3, 4, 5], max_tokens=8)
    world.add(2, [3, 4, 5, 6, 7, 8], max_tokens=8)
    steps(world, 2)
    world.pause(1)
    plan = world.plans.pop(0)
    world.in_flight.forget(plan.step)
    world.runner.collect()
    world.take(world.scheduler.fail_out_of_memory(plan.step, "short", now_s=world.now_s))
    assert (phase(world, 1), phase(world, 2)) == (Phase.PARKED, None)
    while world.plans:
        world.collect()
    world.resume(1)
    world.run()
    world.check_complete()
    world.check_quiet()


@pytest.mark.parametrize("end", ["cancel", "deadline", "gateway", "drain"])
def test_a_request_that_ends_while_it_has_lost_its_slot_is_counted_nowhere_any_more(end: str) -> None:
    world = World(replace(WIDE, max_num_seqs=1))
    world.add(1, [3, 4], max_tokens=20, timeout_s=5.0 if end == "deadline" else None)
    steps(world, 3)
    world.pause(1)
    world.add(2, [5, 6], max_tokens=3)
    steps(world, 2)
    assert phase(world, 1) is Phase.PARKED
    match end:
        case "cancel":
            world.cancel(1)
        case "deadline":
            world.now_s += 10
            world.launch()
        case "gateway":
            world.scheduler.drop_gateway(GATEWAY, now_s=world.now_s)
        case "drain":
            world.scheduler.end_all(failure("DRAINING", "over"), now_s=world.now_s)
    assert phase(world, 1) is None
    assert (world.scheduler.num_paused, dict(world.scheduler.requests.parked)) == (0, {})
    assert world.scheduler.num_waiting >= 0
