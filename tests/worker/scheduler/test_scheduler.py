"""What the scheduler puts into a step, plan by plan. The oracle says what the tokens must be."""

import numpy as np
import pytest

from octavo.worker.runners.oracle.model import OracleModel
from octavo.worker.scheduler.plan import StepResult
from octavo.worker.scheduler.request import Phase
from tests.support.worker.plan_checks import Seen
from tests.support.worker.scheduling import World, WorldConfig, key


def test_decode_goes_first_and_prefill_takes_what_is_left() -> None:
    world = World(WorldConfig(max_batch_tokens=8))
    world.add(1, [3, 4, 5])
    assert world.step_seen() == Seen(joins=(1,), prefill=((1, 0, 3),), samples=(1,))
    world.add(2, list(range(20, 30)))
    assert world.step_seen() == Seen(joins=(2,), prefill=((2, 0, 7),), decode=((1, 3),))
    assert world.step_seen() == Seen(prefill=((2, 7, 3),), samples=(2,), decode=((1, 4),))
    assert world.step_seen() == Seen(decode=((1, 5), (2, 10)))
    world.run()
    world.check_complete()
    world.check_quiet()


def test_a_chunk_limit_lets_short_prompts_pass_a_long_one() -> None:
    world = World(WorldConfig(max_batch_tokens=8, max_chunk_tokens=5))
    world.add(1, list(range(3, 15)))
    world.add(2, [3, 4])
    assert world.step_seen() == Seen(joins=(1, 2), prefill=((1, 0, 5), (2, 0, 2)), samples=(2,))
    assert world.step_seen() == Seen(prefill=((1, 5, 5),), decode=((2, 2),))


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_step_goes_on_with_no_more_prompts_than_the_runner_has_recorded(max_in_flight: int) -> None:
    """Prompts that are cached but for a few tokens are many in a budget."""
    config = WorldConfig(
        num_blocks=400,
        max_num_seqs=40,
        max_batch_tokens=64,
        max_chunks=6,
        max_chunk_tokens=3,
        max_in_flight=max_in_flight,
    )
    world = World(config)
    prompts = [[i, *range(7)] for i in range(40)]
    for turn in (0, 1):
        for i, prompt in enumerate(prompts):
            world.add(100 * turn + i, prompt, max_tokens=12)
        sizes = []
        while world.scheduler.has_work:
            plan = world.step()
            sizes.append(len(plan.prefill) if plan else 0)
        assert max(sizes) == 6
        if turn:
            assert sizes[:5] == [6] * 5  # nobody waits for more than it takes to see all of them
    world.check_complete()
    world.check_quiet()


def test_nothing_to_do_is_no_plan() -> None:
    world = World(WorldConfig())
    assert world.scheduler.plan(now_s=0.0) is None
    assert world.scheduler.flush() == {}


def test_a_prompt_seen_before_is_not_computed_again_but_for_its_last_token() -> None:
    world = World(WorldConfig(block_size=2))
    world.add(1, [3, 4, 5, 6], max_tokens=1)
    world.run()
    world.add(2, [3, 4, 5, 6], max_tokens=1)
    assert world.step_seen() == Seen(joins=(2,), prefill=((2, 2, 2),), samples=(2,))
    finished = world.streams[key(2)].finished
    assert finished is not None
    assert (finished.cached_tokens, finished.computed_tokens) == (2, 2)
    world.check_complete()


def test_another_salt_finds_nothing_in_the_cache() -> None:
    world = World(WorldConfig(block_size=2))
    world.add(1, [3, 4, 5, 6], max_tokens=1, salt="a")
    world.run()
    world.add(2, [3, 4, 5, 6], max_tokens=1, salt="b")
    assert world.step_seen() == Seen(joins=(2,), prefill=((2, 0, 4),), samples=(2,))


def test_generated_tokens_are_reused_by_the_next_turn() -> None:
    world = World(WorldConfig(block_size=2))
    world.add(1, [3, 4, 5], max_tokens=4)
    world.run()
    turn = [3, 4, 5, *world.streams[key(1)].tokens]
    world.add(2, [*turn, 9], max_tokens=1)
    assert world.step_seen() == Seen(joins=(2,), prefill=((2, 6, 2),), samples=(2,))


def test_one_step_ahead_decodes_at_positions_known_without_the_token() -> None:
    world = World(WorldConfig(max_in_flight=2))
    world.add(1, [3, 4, 5], max_tokens=4)
    assert world.seen(world.launch()) == Seen(joins=(1,), prefill=((1, 0, 3),), samples=(1,))
    assert world.seen(world.launch()) == Seen(decode=((1, 3),))
    assert world.launch() is None  # two are in flight
    world.collect()
    assert world.seen(world.launch()) == Seen(decode=((1, 4),))
    world.collect()
    assert world.seen(world.launch()) == Seen(decode=((1, 5),))
    world.collect()
    assert world.launch() is None  # the fourth token is in flight: a fifth would surely be one too many
    world.collect()
    world.check_complete()
    world.check_quiet()


def test_the_token_after_an_end_token_found_late_is_dropped() -> None:
    world = World(WorldConfig(max_in_flight=2, model=OracleModel(vocab_size=50, eos_every=1)))
    world.add(1, [3, 4, 5], min_tokens=1, max_tokens=9)
    world.run()
    world.check_complete()
    world.check_quiet()
    assert world.streams[key(1)].tokens[-1] == 2
    assert (len(world.streams[key(1)].tokens), world.scheduler.counters.num_dropped_tokens) == (2, 1)


def test_a_late_result_is_not_given_to_the_next_holder_of_the_slot() -> None:
    world = World(WorldConfig(max_in_flight=2, max_num_seqs=1))
    world.add(1, [3, 4, 5], max_tokens=9)
    world.launch()
    world.launch()
    world.add(2, [6, 7], max_tokens=2)
    world.cancel(1)
    world.collect()  # of request 1, which is gone
    assert world.seen(world.launch()) == Seen(joins=(2,), prefill=((2, 0, 2),), samples=(2,))
    world.collect()  # of request 1 again, while request 2 has its slot
    assert world.streams[key(2)].tokens == []
    world.run()
    world.check_complete()
    world.check_quiet()
    assert world.reasons() == {1: "CANCELLED", 2: "LENGTH"}


def test_higher_priority_goes_first_and_equals_in_order_of_arrival() -> None:
    world = World(WorldConfig(max_num_seqs=1, max_batch_tokens=4))
    for handle, priority in ((1, 0), (2, 0), (3, 5), (4, 5)):
        world.add(handle, [3, 4], max_tokens=1, priority=priority)
    order = [seen.joins[0] for _ in range(4) if (seen := world.step_seen())]
    assert order == [3, 4, 1, 2]


def test_a_request_that_waited_long_enough_goes_before_higher_priorities() -> None:
    world = World(WorldConfig(max_num_seqs=1, max_batch_tokens=4, aging_s=3.0))
    world.add(1, [3, 4], max_tokens=1, priority=0)
    order = []
    for handle in range(2, 8):
        world.add(handle, [3, 4], max_tokens=1, priority=9)
        seen = world.step_seen()
        assert seen is not None
        order.append(seen.joins[0])
    assert order == [2, 3, 4, 1, 5, 6]


def test_a_higher_priority_takes_the_slot_of_a_lower_one_which_then_resumes() -> None:
    world = World(WorldConfig(max_num_seqs=1, max_batch_tokens=4))
    world.add(1, [3, 4], max_tokens=6)
    world.step_seen()
    world.step_seen()
    world.add(2, [5, 6], max_tokens=1, priority=1)
    assert world.step_seen() == Seen(joins=(2,), prefill=((2, 0, 2),), samples=(2,))
    assert world.step_seen() == Seen(joins=(1,), prefill=((1, 2, 2),), samples=(1,))  # its first block is still cached
    world.run()
    world.check_complete()
    finished = world.streams[key(1)].finished
    assert finished is not None
    assert finished.preemptions == 1


def test_when_blocks_run_out_the_latest_gives_way_and_goes_on_as_if_nothing_had_happened() -> None:
    world = World(WorldConfig(num_blocks=5, block_size=2, max_batch_tokens=8))
    world.add(1, [3, 4, 5], max_tokens=6)
    world.add(2, [6, 7, 8], max_tokens=6)
    world.run()
    world.check_complete()
    world.check_quiet()
    ends = [world.streams[key(handle)].finished for handle in (1, 2)]
    assert [end.preemptions for end in ends if end] == [0, 1]


def test_outputs_are_grouped_by_gateway_and_say_who_started() -> None:
    world = World(WorldConfig(max_batch_tokens=16))
    for handle, gateway in ((1, 0), (2, 1), (3, 0)):
        world.add(handle, [3, 4, handle], gateway=gateway, max_tokens=2)
    world.launch()
    outputs = world.collect()
    seen = {gateway: (output.handles_N.tolist(), output.started) for gateway, output in outputs.items()}
    assert seen == {0: ([1, 3], (1, 3)), 1: ([2], (2,))}
    assert [output.tokens_N.dtype for output in outputs.values()] == [np.int32, np.int32]


def test_logprobs_come_with_their_tokens_for_those_who_asked() -> None:
    world = World(WorldConfig())
    world.add(1, [3, 4], max_tokens=3, num_logprobs=2)
    world.add(2, [3, 4], max_tokens=3)
    world.run()
    stream = world.streams[key(1)]
    assert [logprobs.top_ids[0] for logprobs in stream.logprobs] == stream.tokens
    assert world.streams[key(2)].logprobs == []


def test_a_result_of_another_step_is_our_own_defect_and_changes_nothing() -> None:
    world = World(WorldConfig())
    world.add(1, [3, 4])
    plan = world.launch()
    assert plan is not None
    wrong = StepResult(step=plan.step + 1, tokens_S=np.zeros(1, np.int32), is_finite_S=np.ones(1, np.bool_))
    with pytest.raises(ValueError, match=r"step 2 ended, in flight are \[1\]"):
        world.scheduler.apply(wrong, now_s=0.0)
    assert world.scheduler.num_in_flight == 1
    world.run()
    world.check_complete()


def test_a_request_is_in_one_phase_at_a_time() -> None:
    world = World(WorldConfig(max_batch_tokens=4, max_num_seqs=1))
    world.add(1, [3, 4, 5, 6, 7], max_tokens=2)
    request = world.scheduler.requests.find(key(1))
    assert request is not None
    phases = [request.phase]
    while world.scheduler.has_work:
        world.step()
        phases.append(request.phase)
    assert phases == [Phase.WAITING, Phase.PREFILLING, Phase.DECODING, Phase.FINISHED]
