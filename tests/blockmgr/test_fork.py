"""Copy-on-write: what forks share, and when they stop."""

from collections.abc import Callable

import numpy as np
import pytest

from octavo.blockmgr import BlockManager, OutOfBlocks
from octavo.blockmgr.prefix_index import hash_block
from tests.support.blockmgr.state import full_state

MakeManager = Callable[..., BlockManager]
TEN = np.arange(10, dtype=np.int32)


def parent_of_ten(manager: BlockManager) -> int:
    slot = int(manager.admit("p", TEN, reserve_tokens=10).slot)
    manager.commit(slot, TEN, 10)
    manager.take_updates()
    return slot


def row(manager: BlockManager, slot: int) -> list[int]:
    return [block for block in manager.table_SM[slot].tolist() if block >= 0]


def test_children_share_every_block_until_they_write(make_manager: MakeManager) -> None:
    manager = make_manager()
    parent = parent_of_ten(manager)
    children = [manager.fork(parent, name, num_tokens=10) for name in ("c", "d")]
    assert [row(manager, slot) for slot in children] == [[0, 1, 2], [0, 1, 2]]
    assert manager.num_active == 3
    assert manager.take_updates()[0].tolist() == [[s, c, c] for s in children for c in range(3)]


def test_the_first_write_copies_the_shared_tail_and_the_last_owner_writes_in_place(make_manager: MakeManager) -> None:
    manager = make_manager()
    parent = parent_of_ten(manager)
    child = manager.fork(parent, "c", num_tokens=10)
    manager.take_updates()
    manager.prepare_write(child, 10)
    manager.prepare_write(parent, 10)
    updates_U3, copies_C2 = manager.take_updates()
    assert (updates_U3.tolist(), copies_C2.tolist()) == ([[child, 2, 3]], [[2, 3]])
    assert (row(manager, parent), row(manager, child)) == ([0, 1, 2], [0, 1, 3])
    assert manager.audit().violations == ()


def test_eight_samples_of_a_long_prompt_hold_its_blocks_once(make_manager: MakeManager) -> None:
    manager = make_manager(num_blocks=100, block_size=16, max_slots=8, max_blocks_per_slot=70)
    prompt = np.arange(1000, dtype=np.int32)
    parent = manager.admit("p0", prompt, reserve_tokens=1000).slot
    slots = np.array([parent, *(manager.fork(parent, f"p{i}", num_tokens=1000) for i in range(1, 8))], np.int32)
    assert manager.num_active == 63
    assert manager.grow_many(slots, np.full(8, 1001)).tolist() == []
    assert manager.prepare_write_many(slots, np.full(8, 1000)).tolist() == []
    assert manager.num_active == 62 + 8
    assert len(manager.take_updates()[1]) == 7


def test_a_copy_of_a_copy_reads_the_block_that_holds_the_content(make_manager: MakeManager) -> None:
    manager = make_manager()
    parent = parent_of_ten(manager)
    child = manager.fork(parent, "c", num_tokens=10)
    manager.prepare_write(child, 10)
    grandchild = manager.fork(child, "g", num_tokens=10)
    manager.prepare_write(grandchild, 10)
    assert manager.take_updates()[1].tolist() == [[2, 3], [2, 4]]


def test_the_source_of_a_copy_is_not_handed_out_before_the_copy_is_done(make_manager: MakeManager) -> None:
    manager = make_manager(num_blocks=5)
    parent = parent_of_ten(manager)
    child = manager.fork(parent, "c", num_tokens=10)
    manager.prepare_write(child, 10)
    manager.release(parent, "p")
    assert (manager.num_free, manager.num_active) == (1, 4)  # blocks 0, 1 and 3 of the child, and source 2
    assert manager.take_updates()[1].tolist() == [[2, 3]]
    manager.begin_step(1)
    assert manager.num_free == 1
    manager.end_step(1)
    assert (manager.num_free, manager.audit().violations) == (2, ())


def test_a_copy_into_a_block_that_was_released_is_dropped(make_manager: MakeManager) -> None:
    manager = make_manager()
    parent = parent_of_ten(manager)
    child = manager.fork(parent, "c", num_tokens=10)
    manager.prepare_write(child, 10)
    manager.release(child, "c")
    updates_U3, copies_C2 = manager.take_updates()
    assert (updates_U3.tolist(), copies_C2.tolist()) == ([], [])
    assert (manager.num_active, manager.audit().violations) == (3, ())


def test_no_block_for_a_copy_changes_nothing(make_manager: MakeManager) -> None:
    manager = make_manager(num_blocks=3)
    parent = parent_of_ten(manager)
    child = manager.fork(parent, "c", num_tokens=10)
    before = full_state(manager)
    with pytest.raises(OutOfBlocks, match="1 blocks wanted, 0 free"):
        manager.prepare_write(child, 10)
    assert manager.prepare_write_many(np.array([parent, child], np.int32), np.array([10, 10])).tolist() == [
        parent,
        child,
    ]
    assert full_state(manager) == before


def test_a_block_that_is_written_again_leaves_the_index_first(make_manager: MakeManager) -> None:
    manager = make_manager()
    parent = parent_of_ten(manager)
    child = manager.fork(parent, "c", num_tokens=6)  # shares block 1, but only half of what is in it
    manager.release(parent, "p")
    assert manager.match(TEN) == 8
    manager.prepare_write(child, 6)
    assert (manager.match(TEN), manager.take_updates()[1].tolist()) == (4, [])
    manager.commit(child, np.array([0, 1, 2, 3, 4, 5, 90, 91], np.int32), 8)
    assert manager.match(np.array([0, 1, 2, 3, 4, 5, 90, 91, 92], np.int32)) == 8


def test_a_child_of_fewer_tokens_commits_its_own_continuation(make_manager: MakeManager) -> None:
    manager = make_manager()
    parent = parent_of_ten(manager)
    child = manager.fork(parent, "c", num_tokens=6)
    manager.prepare_write(child, 6)
    tokens = np.array([0, 1, 2, 3, 4, 5, 90, 91, 92], np.int32)
    manager.commit(child, tokens, 8)
    assert (manager.match(TEN), manager.match(tokens)) == (8, 8)


@pytest.mark.parametrize("num_tokens", [0, 13])
def test_a_child_cannot_share_more_than_there_is(make_manager: MakeManager, num_tokens: int) -> None:
    manager = make_manager()
    parent = parent_of_ten(manager)
    with pytest.raises(ValueError, match="tokens to share"):
        manager.fork(parent, "c", num_tokens=num_tokens)


def test_a_write_outside_the_row_is_an_error(make_manager: MakeManager) -> None:
    manager = make_manager()
    slot = parent_of_ten(manager)
    for position in (-1, 12):
        with pytest.raises(ValueError, match="outside the 3 blocks"):
            manager.prepare_write(slot, position)
    with pytest.raises(ValueError, match="nobody holds slot 3"):
        manager.prepare_write_many(np.array([3], np.int32), np.array([0]))


def test_forks_hash_only_what_no_other_has_entered(make_manager: MakeManager) -> None:
    hashed: list[bytes] = []

    def counting(parent: bytes, token_bytes: bytes) -> bytes:
        hashed.append(token_bytes)
        return hash_block(parent, token_bytes)

    manager = make_manager(hash_function=counting)
    slot = manager.admit("p", TEN, reserve_tokens=10).slot
    children = [manager.fork(slot, name, num_tokens=10) for name in ("c", "d")]
    manager.commit(slot, TEN, 10)
    for token, child in enumerate(children, start=30):
        manager.prepare_write(child, 10)
        output = np.array([*TEN, token, token, 0], np.int32)
        hashed.clear()
        manager.commit(child, output, 12)
        assert hashed == [output[8:12].tobytes()]
        assert manager.match(output) == 12
    assert manager.audit().violations == ()


def test_a_fork_follows_no_block_whose_parent_has_left_the_index(make_manager: MakeManager) -> None:
    manager = make_manager()
    slot = manager.admit("p", TEN, reserve_tokens=10).slot
    child = manager.fork(slot, "c", num_tokens=10)
    manager.commit(slot, TEN, 10)
    manager.taint(manager.admit("q", TEN[:5]).slot)
    manager.commit(child, TEN, 10)
    assert manager.match(TEN) == 0
    assert manager.audit().violations == ()


def test_blocks_are_freed_by_slots_that_hold_all_references_to_them(make_manager: MakeManager) -> None:
    manager = make_manager()
    parent = parent_of_ten(manager)
    child = manager.fork(parent, "c", num_tokens=10)
    manager.grow(child, 14)
    last = row(manager, child)[-1]
    assert manager.freed_by([child]).tolist() == [last]
    assert manager.freed_by([parent, child]).tolist() == sorted([*row(manager, parent), last])
    assert manager.num_hits_in_use("other", TEN) == 2
    assert manager.num_hits_in_use("other", TEN, besides=manager.freed_by([child])) == 2
    assert manager.most_hits_in_use("other", besides=manager.freed_by([parent, child])) == 0
    manager.prepare_write(child, 10)  # the copy that is queued needs its source
    assert row(manager, parent)[2] not in manager.freed_by([parent]).tolist()
