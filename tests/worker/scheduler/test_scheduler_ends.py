"""Outputs that end: by length, stop tokens, deadlines, cancels, or because the worker says so."""

import pytest

from octavo.wire.messages import Finished, WireFinishReason
from octavo.worker.runners.oracle.model import OracleModel
from octavo.worker.scheduler.request import Ending
from tests.support.worker.plan_checks import Seen
from tests.support.worker.scheduling import World, WorldConfig, key


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_alone_at_the_ceiling_of_the_pool_an_output_ends_by_length(max_in_flight: int) -> None:
    world = World(WorldConfig(num_blocks=4, block_size=2, max_in_flight=max_in_flight))
    world.add(1, [3, 4, 5], max_tokens=50)
    assert world.run() <= 8
    assert world.reasons() == {1: "LENGTH"}
    assert len(world.streams[key(1)].tokens) == 4 * 2 + 1 - 3  # the last token needs no place
    assert world.scheduler.counters.num_preemptions == 0
    world.check_complete()
    world.check_quiet()


def test_a_deadline_in_the_queue_costs_no_prefill() -> None:
    world = World(WorldConfig(max_num_seqs=1))
    world.add(1, [3, 4], max_tokens=5)
    world.add(2, [5, 6], timeout_s=2.0)
    world.run()
    assert world.reasons() == {1: "LENGTH", 2: "DEADLINE"}
    assert not any(2 in seen.joins for seen in world.trace)
    assert world.streams[key(2)].num_started == 0
    finished = world.streams[key(2)].finished
    assert finished is not None
    assert (finished.queue_s, finished.computed_tokens) == (2.0, 0)


def test_a_deadline_while_decoding_stops_it_and_frees_its_blocks_for_the_next_step() -> None:
    world = World(WorldConfig(num_blocks=4, block_size=2))
    world.add(1, [3, 4], max_tokens=6, timeout_s=3.0)
    world.add(2, [5, 6, 7, 8, 9, 10, 11], max_tokens=1)
    for _ in range(3):
        world.step()
    assert world.step_seen() == Seen(joins=(2,), prefill=((2, 0, 7),), samples=(2,))
    world.run()
    world.check_complete()
    assert world.reasons() == {1: "DEADLINE", 2: "LENGTH"}
    assert len(world.streams[key(1)].tokens) == 3


def test_no_time_left_at_arrival_is_a_deadline_at_once() -> None:
    world = World(WorldConfig())
    world.add(1, [3, 4], timeout_s=0.0)
    world.take(world.scheduler.flush())
    assert world.reasons() == {1: "DEADLINE"}


def test_a_key_used_again_is_not_hit_by_the_deadline_of_its_former_holder() -> None:
    world = World(WorldConfig())
    world.add(1, [3, 4], max_tokens=1, timeout_s=3.0)
    world.run()
    world.streams.clear()
    world.add(1, [3, 4], max_tokens=9)
    world.run()
    assert world.reasons() == {1: "LENGTH"}


def test_far_deadlines_of_requests_that_have_ended_take_no_memory() -> None:
    world = World(WorldConfig())
    world.add(1000, [3, 4], timeout_s=3.0)
    for handle in range(1, 500):
        world.add(handle, [3, 4], timeout_s=1e6)
        world.scheduler.cancel(key(handle), now_s=0.0)
    assert len(world.scheduler._deadlines) < 100
    world.now_s = 3.0
    world.launch()
    world.take(world.scheduler.flush())
    assert world.reasons()[1000] == "DEADLINE"


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_cancel_at_any_moment_frees_everything_and_disturbs_nobody(num_steps: int, max_in_flight: int) -> None:
    world = World(WorldConfig(max_in_flight=max_in_flight, max_batch_tokens=4, num_blocks=12))
    world.add(1, list(range(3, 11)), max_tokens=9)
    world.add(2, [3, 4], max_tokens=8)
    for _ in range(num_steps):
        world.step()
    world.launch()
    world.cancel(1)
    world.cancel(1)
    world.cancel(99)
    world.run()
    world.check_complete()
    world.check_quiet()
    assert world.reasons() == {1: "CANCELLED", 2: "LENGTH"}


def test_a_lost_gateway_takes_its_requests_along_in_silence() -> None:
    world = World(WorldConfig())
    world.add(1, [3, 4], gateway=0)
    world.add(2, [3, 4], gateway=1)
    world.step()
    world.scheduler.drop_gateway(key(0, 1).gateway, now_s=world.now_s)
    world.run()
    assert world.streams[key(2, 1)].finished is None
    assert world.reasons() == {1: "LENGTH"}
    world.check_quiet()


def test_stop_tokens_count_from_min_tokens_on() -> None:
    model = OracleModel(vocab_size=50, eos_token_ids=(2,))
    world = World(WorldConfig(model=model))
    world.add(1, [3, 4], max_tokens=6)
    world.run()
    tokens = world.streams[key(1)].tokens
    world.add(2, [3, 4], seed=1, max_tokens=6, stop_token_ids=(tokens[2],))
    world.run()
    finished = world.streams[key(2)].finished
    assert finished is not None
    assert (finished.reason, finished.stop_token_id) == (WireFinishReason.STOP, tokens[2])
    assert world.streams[key(2)].tokens == tokens[:3]
    world.add(3, [3, 4], seed=1, max_tokens=6, stop_token_ids=(tokens[2],), min_tokens=6)
    world.run()
    assert len(world.streams[key(3)].tokens) == 6
    world.check_complete()


def test_ignored_end_tokens_do_not_end() -> None:
    model = OracleModel(vocab_size=50, eos_token_ids=(2, 7), eos_every=2)
    world = World(WorldConfig(model=model))
    world.add(1, [3, 4], max_tokens=9, ignore_eos=True)
    world.add(2, [3, 4], max_tokens=9)
    world.run()
    world.check_complete()
    assert world.reasons() == {1: "LENGTH", 2: "STOP"}


def test_the_end_tells_where_time_and_tokens_went() -> None:
    world = World(WorldConfig(max_num_seqs=1, max_batch_tokens=2))
    world.add(1, [3, 4, 5], max_tokens=1)
    world.add(2, [3, 4, 6, 7], max_tokens=3)
    world.run()
    assert world.streams[key(2)].finished == Finished(
        handle=2,
        reason=WireFinishReason.LENGTH,
        prompt_tokens=4,
        completion_tokens=3,
        cached_tokens=2,
        computed_tokens=2,
        queue_s=2.0,
        prefill_s=0.0,
        decode_s=2.0,
        inter_token_p50_s=1.0,
        inter_token_p99_s=1.0,
        block_seconds=6.0,  # two blocks and, from the first token on, a third
    )


def test_everything_can_be_ended_with_a_reason() -> None:
    world = World(WorldConfig(max_num_seqs=1, max_in_flight=2))
    world.add(1, [3, 4], max_tokens=9)
    world.add(2, [3, 4])
    world.step()
    world.scheduler.end_all(Ending(WireFinishReason.ERROR, error="DRAINING"), now_s=world.now_s)
    world.run()
    assert world.reasons() == {1: "DRAINING", 2: "DRAINING"}
    world.check_quiet()
