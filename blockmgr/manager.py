"""The block manager: the single owner of every KV block of a worker.

    tokens of a slot   |-- cached: hit at admit --|-- computed: commit --|-- capacity: grow --|
    its full blocks    shared, in the index       own, in the index      own, writable

Pure: it must not know clocks, sockets, tensors, nor what a request is beyond an id and its tokens. One thread owns it.
Every refusal (OutOfBlocks, OutOfSlots, ValueError) leaves everything as it was.

Why a block may be hit before it is written: plans run in order, copies before tokens, and in each layer keys and values
of all tokens are written before any token attends. So `commit` may be called when the plan is made or when its result
is known: whoever is admitted afterwards reads these blocks in the same plan or in a later one, after the write. If the
plan fails, the scheduler taints its slots, which takes their blocks out of the index; those admitted on the promise end
with it. A scheduler that commits after the result has none of those. Commit nothing that no plan will carry out.
"""

from dataclasses import dataclass

import numpy as np

from octavo.blockmgr.audit import BlockAudit, audit_blocks, count_leaked
from octavo.blockmgr.config import BlockManagerConfig
from octavo.blockmgr.errors import OutOfBlocks
from octavo.blockmgr.ids import PrefixCache, PrefixLookup, SlotId
from octavo.blockmgr.pool import BlockPool
from octavo.blockmgr.prefix_index import BlockEvent, Chain, HashBlock, IndexWalk, PrefixIndex, RootHasher, hash_block
from octavo.blockmgr.tables import CopyQueue, SlotTables

_NO_BLOCKS = np.empty(0, np.int32)
_NO_SLOTS = np.empty(0, np.int32)


class Growth:
    """Gives a slot room to write: new blocks at its end, and copies of blocks that it shares.

    It must not know hashes of tokens; of steps only that the copy queue waits for them.
    """

    def __init__(self, block_size: int, tables: SlotTables, pool: BlockPool, chains: dict[int, Chain]) -> None:
        self.copies = CopyQueue()
        self._block_size = block_size
        self._tables = tables
        self._pool = pool
        self._chains = chains

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens. ValueError where no row is so wide."""
        num_blocks = -(-num_tokens // self._block_size)
        if num_tokens < 0 or num_blocks > self._tables.width:
            raise ValueError(f"{num_tokens} tokens do not fit a row of {self._tables.width} blocks")
        return num_blocks

    def missing(self, slot: int, num_tokens: int) -> int:
        """Blocks that a slot lacks to hold so many tokens."""
        self._tables.check_live(slot)
        return max(0, self.blocks_for(num_tokens) - int(self._tables.num_blocks_S[slot]))

    def grow(self, slot: int, num_tokens: int) -> None:
        """Capacity for ``num_tokens``, all or nothing."""
        count = self.missing(slot, num_tokens)
        if count:
            self._tables.append_to(slot, self._pool.allocate(count))

    def grow_many(self, slots_S: np.ndarray, num_tokens_S: np.ndarray) -> np.ndarray:
        """`grow` for each slot in turn; those that it refused. Only rows that cross a border are looked at."""
        slots_S = np.asarray(slots_S)
        if not self._tables.is_live_S[slots_S].all():
            raise ValueError(f"nobody holds slots {slots_S[~self._tables.is_live_S[slots_S]].tolist()}")
        counts_S = (np.asarray(num_tokens_S) + (self._block_size - 1)) // self._block_size
        counts_S -= self._tables.num_blocks_S[slots_S]
        rows = np.flatnonzero(counts_S > 0)
        return self._grow_rows(slots_S[rows], counts_S[rows]) if len(rows) else _NO_SLOTS

    def prepare_write(self, slot: int, position: int) -> None:
        """The block of a position belongs to this slot alone afterwards, and is not in the prefix index."""
        column = self._column(slot, position)
        block = int(self._tables.table_SM[slot, column])
        if self._num_owners(block) > 1:
            self._copy_on_write(slot, column, block)
        elif self._pool.index.digest_of[block] is not None:
            self._pool.forget(np.array([block], np.int32))
        self._chains[slot].truncate(column)

    def prepare_write_many(self, slots_S: np.ndarray, positions_S: np.ndarray) -> np.ndarray:
        """`prepare_write` for each in turn; the slots that found no block for their copy."""
        blocks_S = self._tables.table_SM[slots_S, np.asarray(positions_S) // self._block_size]
        is_shared = (self._pool.ref_P[blocks_S] != 1) | self._pool.index.holds(blocks_S) | (blocks_S < 0)
        refused = []
        for i in np.flatnonzero(is_shared).tolist():
            try:
                self.prepare_write(int(slots_S[i]), int(positions_S[i]))
            except OutOfBlocks:
                refused.append(slots_S[i])
        return np.array(refused, np.int32)

    def drop_sources(self, sources: list[int]) -> None:
        """Give back references that the copy queue owned."""
        for source in sources:
            self._pool.drop(np.array([source], np.int32))

    def _grow_rows(self, slots_R: np.ndarray, counts_R: np.ndarray) -> np.ndarray:
        if len(np.unique(slots_R)) < len(slots_R):
            raise ValueError("a slot was given twice")
        if (self._tables.num_blocks_S[slots_R] + counts_R > self._tables.width).any():
            raise ValueError(f"a slot does not fit a row of {self._tables.width} blocks")
        refused_R = self._refuse(counts_R)
        granted_R = ~refused_R
        if granted_R.any():
            blocks = self._pool.allocate(int(counts_R[granted_R].sum()))
            self._tables.append(slots_R[granted_R], counts_R[granted_R], blocks)
        return slots_R[refused_R].astype(np.int32)

    def _refuse(self, counts_R: np.ndarray) -> np.ndarray:
        """bool per row: which of them `grow`, called one after the other, would refuse."""
        free = self._pool.num_available
        if counts_R.sum() <= free:
            return np.zeros(len(counts_R), np.bool_)
        refused = []
        for count in counts_R.tolist():
            refused.append(count > free)
            free -= 0 if refused[-1] else count
        return np.array(refused)

    def _column(self, slot: int, position: int) -> int:
        self._tables.check_live(slot)
        column = position // self._block_size
        if not 0 <= column < self._tables.num_blocks_S[slot]:
            raise ValueError(
                f"position {position} is outside the {self._tables.num_blocks_S[slot]} blocks of slot {slot}"
            )
        return column

    def _num_owners(self, block: int) -> int:
        """Rows that hold a block: a queued copy out of it happens before any write, so it does not count."""
        return int(self._pool.ref_P[block]) - self.copies.num_from(block)

    def _copy_on_write(self, slot: int, column: int, block: int) -> None:
        copy = self._pool.allocate(1)
        origin = self.copies.origin(block)
        self._pool.share(np.array([origin], np.int32))
        self.copies.append(source=origin, destination=int(copy[0]))
        if self._pool.index.is_barred_P[block]:
            self._pool.index.bar(copy)
        self._pool.drop(np.array([block], np.int32))
        self._tables.replace(slot, column, int(copy[0]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A request has a slot; its first ``num_cached_tokens`` tokens need not be computed."""

    slot: SlotId
    num_cached_tokens: int


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
        self._index = PrefixIndex(config.num_blocks, config.block_size, roots, config.max_events, hash_block)
        self._pool = BlockPool(config.num_blocks, self._index)
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
    def num_evicted_blocks(self) -> int:
        """Cached blocks given up so far to make room."""
        return self._pool.num_evicted_blocks

    def capacity(self, slot: int) -> int:
        """Tokens that a slot's blocks can hold."""
        return int(self._tables.num_blocks_S[slot]) * self.config.block_size

    def match(self, token_ids_T: np.ndarray, *, salt: str = "") -> int:
        """Tokens of a prompt that `admit` would find cached: whole blocks, never the last token. Changes nothing."""
        return len(self._find(token_ids_T, salt)[0]) * self.config.block_size

    def admit(
        self,
        request_id: str,
        token_ids_T: np.ndarray,
        *,
        salt: str = "",
        reserve_tokens: int | None = None,
        lookup: PrefixLookup = PrefixLookup.LONGEST,
    ) -> Admission:
        """Take a slot, reference the cached prefix, and grow to ``reserve_tokens``; all or nothing.

        token_ids_T: int32, at least one. OutOfSlots; OutOfBlocks; ValueError for an id that holds a slot, an empty
        prompt, or one that fits no row.
        """
        self._tables.check_new(request_id)
        if not self._growth.blocks_for(len(token_ids_T)):
            raise ValueError("no tokens")
        hits, chain = self._find(token_ids_T if lookup is PrefixLookup.LONGEST else token_ids_T[:1], salt)
        wanted = max(0, self._growth.blocks_for(reserve_tokens or 0) - len(hits))
        free = self._pool.num_available - self._pool.num_taken_by_sharing(hits)
        if wanted > free:
            raise OutOfBlocks(wanted=wanted, free=free)
        self._pool.share(hits)
        slot = self._open(request_id, chain, np.concatenate([hits, self._pool.allocate(wanted)]))
        num_cached_tokens = len(hits) * self.config.block_size
        self.num_queried_tokens += len(token_ids_T)
        self.num_hit_tokens += num_cached_tokens
        return Admission(slot=slot, num_cached_tokens=num_cached_tokens)

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
        self._pool.blank_out(self._index.extend(chain, self._tables.row(slot)[:num_full], tokens))

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
        """Forget every unused cached block; how many."""
        held = self._pool.fence.to_array()
        blocks = np.concatenate([self._pool.lru.to_array(), held[self._index.holds(held)]])
        if len(blocks) and len(blocks) == len(self._index):
            self._index.clear()
        self._pool.forget(blocks)
        return len(blocks)

    def begin_step(self, step: int) -> None:
        """A plan is launched. What is released from now on waits for it. ValueError where steps do not rise."""
        self._pool.fence.begin(step)
        self._growth.drop_sources(self._growth.copies.pop_taken())

    def end_step(self, step: int) -> None:
        """The oldest plan in flight has run. ValueError for any other."""
        self._pool.end_step(step)
        self._growth.drop_sources(self._growth.copies.pop_taken())

    def take_updates(self) -> tuple[np.ndarray, np.ndarray]:
        """int32 [U, 3] (slot, column, block) written to the table since the last call, in order; and int32 [C, 2]
        (source, destination) block copies to do before any write. Both go into the plan that is begun next."""
        self._growth.drop_sources(self._growth.copies.pop_taken())
        return self._tables.updates.take(), self._growth.copies.take()

    def take_events(self) -> list[BlockEvent]:
        """Changes of the prefix index since the last call."""
        return self._index.events.take()

    def walk_events(self) -> IndexWalk:
        """STORED for every indexed block, parents first, in parts: for a listener that joins late and hears every
        change from now on. The index may change between two parts."""
        return IndexWalk(self._index)

    def count_leaked(self) -> int:
        """Active blocks that no slot, queued copy or step in flight accounts for, counted from the table: 0, or a
        defect. The cheap part of `audit`."""
        return count_leaked(self._pool, self._tables, self._growth.copies)

    def audit(self) -> BlockAudit:
        """Recount everything from scratch."""
        return audit_blocks(self._pool, self._tables, self._growth.copies, self._chains)

    def _find(self, token_ids_T: np.ndarray, salt: str) -> tuple[np.ndarray, Chain]:
        if self.config.prefix_cache is PrefixCache.OFF:
            return _NO_BLOCKS, Chain(salt=salt, root=b"")
        return self._index.find(np.ascontiguousarray(token_ids_T, np.int32), salt)

    def _open(self, request_id: str, chain: Chain, blocks: np.ndarray) -> SlotId:
        slot = self._tables.take(request_id)
        self._chains[slot] = chain
        self._tables.append_to(slot, blocks)
        return slot
