"""The block manager: the single owner of every KV block of a worker.

    tokens of a slot   |-- cached: hit at admit --|-- computed: commit --|-- capacity: grow --|
    its full blocks    shared, in the index       own, in the index      own, writable

Pure: it must not know clocks, sockets, tensors, nor what a request is beyond an id and its tokens. One thread owns it.
Every refusal (OutOfBlocks, OutOfSlots, ValueError) leaves everything as it was.

Why a block may be hit before it is written: plans run in order, copies before tokens, and in each layer keys and values
of all tokens are written before any token attends. So `commit` may be called when the plan is made, or when its result
is known: a request that is admitted afterwards reads these blocks in the same plan or in a later one, after the write.
If the plan fails, the scheduler taints its slots, which takes their blocks out of the index; requests that were
admitted on the strength of these blocks end with it. If the scheduler commits after the result, there are none. Do not
commit tokens that no plan will compute.
"""

from collections.abc import Callable, Iterable
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

NO_BLOCKS = np.empty(0, np.int32)
NumToUse = Callable[[np.ndarray], int]
"""From whether each cached block, head first, is on the host (bool) to how many to use; the rest are computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A request has a slot; its first ``num_cached_tokens`` tokens need not be computed. If ``num_awaited_blocks`` of
    its blocks must come back from the host first, no plan may include the slot while `BlockManager.is_awaited`."""

    slot: SlotId
    num_cached_tokens: int
    num_awaited_blocks: int = 0


class BlockManager:
    """Blocks, slots and the prefix cache of one worker.

    hash_block: for tests with weak hashes. host: the second tier, for others to read. num_queried_tokens,
    num_hit_tokens: prompt tokens admitted so far, and how many of them were cached.
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
        self.host = HostTier(self._pool, host_pool, self._index, max_copies_in=config.max_copies_in)
        if config.num_host_blocks:
            self._pool.offload = self.host.offload
        self._tables = SlotTables(config.max_slots, config.max_blocks_per_slot)
        self._chains: dict[int, Chain] = {}
        self._looked_up: tuple[str, np.ndarray] | None = None  # whose prompt the index watches; its hits in use then
        self._growth = Growth(config.block_size, self._tables, self._pool, self._chains)
        self.table_SM = self._tables.table_SM.view()  # int32 [max_slots, M], -1 where unset
        self.table_SM.flags.writeable = False

    @property
    def num_free(self) -> int:
        """Blocks without useful content."""
        return self._pool.num_blank

    @property
    def num_cached(self) -> int:
        """Unused blocks that a later request may hit; evicted when no free ones are left."""
        return self._pool.num_cached

    @property
    def num_active(self) -> int:
        """Blocks that are neither free nor cached: in use, waiting for steps in flight, or leaked."""
        return self.config.num_blocks - self._pool.num_available

    @property
    def num_indexed(self) -> int:
        """Blocks that a prompt may hit, whether in use or not."""
        return len(self._index)

    @property
    def num_evicted_blocks(self) -> int:
        """Cached blocks evicted so far to make room, including those that went to the host."""
        return self._pool.num_evicted_blocks

    def capacity(self, slot: int) -> int:
        """Tokens that a slot's blocks can hold."""
        return int(self._tables.num_blocks_S[slot]) * self.config.block_size

    def match(self, token_ids_T: np.ndarray, *, salt: str = "") -> int:
        """How many tokens of a prompt `admit` would find cached on either tier: whole blocks, never the last token.
        Changes nothing."""
        return len(self._find(token_ids_T, salt)[0]) * self.config.block_size

    def num_hits_in_use(
        self, request_id: str, token_ids_T: np.ndarray, *, salt: str = "", besides: np.ndarray = NO_BLOCKS
    ) -> int:
        """How many device blocks in use `admit` would share, besides these. Cached blocks do not count here, as they
        are included in `num_cached`. Changes nothing but `most_hits_in_use`."""
        swapped = self.host.swapped.get(request_id)
        if swapped is None:
            hits, chain = self._find(token_ids_T, salt)
            hits = hits[hits < self.config.num_blocks]
        else:
            chain = swapped.chain
            resident = [self._index.device_block(chain, i) for i in range(len(swapped.blocks))]
            hits = np.array([block for block in resident if block is not None], np.int32)
        self._index.watch(chain, token_ids_T)
        in_use = hits[~self._pool.lru.contains(hits)]
        self._looked_up = request_id, in_use
        return int(np.count_nonzero(~np.isin(in_use, besides)))

    def most_hits_in_use(self, request_id: str, *, besides: np.ndarray = NO_BLOCKS) -> int | None:
        """What `num_hits_in_use` of the request looked up last gives at most now; None if unknown. It rises only if a
        block of the prompt enters the index, or a request is admitted, which may share hits that were cached."""
        request_looked_up, in_use = self._looked_up or (None, NO_BLOCKS)
        if request_id != request_looked_up or self._index.has_watched_entered:
            return None
        return int(np.count_nonzero(~np.isin(in_use, besides))) if len(besides) else len(in_use)

    def freed_by(self, slots: Iterable[int]) -> np.ndarray:
        """int32: blocks that nobody would use any more if these slots were released."""
        return self._pool.freed_by(np.concatenate([self._tables.row(slot) for slot in slots]))

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
        """Take a slot, reference the cached prefix, and grow to ``reserve_tokens``; all or nothing. Blocks that are
        cached on the host are queued to be copied in; what was swapped out for this request comes back whole.

        token_ids_T: int32, at least one. num_to_use: called if any block of the hit is on the host. Raises OutOfSlots;
        OutOfBlocks; ValueError if the id already holds a slot, or the prompt is empty or does not fit a row.
        """
        self._tables.check_new(request_id)
        if not self._growth.blocks_for(len(token_ids_T)):
            raise ValueError("no tokens")
        if request_id in self.host.swapped:
            return self._admit_swapped(request_id, reserve_tokens or 0)
        hits, chain = self._find(token_ids_T if lookup is PrefixLookup.LONGEST else token_ids_T[:1], salt)
        is_on_host = hits >= self.config.num_blocks
        if is_on_host.any() and (num_used := num_to_use(is_on_host)) < len(hits):
            hits, is_on_host = hits[:num_used], is_on_host[:num_used]
            chain = chain.fork(num_used)
        on_device, on_host = hits[~is_on_host], hits[is_on_host]
        self._check_room(on_device, len(hits), reserve_tokens or 0)
        self._pool.share(on_device)
        if len(on_host):
            self.host.share(on_host)
        admission = self._place(request_id, chain, hits, len(hits) * self.config.block_size, reserve_tokens or 0)
        self.num_queried_tokens += len(token_ids_T)
        self.num_hit_tokens += admission.num_cached_tokens
        return admission

    def _admit_swapped(self, request_id: str, reserve_tokens: int) -> Admission:
        """Bring a swapped request back. Blocks whose content is indexed on the device are shared, not copied."""
        swapped = self.host.swapped[request_id]
        blocks = swapped.blocks.copy()
        for i in range(len(blocks)):
            resident = self._index.device_block(swapped.chain, i)
            blocks[i] = blocks[i] if resident is None else resident
        resident_blocks = blocks[blocks < self.config.num_blocks]
        self._check_room(resident_blocks, len(blocks), reserve_tokens)
        self.host.pop_swapped(request_id)
        self._pool.share(resident_blocks)
        self.host.pool.drop(swapped.blocks[blocks < self.config.num_blocks])
        return self._place(request_id, swapped.chain, blocks, swapped.num_tokens, reserve_tokens)

    def _check_room(self, shared: np.ndarray, num_blocks: int, reserve_tokens: int) -> None:
        """OutOfBlocks if a row of num_blocks, grown to reserve_tokens, of which these are shared, does not fit."""
        wanted = max(num_blocks, self._growth.blocks_for(reserve_tokens)) - len(shared)
        free = self._pool.num_available - self._pool.num_taken_by_sharing(shared)
        if wanted > free:
            raise OutOfBlocks(wanted=wanted, free=free)

    def _place(
        self, request_id: str, chain: Chain, blocks: np.ndarray, num_tokens: int, reserve_tokens: int
    ) -> Admission:
        """Open a slot for blocks of either tier. There is room, and the caller has taken references to them."""
        self._looked_up = None
        is_on_host = blocks >= self.config.num_blocks
        num_on_host = int(np.count_nonzero(is_on_host))
        num_more = max(0, self._growth.blocks_for(reserve_tokens) - len(blocks))
        new = self._pool.allocate(num_on_host + num_more)
        row = np.concatenate([blocks, new[num_on_host:]])
        if num_on_host:
            row[: len(blocks)][is_on_host] = new[:num_on_host]
        slot = self._open(request_id, chain, row)
        if num_on_host:
            self.host.copy_in(blocks[is_on_host], new[:num_on_host])
        return Admission(slot=slot, num_cached_tokens=num_tokens, num_awaited_blocks=num_on_host)

    @property
    def num_awaited(self) -> int:
        """Device blocks whose content no plan has brought back yet."""
        return len(self.host.ins)

    def is_awaited(self, slot: int) -> bool:
        """Whether some blocks of this slot are not back from the host yet; until then no step may include it."""
        return self.num_awaited > 0 and bool(self.host.is_awaited_P[self._tables.row(slot)].any())

    @property
    def may_move(self) -> bool:
        """Whether `swap_out` is possible: no step is in flight."""
        return not self._pool.fence.is_open

    def swap_out(self, slot: int, request_id: str, num_tokens: int) -> None:
        """Like `release`, but the blocks with the first ``num_tokens`` tokens go to the host, for `admit` to bring
        back. Raises OutOfBlocks; ValueError if a step is in flight, as its blocks cannot move, or the slot is not this
        request's."""
        if self._pool.fence.is_open or self._tables.owner_of(slot) != request_id:
            raise ValueError(f"slot {slot} cannot be swapped out for {request_id!r} now")
        row = self._tables.row(slot)[: self._growth.blocks_for(num_tokens)].copy()
        origins = [self._growth.copies.origin(block) for block in row.tolist()]
        chain = self._chains[slot]
        self.host.swap_out(request_id, row, origins, chain.fork(min(len(chain), len(row))), num_tokens)
        self.release(slot, request_id)

    def drop_swapped(self, request_id: str) -> None:
        """Drop what was swapped out for a request. Idempotent."""
        self.host.drop_swapped(request_id)

    def fork(self, parent_slot: int, request_id: str, *, num_tokens: int) -> SlotId:
        """Open a slot for a child that shares the parent's first ``num_tokens`` tokens and every block that holds them.

        Before either writes to a shared tail block, `prepare_write` must be called. Raises OutOfSlots; ValueError.
        """
        self._tables.check_live(parent_slot)
        self._tables.check_new(request_id)
        if not 0 < num_tokens <= self.capacity(parent_slot):
            raise ValueError(f"{num_tokens} tokens to share, the parent has {self.capacity(parent_slot)}")
        blocks = self._tables.row(parent_slot)[: self._growth.blocks_for(num_tokens)].copy()
        self._pool.share(blocks)
        return self._open(request_id, self._chains[parent_slot].fork(num_tokens // self.config.block_size), blocks)

    def release(self, slot: int, request_id: str) -> None:
        """Give slot and blocks back. A no-op if the slot is not (or no longer) this request's, so it is idempotent."""
        if self._tables.owner_of(slot) != request_id:
            return
        blocks = self._tables.give_back(slot)
        del self._chains[slot]
        self.host.cancel_copies_in(blocks[self._pool.ref_P[blocks] == 1])
        self._pool.drop(blocks[::-1])
        self._growth.drop_sources(self._growth.copies.cancel(blocks[self._pool.ref_P[blocks] == 0]))

    def grow(self, slot: int, num_tokens: int) -> None:
        """Grow to hold at least ``num_tokens``; all or nothing. OutOfBlocks; ValueError if no row is that wide."""
        self._growth.grow(slot, num_tokens)

    def grow_many(self, slots_S: np.ndarray, num_tokens_S: np.ndarray) -> np.ndarray:
        """`grow` for distinct slots in turn, without Python per slot. Returns refused slots, int32, in order."""
        return self._growth.grow_many(slots_S, num_tokens_S)

    def prepare_write(self, slot: int, position: int) -> None:
        """Make the block at a position exclusive to this slot: the next plan copies a shared one. OutOfBlocks."""
        self._growth.prepare_write(slot, position)

    def prepare_write_many(self, slots_S: np.ndarray, positions_S: np.ndarray) -> np.ndarray:
        """`prepare_write` for each in turn, without Python where nothing is shared. Returns refused slots, int32."""
        return self._growth.prepare_write_many(slots_S, positions_S)

    def commit(self, slot: int, token_ids_T: np.ndarray, num_computed: int) -> None:
        """Enter full blocks into the prefix index: the first ``num_computed`` of the slot's tokens are in the KV cache,
        or will be when the plan just made has run. Idempotent. A block whose content is in the index already stays
        private. Raises ValueError if so many tokens are not given, or do not fit the slot."""
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
        self.host.pool.blank_out(replaced)

    def taint(self, slot: int) -> None:
        """What this slot computed may be wrong (NaN, a failed step): take its blocks out of the index for good.

        This includes cached blocks that it hit. Other slots that share these keep them (they were complete before), but
        what they compute after them is not indexed either: its parent is gone. A later fork of the slot is tainted too.
        """
        self._tables.check_live(slot)
        blocks = self._tables.row(slot).copy()
        self._chains[slot].is_tainted = True
        self._index.taint(blocks)
        self._pool.forget(blocks)

    def flush_prefix_cache(self) -> int:
        """Drop every unused cached block on both tiers. Returns how many."""
        pools = (self._pool, self.host.pool)
        blocks = np.concatenate([array for pool in pools for array in (pool.lru.to_array(), pool.fence.to_array())])
        blocks = blocks[self._index.holds(blocks)]
        if len(blocks) and len(blocks) == len(self._index):
            self._index.clear()
        for pool in pools:
            pool.forget(blocks)
        return len(blocks)

    def begin_step(self, step: int) -> None:
        """A plan is launched; blocks released from now on wait for it. Raises ValueError if step is not greater than
        the last one."""
        self._pool.fence.begin(step)
        self._growth.drop_sources(self._growth.copies.pop_taken())
        if self.config.num_host_blocks:
            self.host.begin_step(step)

    def end_step(self, step: int) -> None:
        """The oldest plan in flight has run. Raises ValueError if step is not this plan's."""
        self._pool.end_step(step)
        self._growth.drop_sources(self._growth.copies.pop_taken())
        if self.config.num_host_blocks:
            self.host.end_step(step)

    def take_updates(self) -> tuple[np.ndarray, np.ndarray]:
        """Writes to the table since the last call, in order, int32 [U, 3] (slot, column, block); and block copies to do
        before any write, int32 [C, 2] (source, destination). Both go into the plan that begins next."""
        self._growth.drop_sources(self._growth.copies.pop_taken())
        return self._tables.updates.take(), self._growth.copies.take()

    def take_moves(self) -> tuple[np.ndarray, np.ndarray]:
        """Copies between the tiers for the plan that begins next, two int32 [C, 2]: (device, host block), to do before
        everything else in it; and (host, device block), to do before anything of the plan after it. Host blocks are
        numbered from 0."""
        return self.host.take() if self.config.num_host_blocks else (NO_COPIES, NO_COPIES)

    def invalidate_copies(self, copies_out_C2: np.ndarray, copies_in_C2: np.ndarray) -> list[int]:
        """A plan with these copies failed: blocks that they should have filled are not hit or brought back any more.
        Returns the slots that hold such blocks on the device."""
        targets = copies_in_C2[:, 1]
        self._looked_up = None  # it may have been swapped out: from now on it hits what is indexed
        if len(copies_out_C2):
            targets = np.concatenate([targets, self.host.invalidate(copies_out_C2[:, 1])])
        if not len(targets):
            return []
        self._index.taint(targets)
        self._pool.forget(targets)
        live = np.flatnonzero(self._tables.is_live_S)
        return live[np.isin(self._tables.table_SM[live], targets).any(axis=1)].tolist()

    def take_events(self) -> list[BlockEvent]:
        """Changes of the prefix index since the last call."""
        return self._index.events.take()

    def walk_events(self) -> IndexWalk:
        """STORED events for every indexed block, parents first, in parts: for a listener that joins late and receives
        every change from now on. The index may change between two parts."""
        return IndexWalk(self._index)

    def map(self, max_cells: int) -> BlockMap:
        """The state of every block; if there are more than ``max_cells``, the highest state in each cell."""
        return map_blocks(self._pool, max_cells)

    def map_host(self, max_cells: int) -> HostBlockMap | None:
        """The same for the second tier; None if there is none."""
        return map_host_blocks(self.host, max_cells)

    def recount(self) -> Recount:
        """Counts, some blocks at a time, the leaked ones: those that no slot, queued copy or step in flight accounts
        for. More than 0 is a defect. The cheap part of `audit`."""
        return Recount(self._pool, self.host, self._tables, self._growth.copies)

    def audit(self) -> BlockAudit:
        """Recount everything from scratch."""
        return audit_blocks(self._pool, self.host, self._tables, self._growth.copies, self._chains)

    def _find(self, token_ids_T: np.ndarray, salt: str) -> tuple[np.ndarray, Chain]:
        if self.config.prefix_cache is PrefixCache.OFF:
            return NO_BLOCKS, Chain(salt=salt, root=b"")
        return self._index.find(np.ascontiguousarray(token_ids_T, np.int32), salt)

    def _open(self, request_id: str, chain: Chain, blocks: np.ndarray) -> SlotId:
        slot = self._tables.take(request_id)
        self._chains[slot] = chain
        self._tables.append_to(slot, blocks)
        return slot
