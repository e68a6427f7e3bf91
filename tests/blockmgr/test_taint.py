"""What may be wrong is in no index, whichever request holds it."""

from collections.abc import Callable

import numpy as np

from octavo.blockmgr import BlockManager

MakeManager = Callable[..., BlockManager]
TEN = np.arange(10, dtype=np.int32)


def test_tainted_blocks_leave_the_index_and_never_return(make_manager: MakeManager) -> None:
    manager = make_manager()
    slot = manager.admit("a", TEN, reserve_tokens=10).slot
    manager.commit(slot, TEN, 5)
    manager.taint(slot)
    manager.commit(slot, TEN, 10)
    assert manager.match(TEN) == 0
    manager.release(slot, "a")
    assert (manager.num_free, manager.num_cached) == (8, 0)


def test_blocks_are_clean_again_when_they_are_handed_out_anew(make_manager: MakeManager) -> None:
    manager = make_manager()
    slot = manager.admit("a", TEN, reserve_tokens=10).slot
    manager.taint(slot)
    manager.release(slot, "a")
    slot = manager.admit("b", TEN, reserve_tokens=10).slot
    manager.commit(slot, TEN, 10)
    assert manager.match(TEN) == 8


def test_others_keep_what_they_share_but_index_nothing_after_it(make_manager: MakeManager) -> None:
    manager = make_manager()
    first = manager.admit("a", TEN, reserve_tokens=10).slot
    manager.commit(first, TEN, 10)
    second = manager.admit("b", np.arange(13, dtype=np.int32), reserve_tokens=13).slot
    manager.taint(first)
    manager.commit(second, np.arange(13, dtype=np.int32), 13)
    assert manager.match(np.arange(13, dtype=np.int32)) == 0
    assert manager.table_SM[second].tolist() == [0, 1, 3, 4, -1, -1]
    assert manager.audit().violations == ()


def test_a_later_child_and_a_copied_tail_are_tainted_too(make_manager: MakeManager) -> None:
    manager = make_manager()
    parent = manager.admit("p", TEN, reserve_tokens=10).slot
    before = manager.fork(parent, "c", num_tokens=10)
    manager.taint(parent)
    after = manager.fork(parent, "d", num_tokens=10)
    tokens = np.arange(12, dtype=np.int32)
    for slot in (before, after):
        manager.prepare_write(slot, 10)
        manager.commit(slot, tokens, 12)
    assert manager.match(np.arange(13, dtype=np.int32)) == 0
    assert manager.take_events() == []


def test_a_cached_prefix_that_a_tainted_request_hit_is_not_trusted_either(make_manager: MakeManager) -> None:
    manager = make_manager()
    first = manager.admit("a", TEN, reserve_tokens=10).slot
    manager.commit(first, TEN, 10)
    manager.release(first, "a")
    second = manager.admit("b", TEN).slot
    manager.taint(second)
    assert manager.match(TEN) == 0
