"""Several outputs of one prompt: who holds which block, and each output is what a request for it alone would give."""

import pytest

from octavo.blockmgr.ids import PrefixCache
from octavo.worker.scheduler.request import Phase
from tests.support.worker.plan_checks import Seen
from tests.support.worker.scheduling import World, WorldConfig, key

PROMPT = [3, 4, 5, 6, 7]


def blocks_of(world: World, handle: int) -> list[int]:
    """The blocks of a running output, in order."""
    slot = next(int(each.held_slot) for each in world.scheduler.requests.running if each.key == key(handle))
    return [block for block in world.blocks.table_SM[slot].tolist() if block >= 0]


def test_eight_outputs_of_a_prompt_of_a_thousand_tokens_hold_its_blocks_once() -> None:
    config = WorldConfig(num_blocks=200, block_size=16, max_num_seqs=8, max_batch_tokens=256, max_model_len=1200)
    world = World(config)
    world.add(1, [token % 40 + 3 for token in range(1000)], num_outputs=8, max_tokens=20)
    for _ in range(4):
        world.step()
    whole, with_tail = 1000 // 16, -(-1000 // 16)
    assert world.scheduler.num_running == 8
    assert world.blocks.num_active == with_tail  # 62 whole blocks and the one that all eight are going to write to
    world.step()
    assert world.blocks.num_active == whole + 8  # a tail for each: seven copies, one original
    assert [blocks_of(world, 1 + 1000 * index)[:whole] for index in range(8)] == [blocks_of(world, 1)[:whole]] * 8
    world.run()
    world.check_complete()
    world.check_quiet()
    assert world.scheduler.counters.num_prefill_tokens == 1000


def test_forks_join_with_the_last_chunk_and_decode_from_the_next_step_on() -> None:
    world = World(WorldConfig(max_batch_tokens=4))
    world.add(1, PROMPT, num_outputs=3)
    assert world.step_seen() == Seen(joins=(1,), prefill=((1, 0, 4),))
    assert world.step_seen() == Seen(joins=(1001, 2001), prefill=((1, 4, 1),), samples=(1,))
    assert world.step_seen() == Seen(decode=((1, 5), (1001, 5), (2001, 5)))
    assert [len(stream.tokens) for stream in world.streams.values()] == [2, 2, 2]
    assert [stream.num_started for stream in world.streams.values()] == [1, 1, 1]


@pytest.mark.parametrize("prefix_cache", list(PrefixCache))
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_more_outputs_than_may_run_run_one_after_the_other(prefix_cache: PrefixCache, max_in_flight: int) -> None:
    world = World(WorldConfig(max_num_seqs=2, prefix_cache=prefix_cache, max_in_flight=max_in_flight))
    world.add(1, PROMPT, num_outputs=7, max_tokens=6)
    world.run()
    world.check_complete()
    world.check_quiet()
    assert set(world.reasons().values()) == {"LENGTH"}
    if prefix_cache is PrefixCache.ON:
        assert world.scheduler.counters.num_prefill_tokens < 2 * len(PROMPT)


def test_outputs_fork_only_as_far_as_there_is_a_block_for_each_to_write_to() -> None:
    """Else they would be preempted as soon as they write."""
    world = World(WorldConfig(num_blocks=7, block_size=2, max_num_seqs=6))
    world.add(1, PROMPT, num_outputs=6, max_tokens=2)
    assert world.step_seen() == Seen(joins=(1, 1001, 2001), prefill=((1, 0, 5),), samples=(1,))
    world.run()
    world.check_complete()
    assert world.scheduler.counters.num_preemptions == 0


def test_an_output_that_is_cancelled_leaves_the_others() -> None:
    world = World(WorldConfig())
    world.add(1, PROMPT, num_outputs=4)
    world.cancel(2001)
    world.step()
    world.cancel(1)
    world.run()
    world.check_complete()
    world.check_quiet()
    assert world.reasons() == {1: "CANCELLED", 1001: "LENGTH", 2001: "CANCELLED", 3001: "LENGTH"}


def test_where_the_first_output_goes_before_its_prompt_is_computed_the_next_one_computes_it() -> None:
    world = World(WorldConfig(max_batch_tokens=4))
    world.add(1, PROMPT, num_outputs=3)
    world.step()
    world.cancel(1)
    assert [request.phase for request in world.scheduler.requests] == [Phase.WAITING, Phase.FOLLOWING]
    world.run()
    world.check_complete()
    assert world.reasons() == {1: "CANCELLED", 1001: "LENGTH", 2001: "LENGTH"}


def test_a_preempted_fork_is_computed_again_alone() -> None:
    world = World(WorldConfig(prefix_cache=PrefixCache.OFF))
    world.add(1, PROMPT, num_outputs=3, max_tokens=8)
    for _ in range(3):
        world.step()
    table = world.scheduler.requests
    table.preempt(next(each for each in table.running if each.key == key(1001)), world.now_s)
    world.run()
    world.check_complete()
    finished = {which.handle: stream.finished for which, stream in world.streams.items()}
    assert {handle: each.preemptions for handle, each in finished.items() if each} == {1: 0, 1001: 1, 2001: 0}
    assert {handle: each.computed_tokens for handle, each in finished.items() if each} == {1: 5, 1001: 8, 2001: 0}


def test_a_prompt_that_waits_goes_before_forks_of_a_later_one() -> None:
    world = World(WorldConfig(max_num_seqs=2, max_batch_tokens=16))
    world.add(1, [9, 8, 7], max_tokens=8)
    world.step()
    world.add(2, PROMPT, num_outputs=3)
    world.add(3, [5, 5, 5], priority=1)
    seen = world.step_seen()
    assert seen is not None
    assert seen.joins == (3,)
    world.run()
    world.check_complete()


def test_a_queue_without_room_for_all_outputs_refuses_all() -> None:
    world = World(WorldConfig(max_num_seqs=2, max_waiting=1))
    world.add(1, PROMPT, num_outputs=4)
    world.add(2, PROMPT, num_outputs=3)
    world.run()
    assert world.reasons() == {
        **dict.fromkeys((1, 1001, 2001, 3001), "QUEUE_FULL"),
        **dict.fromkeys((2, 1002, 2002), "LENGTH"),
    }


def test_a_deadline_ends_every_output_also_those_that_follow() -> None:
    world = World(WorldConfig(max_num_seqs=2))
    world.add(1, PROMPT, num_outputs=4, max_tokens=40, timeout_s=3.0)
    world.run()
    assert set(world.reasons().values()) == {"DEADLINE"}
    world.check_quiet()


def test_masks_that_leave_nothing_end_the_output_without_a_token() -> None:
    world = World(WorldConfig())
    world.add(1, PROMPT, allowed_token_ids=(5, 6), bad_words=((5, 6), (6, 5), (5, 5), (6, 6)), max_tokens=8)
    world.add(2, PROMPT, max_tokens=3)
    world.run()
    first, second = world.streams.values()
    assert (len(first.tokens), first.finished and first.finished.completion_tokens) == (1, 1)
    assert world.reasons() == {1: "STOP", 2: "LENGTH"}
    assert (first.finished and first.finished.stop_token_id, len(second.tokens)) == (None, 3)
    world.check_quiet()


def test_further_outputs_take_no_slot_that_another_tenant_has_the_turn_for() -> None:
    """One output each is in; then the tenant that has been served less is next, not the one that asked for eight."""
    world = World(WorldConfig(max_num_seqs=3, num_blocks=64, max_batch_tokens=64))
    world.add(1, [3, 4, 5, 6], max_tokens=12, num_outputs=8, tenant="many")
    world.add(2, [7, 8], max_tokens=12, tenant="few")
    seen = []
    for _ in range(3):
        world.step()
        seen.append(sorted(request.run.tenant for request in world.scheduler.requests.running))
    assert seen == [["few", "many"], ["few", "many", "many"], ["few", "many", "many"]]
    world.run()
    world.check_complete()
    world.check_quiet()


def test_alone_all_outputs_that_fit_fork_at_once() -> None:
    world = World(WorldConfig(max_num_seqs=3, num_blocks=64, max_batch_tokens=64))
    world.add(1, [3, 4, 5, 6], max_tokens=12, num_outputs=8, tenant="many")
    world.add(2, [7, 8], max_tokens=12, tenant="many")
    world.step()
    assert [request.key.handle for request in world.scheduler.requests.running] == [1, 1001, 2001]
