"""Requests that the scheduler does not take, and settings with which there is none."""

from typing import Any

import pytest

from octavo.blockmgr.manager import BlockManager
from octavo.wire.messages import Finished, WireFinishReason
from octavo.worker.config import SchedulerConfig
from octavo.worker.scheduler.scheduler import Scheduler
from tests.support.worker.plan_checks import Seen
from tests.support.worker.scheduling import World, WorldConfig, key


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


@pytest.mark.parametrize(
    ("prompt", "sampling", "error"),
    [
        ([], {}, "prompt_ids: the prompt is empty"),
        ([3, 50], {}, "prompt_ids: 50 is not in [0, 50)"),
        ([3, -1], {}, "prompt_ids: -1 is not in [0, 50)"),
        ([3], {"max_tokens": 0}, "sampling.max_tokens: 0 is below 1"),
        ([3], {"min_tokens": 2**31 - 1, "max_tokens": 2**31}, "sampling.min_tokens: 2147483647 is not in [0, 64]"),
        ([3], {"min_tokens": -1}, "sampling.min_tokens: -1 is not in [0, 64]"),
        ([3], {"stop_token_ids": (4, 2**31)}, "sampling.stop_token_ids: 2147483648 is not in [0, 50)"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(prompt: list[int], sampling: dict[str, Any], error: str) -> None:
    world = World(WorldConfig())
    world.add(1, prompt, **sampling)
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
