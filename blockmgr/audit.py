"""Recounts everything from scratch and names what does not agree.

It must not repair anything, nor use a counter that it checks. Legend: S slots · M table width · P blocks (including
ids below the pool's own) · B blocks of one part.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from octavo.blockmgr.host_tier import HostTier
from octavo.blockmgr.pool import BlockPool
from octavo.blockmgr.prefix_index import Chain
from octavo.blockmgr.tables import UNSET, CopyQueue, SlotTables

PART_BLOCKS = 1 << 17
"""Blocks that one look of a recount counts, in about a millisecond."""
_MAX_NAMED = 8  # blocks or slots listed in one violation


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockAudit:
    """Counts as found, and violations; none if all is well. Counts are of the device's blocks unless stated otherwise.

    num_leaked: blocks of either tier that have no state at all, or have more references than holders.
    """

    num_blocks: int
    num_free: int
    num_cached: int
    num_active: int  # referenced or deferred
    num_deferred: int
    num_leaked: int
    violations: tuple[str, ...]


def audit_blocks(
    pool: BlockPool, host: HostTier, tables: SlotTables, copies: CopyQueue, chains: dict[int, Chain]
) -> BlockAudit:
    """Check everything. O(blocks + table), without Python per block as long as all is well."""
    holders = ((pool, _holders(tables, copies)), (host.pool, _host_holders(host)))
    refs_P, host_refs_P = (_count(each, held_by) for each, held_by in holders)
    violations = [*_check_rows(pool, tables), *_check_copies(pool, copies), *_check_moves(pool, host)]
    for each, found_P in ((pool, refs_P), (host.pool, host_refs_P)):
        violations += [*_check_references(each, found_P), *_check_places(each, found_P), *_check_cached(each)]
    violations += [*_check_index(pool), *_check_slots(tables, chains, host)]
    blank, cached, held = pool.blank_blocks(), pool.lru.to_array(), pool.fence.to_array()
    return BlockAudit(
        num_blocks=pool.num_blocks,
        num_free=len(blank),
        num_cached=len(cached),
        num_active=int(np.count_nonzero(refs_P)) + len(held),
        num_deferred=len(held),
        num_leaked=sum(_num_leaked(each, held_by, *_ids(each)) for each, held_by in holders),
        violations=tuple(violations),
    )


class Recount:
    """`BlockAudit.num_leaked`, found some blocks at a time: each look counts the next PART_BLOCKS, so that none takes
    longer than a millisecond or two, however large the pools are. Each part is counted by itself, so the parts need not
    be counted at the same time.
    """

    def __init__(self, pool: BlockPool, host: HostTier, tables: SlotTables, copies: CopyQueue) -> None:
        self._tables, self._copies, self._host = tables, copies, host
        self._parts = [
            (each, begin, min(begin + PART_BLOCKS, each.first + each.num_blocks))
            for each in (pool, host.pool)
            for begin in range(each.first, each.first + each.num_blocks, PART_BLOCKS)
        ]
        self._found = [0] * len(self._parts)
        self._next = 0

    def __len__(self) -> int:
        """Looks needed to count every block."""
        return len(self._parts)

    @property
    def num_leaked(self) -> int:
        """Leaked blocks of all parts, as last found."""
        return sum(self._found)

    def look_at_all(self) -> None:
        """Count every part."""
        for _ in self._parts:
            self.look()

    def look(self) -> None:
        """Count the next part."""
        pool, begin, end = self._parts[self._next]
        holders = _host_holders(self._host) if pool.first else _holders(self._tables, self._copies)
        self._found[self._next] = _num_leaked(pool, holders, begin, end)
        self._next = (self._next + 1) % len(self._parts)


def _num_leaked(pool: BlockPool, holders: np.ndarray, begin: int, end: int) -> int:
    """Leaked blocks among those from begin to end, all of the pool. holders: a block id for each reference."""
    refs_B = np.bincount(holders[(holders >= begin) & (holders < end)] - begin, minlength=end - begin)
    is_somewhere_B = (refs_B > 0) | pool.is_blank(begin, end) | pool.lru.stands(begin, end)
    held = pool.fence.to_array()
    is_somewhere_B[held[(held >= begin) & (held < end)] - begin] = True
    return int(np.count_nonzero(~is_somewhere_B | (pool.ref_P[begin:end] > refs_B)))


def _named(ids: np.ndarray) -> str:
    more = ", …" if len(ids) > _MAX_NAMED else ""
    return ", ".join(str(i) for i in ids[:_MAX_NAMED].tolist()) + more


def _in_pool(pool: BlockPool, blocks: np.ndarray) -> np.ndarray:
    return blocks[(blocks >= pool.first) & (blocks < pool.first + pool.num_blocks)]


def _count(pool: BlockPool, blocks: np.ndarray) -> np.ndarray:
    return np.bincount(_in_pool(pool, blocks), minlength=len(pool.ref_P))


def _holders(tables: SlotTables, copies: CopyQueue) -> np.ndarray:
    """A block id for each reference of a row or a queued copy."""
    width = int(tables.num_blocks_S.max(initial=0))  # ids beyond a row's length are a violation of their own
    rows_SM = tables.table_SM[tables.is_live_S, :width]
    return np.concatenate([rows_SM.ravel(), np.array(copies.sources, np.int32)])


def _host_holders(host: HostTier) -> np.ndarray:
    held = [request.blocks for request in host.swapped.values()]
    return np.concatenate([*held, np.array(host.ins.sources, np.int32)])


def _ids(pool: BlockPool) -> tuple[int, int]:
    return pool.first, pool.first + pool.num_blocks


def _count_places(pool: BlockPool, refs_P: np.ndarray) -> np.ndarray:
    """How many of the states blank, cached, deferred and referenced each block has."""
    places = [pool.blank_blocks(), pool.lru.to_array(), pool.fence.to_array(), np.flatnonzero(refs_P)]
    return _count(pool, np.concatenate(places))


def _tier(pool: BlockPool) -> str:
    return "host " if pool.first else ""


def _check_rows(pool: BlockPool, tables: SlotTables) -> Iterator[str]:
    table_SM = tables.table_SM
    is_used_SM = np.arange(tables.width) < tables.num_blocks_S[:, None]
    used = table_SM[is_used_SM]
    if len(used) and (used.min() < 0 or used.max() >= pool.num_blocks):
        yield "a row holds something that is no block"
    if np.count_nonzero(table_SM[~is_used_SM] != UNSET):
        yield "a row is set beyond its length"
    ordered_SM = np.sort(np.where(is_used_SM, table_SM, -1 - np.arange(tables.width, dtype=np.int32)), axis=1)
    is_twice_SM = ordered_SM[:, 1:] == ordered_SM[:, :-1]
    if np.count_nonzero(is_twice_SM):
        twice_S = is_twice_SM.any(axis=1)
        yield f"a block stands twice in the rows of slots {_named(np.flatnonzero(twice_S))}"


def _check_references(pool: BlockPool, refs_P: np.ndarray) -> Iterator[str]:
    wrong = np.flatnonzero(pool.ref_P != refs_P)
    for block in wrong[:_MAX_NAMED].tolist():
        yield f"{_tier(pool)}block {block} has {pool.ref_P[block]} references, {refs_P[block]} were found"


def _check_places(pool: BlockPool, refs_P: np.ndarray) -> Iterator[str]:
    places_P = _count_places(pool, refs_P)
    lost = np.flatnonzero(places_P[pool.first :] == 0) + pool.first
    many = np.flatnonzero(places_P > 1)
    if len(lost):
        yield f"{_tier(pool)}blocks {_named(lost)} are leaked: neither free, cached, deferred nor referenced"
    if len(many):
        yield f"{_tier(pool)}blocks {_named(many)} are in more than one place, or twice in one"
    if pool.num_available != len(pool.blank_blocks()) + len(pool.lru.to_array()):
        yield f"{pool.num_available} {_tier(pool)}blocks are said to be available"
    if len(pool.fence) != len(pool.fence.to_array()):
        yield f"{len(pool.fence)} {_tier(pool)}blocks are said to be deferred, {len(pool.fence.to_array())} were found"
    if not pool.fence.is_open and len(pool.fence):
        yield f"{_tier(pool)}blocks are deferred with no step in flight"


def _check_cached(pool: BlockPool) -> Iterator[str]:
    index, cached, blank = pool.index, pool.lru.to_array(), pool.blank_blocks()
    if not index.holds(cached).all():
        yield f"cached {_tier(pool)}blocks {_named(cached[~index.holds(cached)])} are not in the index"
    if index.holds(blank).any():
        yield f"blank {_tier(pool)}blocks {_named(blank[index.holds(blank)])} are in the index"


def _check_index(pool: BlockPool) -> Iterator[str]:
    index = pool.index
    indexed = np.flatnonzero(index.entry_P >= 0)
    if (index.is_tainted_P[indexed]).any():
        yield f"tainted blocks {_named(indexed[index.is_tainted_P[indexed]])} are in the index"
    entries = index.entry_P[indexed]
    if len(np.unique(entries)) < len(entries) or (index.parent_entry_P[indexed] >= entries).any():
        yield "index entries are not in order"
    by_digest = {block: digest for digest, block in index.block_of.items()}
    if len(by_digest) != len(index.block_of) or sorted(by_digest) != indexed.tolist():
        yield f"the index names {len(index.block_of)} digests, {len(indexed)} blocks say that they are in it"
    wrong = [block for block, digest in by_digest.items() if index.digest_of[block] != digest]
    if wrong:
        yield f"blocks {_named(np.array(wrong))} are indexed under a digest that is not theirs"


def _check_copies(pool: BlockPool, copies: CopyQueue) -> Iterator[str]:
    pairs = copies.pending
    destinations = np.array([destination for _, destination in pairs], np.int32)
    if (pool.ref_P[destinations] < 1).any():
        yield "a copy is queued into a block that nobody holds"
    if set(destinations.tolist()) & {source for source, _ in pairs}:
        yield "a queued copy reads what another one writes"


def _check_moves(pool: BlockPool, host: HostTier) -> Iterator[str]:
    """Copies between the tiers."""
    pairs, index = host.ins.pending, pool.index
    sources = np.array([source for source, _ in pairs], np.int32)
    targets = np.array(sorted(target for _, target in pairs), np.int32)
    if np.flatnonzero(host.is_awaited_P).tolist() != targets.tolist():
        yield f"{np.count_nonzero(host.is_awaited_P)} blocks are awaited, copies in are queued for {len(targets)}"
    if len(_in_pool(host.pool, sources)) < len(sources) or len(_in_pool(pool, targets)) < len(targets):
        yield "a copy in is queued from no host block, or into no device block"
    elif (pool.ref_P[targets] < 1).any():
        yield "a copy in is queued into a block that nobody holds"
    elif index.holds(sources).any():
        yield f"blocks {_named(sources[index.holds(sources)])} are on their way to the device and in the index"
    outs = np.array([*host.outs.items()], np.int32).reshape(-1, 2)
    if len(_in_pool(host.pool, outs[:, 0])) + len(_in_pool(pool, outs[:, 1])) < outs.size:
        yield "a copy out is queued from no device block, or into no host block"


def _check_slots(tables: SlotTables, chains: dict[int, Chain], host: HostTier) -> Iterator[str]:
    live = np.flatnonzero(tables.is_live_S).tolist()
    owners = tables.owners
    if sorted(owners) != live or sorted(chains) != live or tables.num_free != tables.max_slots - len(live):
        yield f"{len(live)} slots are live, {len(owners)} have owners, {tables.num_free} are free"
    if len(set(owners.values())) != len(owners):
        yield "a request holds two slots"
    for slot in live:
        if slot in chains and len(chains[slot]) > tables.num_blocks_S[slot]:
            yield f"slot {slot} has committed more blocks than it holds"
    if set(owners.values()) & set(host.swapped):
        yield "a request holds a slot and is swapped out"
