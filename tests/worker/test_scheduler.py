"""What the scheduler puts into a step, plan by plan. The oracle says what the tokens must be."""

import numpy as np
import pytest

from blockmgr.manager import BlockManager
from tests.support.plan_checks import Seen
from tests.support.scheduling import World, WorldConfig, key
from wire.messages import Finished, WireFinishReason
from worker.config import SchedulerConfig
from worker.oracle_model import OracleModel
from worker.plan import StepResult
from worker.request import Ending, Phase
from worker.scheduler import Scheduler


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


def test_whoever_waited_long_enough_goes_before_higher_priorities() -> None:
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


def test_a_request_too_long_for_the_pool_is_refused_at_once_and_nobody_waits_behind_it() -> None:
    world = World(WorldConfig(num_blocks=4, block_size=2))
    world.add(1, [3] * 8)
    world.add(2, [3, 4], max_tokens=1)
    assert world.take(world.scheduler.flush()).keys() == {0}
    assert world.reasons() == {1: "EXCEEDS_CAPACITY"}
    assert world.step_seen() == Seen(joins=(2,), prefill=((2, 0, 2),), samples=(2,))


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    world = World(WorldConfig(max_model_len=8))
    world.add(1, [3] * 8)
    world.add(2, [3] * 7)
    world.run()
    assert world.reasons() == {1: "EXCEEDS_CAPACITY", 2: "LENGTH"}
    assert len(world.streams[key(2)].tokens) == 1


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


@pytest.mark.parametrize(
    ("prompt", "sampling", "error"),
    [
        ([], {}, "prompt_ids: the prompt is empty"),
        ([3, 50], {}, "prompt_ids: 50 is not in [0, 50)"),
        ([3, -1], {}, "prompt_ids: -1 is not in [0, 50)"),
        ([3], {"max_tokens": 0}, "sampling.max_tokens: 0 is below 1"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(prompt: list[int], sampling: dict[str, int], error: str) -> None:
    world = World(WorldConfig())
    world.add(1, prompt, **sampling)  # type: ignore[arg-type]
    world.take(world.scheduler.flush())
    finished = world.streams[key(1)].finished
    assert finished == Finished(
        handle=1, reason=WireFinishReason.ERROR, error="INVALID_FIELD", detail=error, prompt_tokens=len(prompt)
    )


def test_a_full_queue_refuses_and_a_draining_worker_too() -> None:
    world = World(WorldConfig(max_num_seqs=1, max_waiting=1))
    for handle in (1, 2, 3):
        world.add(handle, [3, 4])
    world.scheduler.drain()
    world.add(4, [3, 4])
    world.take(world.scheduler.flush())
    assert world.reasons() == {3: "QUEUE_FULL", 4: "DRAINING"}
    world.run()
    assert world.reasons() == {1: "LENGTH", 2: "LENGTH", 3: "QUEUE_FULL", 4: "DRAINING"}


def test_a_key_in_use_is_ignored_and_counted() -> None:
    world = World(WorldConfig())
    world.add(1, [3, 4, 5])
    world.add(1, [6, 7])
    world.run()
    world.check_complete()
    assert world.scheduler.counters.num_duplicates == 1


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


def test_outputs_are_grouped_by_gateway_and_say_who_started() -> None:
    world = World(WorldConfig(max_batch_tokens=16))
    for handle, gateway in ((1, 0), (2, 1), (3, 0)):
        world.add(handle, [3, 4, handle], gateway=gateway, max_tokens=2)
    world.launch()
    outputs = world.collect()
    seen = {gateway: (output.handles_N.tolist(), output.started) for gateway, output in outputs.items()}
    assert seen == {0: ([1, 3], (1, 3)), 1: ([2], (2,))}
    assert [output.tokens_N.dtype for output in outputs.values()] == [np.int32, np.int32]


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


def test_logprobs_come_with_their_tokens_for_those_who_asked() -> None:
    world = World(WorldConfig())
    world.add(1, [3, 4], max_tokens=3, num_logprobs=2)
    world.add(2, [3, 4], max_tokens=3)
    world.run()
    stream = world.streams[key(1)]
    assert [logprobs.top_ids[0] for logprobs in stream.logprobs] == stream.tokens
    assert world.streams[key(2)].logprobs == []


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
    request = world.scheduler.roster.find(key(1))
    assert request is not None
    phases = [request.phase]
    while world.scheduler.has_work:
        world.step()
        phases.append(request.phase)
    assert phases == [Phase.WAITING, Phase.PREFILLING, Phase.DECODING, Phase.FINISHED]


@pytest.mark.parametrize(
    ("field", "value"), [("max_num_seqs", 0), ("max_batch_tokens", 3), ("max_chunk_tokens", 0), ("aging_s", -1.0)]
)
def test_a_configuration_that_cannot_work_is_refused_by_field(field: str, value: float) -> None:
    settings = {"max_model_len": 8, "vocab_size": 8, "max_num_seqs": 4, "max_batch_tokens": 8}
    with pytest.raises(ValueError, match=field):
        SchedulerConfig(**{**settings, field: value})  # type: ignore[arg-type]


def test_more_running_requests_than_slots_is_refused_at_the_start() -> None:
    blocks = BlockManager(WorldConfig(max_num_seqs=2).blocks())
    with pytest.raises(ValueError, match=r"max_num_seqs \(3\) is more than the 2 slots"):
        Scheduler(WorldConfig(max_num_seqs=3).scheduler(), blocks)
