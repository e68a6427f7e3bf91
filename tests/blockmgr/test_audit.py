"""Every kind of corruption is named."""

from collections.abc import Callable

import numpy as np
import pytest

from octavo.blockmgr import BlockAudit, BlockManager, audit
from octavo.blockmgr.pool import BlockPool

MakeManager = Callable[..., BlockManager]
TEN = np.arange(10, dtype=np.int32)


def busy(make_manager: MakeManager) -> BlockManager:
    """Slot 0: blocks 0 and 1 indexed, 2 private. Slot 1, its child: 0, 1, 3 with a copy of 2 to 3 queued. 4, 5 cached.
    6 deferred. 7 to 9 blank."""
    manager = make_manager(num_blocks=10)
    parent = manager.admit("p", TEN, reserve_tokens=10).slot
    manager.commit(parent, TEN, 10)
    child = manager.fork(parent, "c", num_tokens=10)
    manager.prepare_write(child, 10)
    old = manager.admit("o", TEN + 50, reserve_tokens=8).slot
    manager.commit(old, TEN + 50, 8)
    manager.release(old, "o")
    late = manager.admit("l", TEN + 70, reserve_tokens=4).slot
    manager.begin_step(1)
    manager.release(late, "l")
    return manager


def test_a_busy_manager_is_counted_right(make_manager: MakeManager) -> None:
    assert busy(make_manager).audit() == BlockAudit(
        num_blocks=10, num_free=3, num_cached=2, num_active=5, num_deferred=1, num_leaked=0, violations=()
    )


def leak(m: BlockManager) -> None:
    m._pool._num_blank -= 1


def insert_twice(m: BlockManager) -> None:
    m._pool._push_blank(np.array([7], np.int32))


def free_while_referenced(m: BlockManager) -> None:
    m._pool._push_blank(np.array([0], np.int32))


def lose_a_reference(m: BlockManager) -> None:
    m._pool.ref_P[0] -= 1


def keep_a_reference(m: BlockManager) -> None:
    m._pool.ref_P[9] += 1


def miscount_the_queue(m: BlockManager) -> None:
    m._pool.lru._count += 1


def miscount_the_fence(m: BlockManager) -> None:
    m._pool.fence._count += 1


def forget_the_step(m: BlockManager) -> None:
    m._pool.fence._open.clear()


def write_beyond_a_row(m: BlockManager) -> None:
    m._tables.table_SM[0, 5] = 9


def write_no_block(m: BlockManager) -> None:
    m._tables.table_SM[0, 1] = 10


def put_a_block_twice_in_a_row(m: BlockManager) -> None:
    m._tables.table_SM[0, 1] = 0


def drop_an_index_entry(m: BlockManager) -> None:
    del m._index.block_of[m._index.digest_of[4]]  # type: ignore[arg-type]


def leave_an_index_entry(m: BlockManager) -> None:
    m._pool.forget(np.array([4], np.int32))
    m._index.block_of[b"stale"] = 4


def swap_two_digests(m: BlockManager) -> None:
    of = m._index.digest_of
    of[4], of[5] = of[5], of[4]


def uncache(m: BlockManager) -> None:
    m._index.remove(np.array([4], np.int32))


def index_a_blank_block(m: BlockManager) -> None:
    m._pool.lru.discard(np.array([4], np.int32))
    m._pool._push_blank(np.array([4], np.int32))


def taint_an_indexed_block(m: BlockManager) -> None:
    m._index.taint(np.array([1], np.int32))


def turn_a_parent_round(m: BlockManager) -> None:
    m._index.parent_entry_P[0] = 99


def copy_into_a_free_block(m: BlockManager) -> None:
    m._growth.copies._source_of[9] = m._growth.copies._source_of.pop(3)


def copy_in_a_chain(m: BlockManager) -> None:
    m._growth.copies._source_of[2] = 3


def lose_a_slot(m: BlockManager) -> None:
    m._tables._free.pop()


def lose_an_owner(m: BlockManager) -> None:
    del m._tables._owner_of[1]


def give_one_request_two_slots(m: BlockManager) -> None:
    m._tables._owner_of[1] = "p"


def commit_more_than_there_is(m: BlockManager) -> None:
    for _ in range(5):
        m._chains[0].append(b"", 1)


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (leak, "blocks 7 are leaked"),
        (insert_twice, "blocks 7 are in more than one place, or twice in one"),
        (free_while_referenced, "blocks 0 are in more than one place"),
        (lose_a_reference, "block 0 has 1 references, 2 were found"),
        (keep_a_reference, "block 9 has 1 references, 0 were found"),
        (miscount_the_queue, "6 blocks are said to be available"),
        (miscount_the_fence, "2 blocks are said to be deferred, 1 were found"),
        (forget_the_step, "blocks are deferred with no step in flight"),
        (write_beyond_a_row, "a row is set beyond its length"),
        (write_no_block, "a row holds something that is no block"),
        (put_a_block_twice_in_a_row, "a block stands twice in the rows of slots 0"),
        (drop_an_index_entry, "the index names 3 digests, 4 blocks say that they are in it"),
        (leave_an_index_entry, "the index names 4 digests, 3 blocks"),
        (swap_two_digests, "blocks 4, 5 are indexed under a digest that is not theirs"),
        (uncache, "cached blocks 4 are not in the index"),
        (index_a_blank_block, "blank blocks 4 are in the index"),
        (taint_an_indexed_block, "tainted blocks 1 are in the index"),
        (turn_a_parent_round, "index entries are not in order"),
        (copy_into_a_free_block, "a copy is queued into a block that nobody holds"),
        (copy_in_a_chain, "a queued copy reads what another one writes"),
        (lose_a_slot, "2 slots are live, 2 have owners, 1 are free"),
        (lose_an_owner, "2 slots are live, 1 have owners, 2 are free"),
        (give_one_request_two_slots, "a request holds two slots"),
        (commit_more_than_there_is, "slot 0 has committed more blocks than it holds"),
    ],
)
def test_corruption_is_named(make_manager: MakeManager, corrupt: Callable[[BlockManager], None], message: str) -> None:
    manager = busy(make_manager)
    corrupt(manager)
    violations = manager.audit().violations
    assert any(message in violation for violation in violations), violations


def test_leaked_blocks_are_counted(make_manager: MakeManager) -> None:
    manager = busy(make_manager)
    leak(manager)
    keep_a_reference(manager)
    assert manager.audit().num_leaked == 2


@pytest.mark.parametrize("corrupt", [leak, lose_a_reference, keep_a_reference, uncache, index_a_blank_block, busy])
@pytest.mark.parametrize("part", [1, 3, 10, 64])
def test_a_recount_in_parts_finds_what_an_audit_finds(
    make_manager: MakeManager, monkeypatch: pytest.MonkeyPatch, corrupt: Callable[..., object], part: int
) -> None:
    monkeypatch.setattr(audit, "PART_BLOCKS", part)
    manager = busy(make_manager)
    recount = manager.recount()
    assert len(recount) == -(-10 // part)
    recount.look_at_all()
    assert recount.num_leaked == 0
    if corrupt is not busy:
        corrupt(manager)
    recount.look_at_all()
    assert recount.num_leaked == manager.audit().num_leaked


def test_a_look_counts_no_more_blocks_than_a_part_has(
    make_manager: MakeManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "PART_BLOCKS", 4)
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(
        BlockPool, "is_blank", lambda self, begin, end: seen.append((begin, end)) or np.ones(end - begin, np.bool_)
    )
    recount = make_manager(num_blocks=10, num_host_blocks=3).recount()
    for _ in range(5):
        recount.look()
    assert seen == [(0, 4), (4, 8), (8, 10), (10, 13), (0, 4)]
