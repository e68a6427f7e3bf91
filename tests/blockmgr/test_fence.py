"""Blocks of steps in flight are not handed out before those steps end."""

from collections.abc import Callable

import numpy as np
import pytest

from octavo.blockmgr import BlockManager, OutOfBlocks
from octavo.blockmgr.pool import StepFence

MakeManager = Callable[..., BlockManager]
TEN = np.arange(10, dtype=np.int32)


def test_blocks_wait_for_every_step_begun_before_their_release(make_manager: MakeManager) -> None:
    manager = make_manager()
    slot = manager.admit("a", TEN, reserve_tokens=10).slot
    manager.begin_step(1)
    manager.begin_step(2)
    manager.release(slot, "a")
    manager.begin_step(3)
    free = [manager.num_free]
    for step in (1, 2, 3):
        manager.end_step(step)
        free.append(manager.num_free)
    assert free == [5, 5, 8, 8]


def test_deferred_blocks_count_as_active_and_cannot_be_grown_into(make_manager: MakeManager) -> None:
    manager = make_manager(num_blocks=4)
    slot = manager.admit("a", TEN, reserve_tokens=10).slot
    other = manager.admit("b", TEN, reserve_tokens=1).slot
    manager.begin_step(1)
    manager.release(slot, "a")
    assert (manager.num_active, manager.audit().num_deferred) == (4, 3)
    with pytest.raises(OutOfBlocks):
        manager.grow(other, 5)
    manager.end_step(1)
    assert (manager.num_active, manager.audit().num_deferred) == (1, 0)
    manager.grow(other, 5)


def test_a_deferred_prefix_can_be_hit_and_waits_anew_when_released_again(make_manager: MakeManager) -> None:
    manager = make_manager()
    slot = manager.admit("a", TEN, reserve_tokens=8).slot
    manager.commit(slot, TEN, 8)
    manager.begin_step(1)
    manager.release(slot, "a")
    again = manager.admit("b", TEN)
    assert again.num_cached_tokens == 8
    manager.begin_step(2)
    manager.release(again.slot, "b")
    manager.end_step(1)
    assert (manager.num_cached, manager.audit().num_deferred) == (0, 2)
    manager.end_step(2)
    assert (manager.num_cached, manager.audit().num_deferred) == (2, 0)


def test_deferred_prefixes_are_flushed_too(make_manager: MakeManager) -> None:
    manager = make_manager()
    slot = manager.admit("a", TEN, reserve_tokens=8).slot
    manager.commit(slot, TEN, 8)
    manager.begin_step(1)
    manager.release(slot, "a")
    assert (manager.flush_prefix_cache(), manager.match(TEN), manager.num_active) == (2, 0, 2)
    manager.end_step(1)
    assert (manager.num_free, manager.audit().violations) == (8, ())


def test_deferred_blocks_are_given_up_in_the_order_of_their_release(make_manager: MakeManager) -> None:
    manager = make_manager(num_blocks=4)
    slots = {}
    for name, base in (("a", 0), ("b", 50)):
        slots[name] = manager.admit(name, TEN + base, reserve_tokens=8).slot
        manager.commit(slots[name], TEN + base, 8)
    manager.begin_step(1)
    manager.release(slots["b"], "b")
    manager.release(slots["a"], "a")
    manager.end_step(1)
    manager.admit("c", TEN + 90, reserve_tokens=12)
    assert (manager.match(TEN), manager.match(TEN + 50)) == (4, 0)


def test_what_a_step_held_is_settled_at_once_however_many_were_released(
    make_manager: MakeManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all rows of a batch end together, the device waits for it."""
    manager = make_manager(num_blocks=12)
    slots = [manager.admit(name, TEN + 50 * i, reserve_tokens=8).slot for i, name in enumerate("abc")]
    manager.begin_step(1)
    for slot, name in zip(slots, "abc", strict=True):
        manager.release(slot, name)
    settled, settle = [], manager._pool._settle
    monkeypatch.setattr(manager._pool, "_settle", lambda blocks: (settled.append(len(blocks)), settle(blocks)))
    manager.end_step(1)
    assert settled == [6]
    assert (manager.num_free, manager.audit().violations) == (12, ())


@pytest.mark.parametrize("step", [0, 2, 3, 4])
def test_steps_end_in_order(step: int) -> None:
    fence = StepFence(4)
    fence.begin(1)
    fence.begin(3)
    with pytest.raises(ValueError, match=rf"step {step} ends, in flight are \[1, 3\]"):
        fence.end(step)


def test_steps_begin_in_order_and_nothing_is_held_without_one() -> None:
    fence = StepFence(4)
    with pytest.raises(ValueError, match="no step is in flight"):
        fence.hold(np.array([1], np.int32))
    fence.begin(5)
    with pytest.raises(ValueError, match="step 5 begins after step 5"):
        fence.begin(5)
