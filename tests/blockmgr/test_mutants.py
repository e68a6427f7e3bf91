"""Planted bugs are found: by walks through the state machine, or by one direct check."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from octavo.blockmgr.errors import OutOfBlocks
from octavo.blockmgr.host_tier import HostTier
from octavo.blockmgr.manager import BlockManager, Growth
from octavo.blockmgr.pool import BlockPool, StepFence
from octavo.blockmgr.prefix_index import Chain, PrefixIndex, RootHasher
from octavo.blockmgr.tables import SlotTables, UpdateLog
from tests.support.blockmgr.host_mutants import give_up_the_queue_only, move_and_leave_the_name, pop_and_keep
from tests.support.blockmgr.walk import walk

Patch = tuple[type, str, Any]

_settle, _allocate, _drop = BlockPool._settle, BlockPool.allocate, BlockPool.drop
_find, _append_to = PrefixIndex.find, SlotTables.append_to
_swap_out, _take_moves = HostTier.swap_out, HostTier.take


def _settle_twice(pool: BlockPool, blocks: np.ndarray) -> None:
    _settle(pool, blocks)
    pool._push_blank(blocks[:1] if pool.num_blank < pool.num_blocks else blocks[:0])


def _evict_and_leave_the_entry(pool: BlockPool, num: int) -> np.ndarray:
    return pool.lru.pop(num)


def _find_all(index: PrefixIndex, token_ids_T: np.ndarray, salt: str) -> tuple[np.ndarray, Chain]:
    return _find(index, np.append(token_ids_T, np.int32(0)), salt)


def _find_for_nobody(index: PrefixIndex, token_ids_T: np.ndarray, salt: str) -> tuple[np.ndarray, Chain]:
    return _find(index, token_ids_T, "")


def _proven_without_looking(index: PrefixIndex, blocks: np.ndarray, tokens_T: np.ndarray, salt: str) -> np.ndarray:
    return blocks


def _drop_at_once(pool: BlockPool, blocks: np.ndarray) -> None:
    pool.ref_P[blocks] -= 1
    pool._settle(blocks[pool.ref_P[blocks] == 0])


def _allocate_half(pool: BlockPool, num: int) -> np.ndarray:
    if num > pool.num_available:
        _allocate(pool, pool.num_available)
        raise OutOfBlocks(wanted=num, free=0)
    return _allocate(pool, num)


def _drop_heads_first(pool: BlockPool, blocks: np.ndarray) -> None:
    _drop(pool, blocks[::-1])


def _end_all(fence: StepFence, step: int) -> list[np.ndarray]:
    fence._open.popleft()
    passed = [blocks[fence._hold_P[blocks] == hold] for _, hold, blocks in fence._holds]
    fence._holds.clear()
    for blocks in passed:
        fence.discard(blocks)
    return passed


def _hold_by_the_first_release(fence: StepFence, blocks: np.ndarray) -> None:
    fence._holds.append((fence._last_begun or 0, 1, blocks))
    fence._hold_P[blocks] = 1
    fence._count += len(blocks)


def _write_in_place(growth: Growth, slot: int, column: int, block: int) -> None:
    """Forgets that others read the block."""


def _release_for_anybody(manager: BlockManager, slot: int, request_id: str) -> None:
    if manager._tables.owner_of(slot) is not None:
        manager._pool.drop(manager._tables.give_back(slot)[::-1])
        del manager._chains[slot]


def _append_in_silence(tables: SlotTables, slot: int, blocks: np.ndarray) -> None:
    count = tables.updates._count
    _append_to(tables, slot, blocks)
    tables.updates._count = count


def _queue_out_once(host: HostTier, source: int, target: int) -> None:
    host.outs.setdefault(target, source)


def _swap_out_full_blocks(
    host: HostTier, request_id: str, blocks: np.ndarray, origins: list[int], chain: Chain, num_tokens: int
) -> None:
    _swap_out(host, request_id, blocks[: len(chain)], origins, chain, num_tokens)


def _take_without_end(host: HostTier) -> tuple[np.ndarray, np.ndarray]:
    outs_C2, ins_C2 = _take_moves(host)
    host.ins.pop_taken()
    return outs_C2, ins_C2


def _false(*_: object) -> bool:
    """Never."""
    return False


def _nothing(*_: object) -> None:
    """Left out."""


def _one(*_: object) -> int:
    """Nobody else."""
    return 1


MUTANTS: dict[str, list[Patch]] = {
    "m1 free list double insert": [(BlockPool, "_settle", _settle_twice)],
    "m4 eviction leaves the hash entry": [(BlockPool, "_evict", _evict_and_leave_the_entry)],
    "m5 hit length is the full prompt": [(PrefixIndex, "find", _find_all)],
    "m6 salt not in the first hash": [(PrefixIndex, "find", _find_for_nobody)],
    "m8 abort frees blocks of a step in flight": [(BlockPool, "drop", _drop_at_once)],
    "m8 the first acknowledgement frees all": [(StepFence, "end", _end_all)],
    "m8 a second release does not wait anew": [(StepFence, "hold", _hold_by_the_first_release)],
    "m22 failed allocation half applied": [(BlockPool, "allocate", _allocate_half)],
    "m13 tainted blocks stay in the index": [(BlockManager, "taint", _nothing)],
    "tokens are not compared on a hit": [(PrefixIndex, "_proven", _proven_without_looking)],
    "a shared tail is written in place": [(Growth, "_copy_on_write", _write_in_place)],
    "a sharer counts as none": [(Growth, "_num_owners", _one)],
    "heads are given up before tails": [(BlockPool, "drop", _drop_heads_first)],
    "a stranger can release": [(BlockManager, "release", _release_for_anybody)],
    "a row is written and not reported": [(SlotTables, "append_to", _append_in_silence)],
    "rows of a dead request are reported": [(UpdateLog, "drop_slot", _nothing)],
    "a copy does not keep its source": [(Growth, "drop_sources", _nothing)],
    "host: a block is read before it is back": [(BlockManager, "is_awaited", _false)],
    "host: a block is freed twice": [(HostTier, "pop_swapped", pop_and_keep)],
    "host: an entry points to the wrong tier": [(PrefixIndex, "move", move_and_leave_the_name)],
    "host: a cancel leaves its copy queued": [(HostTier, "cancel_copies_in", _nothing)],
    "host: a cancel promises what never came": [(HostTier, "cancel_copies_in", give_up_the_queue_only)],
    "host: copies out are left out": [(HostTier, "_queue_out", _nothing)],
    "host: a block that is given up twice keeps its first copy": [(HostTier, "_queue_out", _queue_out_once)],
    "host: half full blocks stay behind": [(HostTier, "swap_out", _swap_out_full_blocks)],
    "host: sources of copies in are not given back": [(HostTier, "take", _take_without_end)],
    "host: sources of copies in are anybody's": [(HostTier, "share", _nothing)],
    "host: what was swapped out is never given back": [(HostTier, "drop_swapped", _nothing)],
}


MAX_SEEDS = 60


def first_seed_that_fails() -> int | None:
    for seed in range(MAX_SEEDS):
        try:
            walk(seed)
        except Exception:  # whatever a broken manager raises
            return seed
    return None


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_walk_kills(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, attribute, replacement in MUTANTS[mutant]:
        monkeypatch.setattr(owner, attribute, replacement)
    assert first_seed_that_fails() is not None


def test_m13_tainted_blocks_that_return_through_a_child_are_seen(
    make_manager: Callable[..., BlockManager], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stays_out() -> bool:
        manager = make_manager()
        tokens = np.arange(5, dtype=np.int32)
        parent = manager.admit("p", tokens, reserve_tokens=5).slot
        child = manager.fork(parent, "c", num_tokens=5)
        manager.taint(parent)
        manager.commit(child, tokens, 5)
        return manager.match(tokens) == 0

    assert stays_out()
    monkeypatch.setattr(PrefixIndex, "taint", lambda *_: None)
    assert not stays_out()


def test_m6_a_root_without_the_salt_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def differ() -> bool:
        roots = RootHasher(fingerprint=b"model", secret=b"secret")
        return roots.root("A") != roots.root("B")

    assert differ()
    monkeypatch.setattr(RootHasher, "root", lambda *_: b"root")
    assert not differ()


def test_m6_a_salt_that_looks_like_a_fingerprint_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def differ() -> bool:
        joined = RootHasher(fingerprint=b"modelA", secret=b"s").root("")
        return joined != RootHasher(fingerprint=b"model", secret=b"s").root("A")

    assert differ()
    monkeypatch.setattr(RootHasher, "root", lambda self, salt: self._prefix[8:] + salt.encode())
    assert not differ()


def test_m7_a_predictable_hash_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def differ() -> bool:
        return len({RootHasher(fingerprint=b"model", secret=b"").root("") for _ in range(2)}) == 2

    assert differ()
    monkeypatch.setattr("octavo.blockmgr.prefix_index.secrets.token_bytes", lambda num: b"0" * num)
    assert not differ()
