"""Room to write for a slot: new blocks at its end, and copies of blocks that it shares."""

import numpy as np

from octavo.blockmgr.errors import OutOfBlocks
from octavo.blockmgr.pool import BlockPool
from octavo.blockmgr.prefix_index import Chain
from octavo.blockmgr.tables import CopyQueue, SlotTables

_NO_SLOTS = np.empty(0, np.int32)


class Growth:
    """Gives it. It must not know hashes of tokens; of steps only that the copy queue waits for them."""

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
