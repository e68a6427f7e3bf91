"""The block manager: the single owner of every KV block of a worker.

    tokens of a slot   |-- cached: hit at admit --|-- computed: commit --|-- capacity: grow --|
    its full blocks    shared, in the index       own, in the index      own, writable

Pure: it must not know clocks, sockets, tensors, nor what a request is beyond an id and its tokens. One thread owns it.
Every refusal (OutOfBlocks, OutOfSlots, ValueError) leaves everything as it was.

Why a block may be hit before it is written: plans run in order, copies before tokens, and in each layer keys and values
of all tokens are written before any token attends. So `commit` may be called when the plan is made or when its result
is known: a request that is admitted afterwards reads these blocks in the same plan or in a later one, after the write.
If the plan fails, the scheduler taints its slots, which takes their blocks out of the index; those admitted on the
promise end with it. A scheduler that commits after the result has none of those. Commit nothing that no plan will carry
out.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from octavo.blockmgr.audit import BlockAudit, Recount, audit_blocks
from octavo.blockmgr.block_map import BlockMap, HostBlockMap, map_blocks, map_host_blocks
from octavo.blockmgr.changes import BlockEvent, IndexWalk
from octavo.blockmgr.config import BlockManagerConfig
from octavo.blockmgr.errors import OutOfBlocks
from octavo.blockmgr.host_tier import HostTier
from octavo.blockmgr.ids import PrefixCache, PrefixLookup, SlotId
from octavo.blockmgr.pool import BlockPool
from octavo.blockmgr.prefix_index import Chain, HashBlock, PrefixIndex, RootHasher, hash_block
from octavo.blockmgr.tables import NO_COPIES, Growth, SlotTables

_NO_BLOCKS = np.empty(0, np.int32)


NumToUse = Callable[[np.ndarray], int]
"""Of cached blocks in order, bool, whether each is on the host: how many to use, the others are computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A request has a slot; its first ``num_cached_tokens`` tokens need not be computed. Where blocks of it come back
    from the host first (``num_awaited_blocks``), no plan may have the slot while `BlockManager.is_awaited`."""

    slot: SlotId
    num_cached_tokens: int
    num_awaited_blocks: int = 0


class BlockManager:
    """Blocks, slots and the prefix cache of one worker.

    hash_block: for tests of weak hashes. num_queried_tokens / num_hit_tokens: prompt tokens admitted so far, and those
    of them that the prefix cache held.
    """

    def __init__(self, config: BlockManagerConfig, *, hash_block: HashBlock = hash_block) -> None:
        self.config = config
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        roots = RootHasher(fingerprint=config.fingerprint, secret=config.secret)
        self._index = PrefixIndex(
            config.num_blocks + config.num_host_blocks,
            config.block_size,
            roots,
            config.max_events,
            hash_block,
            first_host_block=config.num_blocks,
        )
        self._pool = BlockPool(config.num_blocks, self._index)
        host_pool = BlockPool(config.num_host_blocks, self._index, first=config.num_blocks)
        self._host = HostTier(self._pool, host_pool, self._index, max_copies_in=config.max_copies_in)
        if config.num_host_blocks:
            self._pool.offload = self._host.offload
        self._tables = SlotTables(config.max_slots, config.max_blocks_per_slot)
        self._chains: dict[int, Chain] = {}
        self._growth = Growth(config.block_size, self._tables, self._pool, self._chains)
        self.table_SM = self._tables.table_SM.view()  # int32 [max_slots, M], -1 where unset
        self.table_SM.flags.writeable = False

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing of use."""
        return self._pool.num_blank

    @property
    def num_cached(self) -> int:
        """Unused blocks that a later request may hit; given up when `num_free` is 0."""
        return self._pool.num_cached

    @property
    def num_active(self) -> int:
        """Blocks neither free nor cached: they are in use, wait for steps in flight, or they leaked."""
        return self.config.num_blocks - self._pool.num_available

    @property
    def num_indexed(self) -> int:
        """Blocks that a prompt may hit, used or not."""
        return len(self._index)

    @property
    def num_entered(self) -> int:
        """Times that a block has entered the index so far: while it stays the same, no prompt hits more than before."""
        return self._index.num_entered

    @property
    def num_evicted_blocks(self) -> int:
        """Cached blocks given up so far to make room, those that went to the host too."""
        return self._pool.num_evicted_blocks

    @property
    def host(self) -> HostTier:
        """The second tier, to be looked at."""
        return self._host

    def capacity(self, slot: int) -> int:
        """Tokens that a slot's blocks can hold."""
        return int(self._tables.num_blocks_S[slot]) * self.config.block_size

    def match(self, token_ids_T: np.ndarray, *, salt: str = "") -> int:
        """Tokens of a prompt that `admit` would find cached on either tier: whole blocks, never the last token. Changes
        nothing."""
        return len(self._find(token_ids_T, salt)[0]) * self.config.block_size

    def num_hits_in_use(self, request_id: str, token_ids_T: np.ndarray, *, salt: str = "") -> int:
        """Blocks on the device that `admit` would share with who uses them. Those that are cached are none: they are
        counted by `num_cached`. Changes nothing."""
        swapped = self._host.swapped.get(request_id)
        if swapped is None:
            hits = self._find(token_ids_T, salt)[0]
            hits = hits[hits < self.config.num_blocks]
        else:
            resident = [self._index.device_block(swapped.chain, i) for i in range(len(swapped.blocks))]
            hits = np.array([block for block in resident if block is not None], np.int32)
        return len(hits) - self._pool.num_taken_by_sharing(hits)

    def admit(
        self,
        request_id: str,
        token_ids_T: np.ndarray,
        *,
        salt: str = "",
        reserve_tokens: int | None = None,
        lookup: PrefixLookup = PrefixLookup.LONGEST,
        num_to_use: NumToUse = len,
    ) -> Admission:
        """Take a slot, reference the cached prefix, and grow to ``reserve_tokens``; all or nothing. What is cached on
        the host is queued to be copied in; what was swapped out for this request comes back whole.

        token_ids_T: int32, at least one. num_to_use: called with where the blocks of a hit are. OutOfSlots;
        OutOfBlocks; ValueError for an id that holds a slot, an empty prompt, or one that fits no row.
        """
        self._tables.check_new(request_id)
        if not self._growth.blocks_for(len(token_ids_T)):
            raise ValueError("no tokens")
        if request_id in self._host.swapped:
            return self._admit_swapped(request_id, reserve_tokens or 0)
        hits, chain = self._find(token_ids_T if lookup is PrefixLookup.LONGEST else token_ids_T[:1], salt)
        is_on_host = hits >= self.config.num_blocks
        if is_on_host.any() and (num_used := num_to_use(is_on_host)) < len(hits):
            hits, is_on_host = hits[:num_used], is_on_host[:num_used]
            chain = chain.fork(num_used)
        self._check_room(hits[~is_on_host], len(hits), reserve_tokens or 0)
        self._pool.share(hits[~is_on_host])
        if is_on_host.any():
            self._host.share(hits[is_on_host])
        admission = self._place(request_id, chain, hits, len(hits) * self.config.block_size, reserve_tokens or 0)
        self.num_queried_tokens += len(token_ids_T)
        self.num_hit_tokens += admission.num_cached_tokens
        return admission

    def _admit_swapped(self, request_id: str, reserve_tokens: int) -> Admission:
        """What others hold on the device meanwhile is shared again."""
        swapped = self._host.swapped[request_id]
        blocks = swapped.blocks.copy()
        for i in range(len(blocks)):
            resident = self._index.device_block(swapped.chain, i)
            blocks[i] = blocks[i] if resident is None else resident
        resident_blocks = blocks[blocks < self.config.num_blocks]
        self._check_room(resident_blocks, len(blocks), reserve_tokens)
        self._host.pop_swapped(request_id)
        self._pool.share(resident_blocks)
        self._host.pool.drop(swapped.blocks[blocks < self.config.num_blocks])
        return self._place(request_id, swapped.chain, blocks, swapped.num_tokens, reserve_tokens)

    def _check_room(self, shared: np.ndarray, num_blocks: int, reserve_tokens: int) -> None:
        """OutOfBlocks where a row of num_blocks, grown as reserved, does not fit beside what it shares."""
        wanted = max(num_blocks, self._growth.blocks_for(reserve_tokens)) - len(shared)
        free = self._pool.num_available - self._pool.num_taken_by_sharing(shared)
        if wanted > free:
            raise OutOfBlocks(wanted=wanted, free=free)

    def _place(
        self, request_id: str, chain: Chain, blocks: np.ndarray, num_tokens: int, reserve_tokens: int
    ) -> Admission:
        """A slot for blocks of either tier to which the caller has taken references; there is room."""
        is_on_host = blocks >= self.config.num_blocks
        num_more = max(0, self._growth.blocks_for(reserve_tokens) - len(blocks))
        new = self._pool.allocate(int(is_on_host.sum()) + num_more)
        row = np.concatenate([blocks, new[len(new) - num_more :]])
        row[: len(blocks)][is_on_host] = new[: len(new) - num_more]
        slot = self._open(request_id, chain, row)
        if is_on_host.any():
            self._host.copy_in(blocks[is_on_host], row[: len(blocks)][is_on_host])
        return Admission(slot=slot, num_cached_tokens=num_tokens, num_awaited_blocks=int(is_on_host.sum()))

    @property
    def num_awaited(self) -> int:
        """Device blocks whose content no plan has brought back yet."""
        return len(self._host.ins)

    def is_awaited(self, slot: int) -> bool:
        """Whether blocks of this slot are not back from the host: no step may have it."""
        return bool(self._host.is_awaited_P[self._tables.row(slot)].any())

    @property
    def may_move(self) -> bool:
        """Whether `swap_out` is possible: no step is in flight."""
        return not self._pool.fence.is_open

    def swap_out(self, slot: int, request_id: str, num_tokens: int) -> None:
        """`release`, but what holds the first ``num_tokens`` tokens goes to the host, for `admit` to bring back.
        OutOfBlocks; ValueError where a step is in flight: its blocks do not move."""
        self._tables.check_live(slot)
        if self._pool.fence.is_open or self._tables.owner_of(slot) != request_id:
            raise ValueError(f"slot {slot} cannot be swapped out for {request_id!r} now")
        row = self._tables.row(slot)[: self._growth.blocks_for(num_tokens)].copy()
        origins = [self._growth.copies.origin(block) for block in row.tolist()]
        chain = self._chains[slot]
        self._host.swap_out(request_id, row, origins, chain.fork(min(len(chain), len(row))), num_tokens)
        self.release(slot, request_id)

    def drop_swapped(self, request_id: str) -> None:
        """What was swapped out for a request is not wanted any more. Idempotent."""
        self._host.drop_swapped(request_id)

    def fork(self, parent_slot: int, request_id: str, *, num_tokens: int) -> SlotId:
        """A slot for a child that shares the parent's first ``num_tokens`` tokens and every block that holds them.

        Before either writes to a shared tail block, it calls `prepare_write`. OutOfSlots; ValueError.
        """
        self._tables.check_live(parent_slot)
        self._tables.check_new(request_id)
        if not 0 < num_tokens <= self.capacity(parent_slot):
            raise ValueError(f"{num_tokens} tokens to share, the parent has {self.capacity(parent_slot)}")
        blocks = self._tables.row(parent_slot)[: self._growth.blocks_for(num_tokens)].copy()
        self._pool.share(blocks)
        return self._open(request_id, self._chains[parent_slot].fork(num_tokens // self.config.block_size), blocks)

    def release(self, slot: int, request_id: str) -> None:
        """Give slot and blocks back. A no-op where the slot is no longer this request's, so twice does no harm."""
        if self._tables.owner_of(slot) != request_id:
            return
        blocks = self._tables.give_back(slot)
        del self._chains[slot]
        self._host.cancel_copies_in(blocks[self._pool.ref_P[blocks] == 1])
        self._pool.drop(blocks[::-1])
        unowned = blocks[self._pool.ref_P[blocks] == 0]
        self._growth.drop_sources(self._growth.copies.cancel(unowned))

    def grow(self, slot: int, num_tokens: int) -> None:
        """Capacity for at least ``num_tokens``; all or nothing. OutOfBlocks; ValueError where no row is so wide."""
        self._growth.grow(slot, num_tokens)

    def grow_many(self, slots_S: np.ndarray, num_tokens_S: np.ndarray) -> np.ndarray:
        """`grow` for distinct slots in turn, without Python per slot; int32, those that were refused, in order."""
        return self._growth.grow_many(slots_S, num_tokens_S)

    def prepare_write(self, slot: int, position: int) -> None:
        """Make the block of a position this slot's alone: a shared one is copied by the next plan. OutOfBlocks."""
        self._growth.prepare_write(slot, position)

    def prepare_write_many(self, slots_S: np.ndarray, positions_S: np.ndarray) -> np.ndarray:
        """`prepare_write` for each in turn, without Python where nothing is shared; int32, the slots refused."""
        return self._growth.prepare_write_many(slots_S, positions_S)

    def commit(self, slot: int, token_ids_T: np.ndarray, num_computed: int) -> None:
        """The first ``num_computed`` of the slot's tokens are in the KV cache, or will be when the plan just made has
        run: full blocks enter the prefix index. Idempotent. A block whose content another block has in the index
        already stays private."""
        self._tables.check_live(slot)
        num_full = num_computed // self.config.block_size
        if num_computed > min(len(token_ids_T), self.capacity(slot)):
            raise ValueError(f"{num_computed} of {len(token_ids_T)} tokens computed, {self.capacity(slot)} fit")
        chain = self._chains[slot]
        if self.config.prefix_cache is PrefixCache.OFF or chain.is_tainted or num_full <= len(chain):
            return
        tokens = np.ascontiguousarray(token_ids_T[: num_full * self.config.block_size], np.int32)
        replaced = self._index.extend(chain, self._tables.row(slot)[:num_full], tokens)
        self._pool.blank_out(replaced)
        self._host.pool.blank_out(replaced)

    def taint(self, slot: int) -> None:
        """What this slot computed may be wrong (NaN, a failed step): none of its blocks is in the index or enters it.

        That includes cached blocks that it hit. Others who share them keep them (they were complete before), but what
        they compute after them is not indexed either: its parent is gone. A later fork of the slot is tainted too.
        """
        self._tables.check_live(slot)
        blocks = self._tables.row(slot).copy()
        self._chains[slot].is_tainted = True
        self._index.bar(blocks)
        self._pool.forget(blocks)

    def flush_prefix_cache(self) -> int:
        """Forget every unused cached block on both tiers; how many."""
        pools = (self._pool, self._host.pool)
        blocks = np.concatenate([array for pool in pools for array in (pool.lru.to_array(), pool.fence.to_array())])
        blocks = blocks[self._index.holds(blocks)]
        if len(blocks) and len(blocks) == len(self._index):
            self._index.clear()
        for pool in pools:
            pool.forget(blocks)
        return len(blocks)

    def begin_step(self, step: int) -> None:
        """A plan is launched. What is released from now on waits for it. ValueError where steps do not rise."""
        self._pool.fence.begin(step)
        self._growth.drop_sources(self._growth.copies.pop_taken())
        if self.config.num_host_blocks:
            self._host.begin_step(step)

    def end_step(self, step: int) -> None:
        """The oldest plan in flight has run. ValueError for any other."""
        self._pool.end_step(step)
        self._growth.drop_sources(self._growth.copies.pop_taken())
        if self.config.num_host_blocks:
            self._host.end_step(step)

    def take_updates(self) -> tuple[np.ndarray, np.ndarray]:
        """int32 [U, 3] (slot, column, block) written to the table since the last call, in order; and int32 [C, 2]
        (source, destination) block copies to do before any write. Both go into the plan that is begun next."""
        self._growth.drop_sources(self._growth.copies.pop_taken())
        return self._tables.updates.take(), self._growth.copies.take()

    def take_moves(self) -> tuple[np.ndarray, np.ndarray]:
        """int32 [C, 2] twice, copies between the tiers for the plan that is begun next: (device, host block) before
        everything else of it, and (host, device block) before anything of the plan after it. Host blocks count from
        0."""
        return self._host.take() if self.config.num_host_blocks else (NO_COPIES, NO_COPIES)

    def invalidate_copies(self, copies_out_C2: np.ndarray, copies_in_C2: np.ndarray) -> list[int]:
        """A plan with these copies failed: nothing that they were to fill is found or comes back any more. The slots
        that hold such blocks on the device."""
        targets = copies_in_C2[:, 1]
        if len(copies_out_C2):
            targets = np.concatenate([targets, self._host.invalidate(copies_out_C2[:, 1])])
        if not len(targets):
            return []
        self._index.bar(targets)
        self._pool.forget(targets)
        live = np.flatnonzero(self._tables.is_live_S)
        return live[np.isin(self._tables.table_SM[live], targets).any(axis=1)].tolist()

    def take_events(self) -> list[BlockEvent]:
        """Changes of the prefix index since the last call."""
        return self._index.events.take()

    def walk_events(self) -> IndexWalk:
        """STORED for every indexed block, parents first, in parts: for a listener that joins late and gets every
        change from now on. The index may change between two parts."""
        return IndexWalk(self._index)

    def map(self, max_cells: int) -> BlockMap:
        """What every block is, or where there are more than ``max_cells``, the highest state in each cell."""
        return map_blocks(self._pool, max_cells)

    def map_host(self, max_cells: int) -> HostBlockMap | None:
        """The same of the second tier; None where there is none."""
        return map_host_blocks(self._host, max_cells)

    def recount(self) -> Recount:
        """Counts active blocks that no slot, queued copy or step in flight accounts for, from the table, some at a
        time: 0, or a defect. The cheap part of `audit`."""
        return Recount(self._pool, self._host, self._tables, self._growth.copies)

    def audit(self) -> BlockAudit:
        """Recount everything from scratch."""
        return audit_blocks(self._pool, self._host, self._tables, self._growth.copies, self._chains)

    def _find(self, token_ids_T: np.ndarray, salt: str) -> tuple[np.ndarray, Chain]:
        if self.config.prefix_cache is PrefixCache.OFF:
            return _NO_BLOCKS, Chain(salt=salt, root=b"")
        return self._index.find(np.ascontiguousarray(token_ids_T, np.int32), salt)

    def _open(self, request_id: str, chain: Chain, blocks: np.ndarray) -> SlotId:
        slot = self._tables.take(request_id)
        self._chains[slot] = chain
        self._tables.append_to(slot, blocks)
        return slot
