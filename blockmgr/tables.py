"""Who has which slot, the block-table row of every slot, and what the next plan must do to the rows and blocks.

`UpdateLog` records writes to rows, `CopyQueue` copies of blocks (copy-on-write), and `Growth` adds blocks to rows. All
but `Growth` must not know reference counts, hashes or steps. Legend: S slots · M table width · U updates · C copies.
"""

import heapq

import numpy as np

from octavo.blockmgr.errors import OutOfBlocks, OutOfSlots
from octavo.blockmgr.ids import SlotId
from octavo.blockmgr.pool import BlockPool
from octavo.blockmgr.prefix_index import Chain

UNSET = -1
_FIRST_CAPACITY = 256
NO_COPIES = np.empty((0, 2), np.int32)
"""No (source, destination) pairs."""


class CopyQueue:
    """Copies (source, destination) in order. Every destination occurs once, and no source is a destination, so a runner
    may do the copies one by one or all at once.

    A queued copy owns one reference to its source until the plan with the copy has begun; then the fence of that step
    protects the source. References are counted elsewhere: the queue returns sources, and the caller drops the
    references.
    """

    def __init__(self) -> None:
        self._source_of: dict[int, int] = {}  # by destination
        self._taken_sources: list[int] = []

    def origin(self, block: int) -> int:
        """The block that has this one's content as long as queued copies have not been done."""
        return self._source_of.get(block, block)

    def append(self, *, source: int, destination: int) -> None:
        """Queue a copy; the queue now owns a reference to the source."""
        self._source_of[destination] = source

    def num_from(self, block: int) -> int:
        """The number of references to a block that the queue owns."""
        return self.sources.count(block)

    def cancel(self, destinations: np.ndarray) -> list[int]:
        """Drop copies into blocks that no row holds any more. Returns the sources; the caller drops the references."""
        if not self._source_of:
            return []
        doomed = [block for block in destinations.tolist() if block in self._source_of]
        return [self._source_of.pop(block) for block in doomed]

    def take(self, limit: int | None = None) -> np.ndarray:
        """Take the oldest ``limit`` queued copies, or all: int32 [C, 2], (source, destination)."""
        if not self._source_of:
            return NO_COPIES
        pairs = self.pending[:limit]
        self._taken_sources += [source for source, _ in pairs]
        for _, destination in pairs:
            del self._source_of[destination]
        return np.array(pairs, np.int32).reshape(-1, 2)

    def __len__(self) -> int:
        return len(self._source_of)

    def pop_taken(self) -> list[int]:
        """Sources of copies that were taken; the caller drops their references."""
        sources, self._taken_sources = self._taken_sources, []
        return sources

    @property
    def pending(self) -> list[tuple[int, int]]:
        """(source, destination) of the copies that `take` would return."""
        return [(source, destination) for destination, source in self._source_of.items()]

    @property
    def sources(self) -> list[int]:
        """Every source to which the queue owns a reference, once per reference."""
        return [*self._source_of.values(), *self._taken_sources]


class UpdateLog:
    """Writes to the rows since the last `take`: (slot, column, block) in order, int32 [U, 3]."""

    def __init__(self) -> None:
        self._rows_U3 = np.empty((_FIRST_CAPACITY, 3), np.int32)
        self._count = 0

    def append(self, slots_U: np.ndarray | int, columns_U: np.ndarray | int, blocks_U: np.ndarray) -> None:
        """Note that blocks were written; a single slot or column applies to all of them."""
        end = self._count + len(blocks_U)
        if end > len(self._rows_U3):
            self._make_room(end)
        rows = self._rows_U3[self._count : end]
        rows[:, 0] = slots_U
        rows[:, 1] = columns_U
        rows[:, 2] = blocks_U
        self._count = end

    def drop_slot(self, slot: int) -> None:
        """Drop the writes for a slot, whose owner has left before a plan had them."""
        if not self._count:
            return
        rows = self._rows_U3[: self._count]
        kept = rows[rows[:, 0] != slot]
        self._rows_U3[: len(kept)] = kept
        self._count = len(kept)

    def take(self) -> np.ndarray:
        """Writes since the last call, int32 [U, 3]."""
        rows = self._rows_U3[: self._count].copy()
        self._count = 0
        return rows

    def _make_room(self, wanted: int) -> None:
        grown = np.empty((max(wanted, 2 * len(self._rows_U3)), 3), np.int32)
        grown[: self._count] = self._rows_U3[: self._count]
        self._rows_U3 = grown


class SlotTables:
    """Slots and rows. The lowest free slot is taken first, so that live rows are close together.

    table_SM: int32 [S, M]; row s has num_blocks_S[s] block ids, then -1.
    """

    def __init__(self, max_slots: int, width: int) -> None:
        self.table_SM = np.full((max_slots, width), UNSET, np.int32)
        self.num_blocks_S = np.zeros(max_slots, np.int32)
        self.is_live_S = np.zeros(max_slots, np.bool_)
        self.updates = UpdateLog()
        self._owner_of: dict[int, str] = {}
        self._slot_of: dict[str, int] = {}
        self._free = list(range(max_slots))

    @property
    def max_slots(self) -> int:
        """The number of rows."""
        return len(self.is_live_S)

    @property
    def width(self) -> int:
        """The number of blocks that a row can hold."""
        return self.table_SM.shape[1]

    @property
    def num_free(self) -> int:
        """The number of free slots."""
        return len(self._free)

    @property
    def owners(self) -> dict[int, str]:
        """Request id by slot, of live slots (a copy)."""
        return dict(self._owner_of)

    def owner_of(self, slot: int) -> str | None:
        """The request that has a slot, or None. Raises ValueError for a number that is no slot."""
        if not 0 <= slot < self.max_slots:
            raise ValueError(f"slot {slot} is not one of {self.max_slots}")
        return self._owner_of.get(slot)

    def check_new(self, request_id: str) -> None:
        """Raises ValueError if the request has a slot already; OutOfSlots if none is free."""
        if request_id in self._slot_of:
            raise ValueError(f"request {request_id!r} already holds slot {self._slot_of[request_id]}")
        if not self._free:
            raise OutOfSlots(max_slots=self.max_slots)

    def check_live(self, slot: int) -> None:
        """Raises ValueError if the slot is free."""
        if self.owner_of(slot) is None:
            raise ValueError(f"nobody holds slot {slot}")

    def take(self, request_id: str) -> SlotId:
        """Take a slot for a request that has passed `check_new`."""
        slot = heapq.heappop(self._free)
        self._owner_of[slot] = request_id
        self._slot_of[request_id] = slot
        self.is_live_S[slot] = True
        return SlotId(slot)

    def give_back(self, slot: int) -> np.ndarray:
        """Free a slot. Returns the blocks of its row, int32, head first. Updates that were not taken are dropped."""
        blocks = self.row(slot).copy()
        del self._slot_of[self._owner_of.pop(slot)]
        self.table_SM[slot, : len(blocks)] = UNSET
        self.num_blocks_S[slot] = 0
        self.is_live_S[slot] = False
        self.updates.drop_slot(slot)
        heapq.heappush(self._free, slot)
        return blocks

    def row(self, slot: int) -> np.ndarray:
        """The blocks of a slot, int32, head first (a view)."""
        return self.table_SM[slot, : self.num_blocks_S[slot]]

    def append(self, slots_S: np.ndarray, counts_S: np.ndarray, blocks: np.ndarray) -> None:
        """Add counts_S[i] blocks, at least one, to row slots_S[i], from ``blocks`` in order. Slots are distinct."""
        slots_U, columns_U = slots_S, self.num_blocks_S[slots_S]
        if len(blocks) > len(slots_S):  # while outputs decode, rows need one each
            slots_U = np.repeat(slots_S, counts_S)
            starts_U = np.repeat(np.cumsum(counts_S) - counts_S, counts_S)
            columns_U = self.num_blocks_S[slots_U] + np.arange(len(blocks)) - starts_U
        self.table_SM[slots_U, columns_U] = blocks
        self.num_blocks_S[slots_S] += counts_S.astype(np.int32)
        self.updates.append(slots_U, columns_U, blocks)

    def append_to(self, slot: int, blocks: np.ndarray) -> None:
        """Add blocks to one row."""
        start = int(self.num_blocks_S[slot])
        end = start + len(blocks)
        self.table_SM[slot, start:end] = blocks
        self.num_blocks_S[slot] = end
        self.updates.append(slot, np.arange(start, end), blocks)

    def replace(self, slot: int, column: int, block: int) -> None:
        """Put another block into a column of a row."""
        self.table_SM[slot, column] = block
        self.updates.append(slot, column, np.array([block], np.int32))


_NO_SLOTS = np.empty(0, np.int32)


class Growth:
    """Gives slots room to write: new blocks at the end of their rows, and copies of blocks that they share. Must not
    know hashes of tokens, nor steps, except that the copy queue waits for them."""

    def __init__(self, block_size: int, tables: SlotTables, pool: BlockPool, chains: dict[int, Chain]) -> None:
        self.copies = CopyQueue()
        self._block_size = block_size
        self._tables = tables
        self._pool = pool
        self._chains = chains

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold num_tokens. Raises ValueError if no row is that wide."""
        num_blocks = -(-num_tokens // self._block_size)
        if num_tokens < 0 or num_blocks > self._tables.width:
            raise ValueError(f"{num_tokens} tokens do not fit a row of {self._tables.width} blocks")
        return num_blocks

    def missing(self, slot: int, num_tokens: int) -> int:
        """How many more blocks a slot needs to hold num_tokens."""
        self._tables.check_live(slot)
        return max(0, self.blocks_for(num_tokens) - int(self._tables.num_blocks_S[slot]))

    def grow(self, slot: int, num_tokens: int) -> None:
        """Grow to a capacity of ``num_tokens``, all or nothing."""
        count = self.missing(slot, num_tokens)
        if count:
            self._tables.append_to(slot, self._pool.allocate(count))

    def grow_many(self, slots_S: np.ndarray, num_tokens_S: np.ndarray) -> np.ndarray:
        """`grow` for each slot in turn. Returns the slots that were refused. Only slots that need blocks cost more than
        a few array operations."""
        slots_S = np.asarray(slots_S)
        if not self._tables.is_live_S[slots_S].all():
            raise ValueError(f"nobody holds slots {slots_S[~self._tables.is_live_S[slots_S]].tolist()}")
        counts_S = (np.asarray(num_tokens_S) + (self._block_size - 1)) // self._block_size
        counts_S -= self._tables.num_blocks_S[slots_S]
        rows = np.flatnonzero(counts_S > 0)
        return self._grow_rows(slots_S[rows], counts_S[rows]) if len(rows) else _NO_SLOTS

    def prepare_write(self, slot: int, position: int) -> None:
        """Make the block at a position exclusive to this slot, and take it out of the prefix index."""
        column = self._column(slot, position)
        block = int(self._tables.table_SM[slot, column])
        if self._num_owners(block) > 1:
            self._copy_on_write(slot, column, block)
        elif self._pool.index.digest_of[block] is not None:
            self._pool.forget(np.array([block], np.int32))
        self._chains[slot].truncate(column)

    def prepare_write_many(self, slots_S: np.ndarray, positions_S: np.ndarray) -> np.ndarray:
        """`prepare_write` for each in turn. Returns the slots for which there was no block to copy to."""
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
        """Drop references that the copy queue owned."""
        for source in sources:
            self._pool.drop(np.array([source], np.int32))

    def _grow_rows(self, slots_R: np.ndarray, counts_R: np.ndarray) -> np.ndarray:
        if (slots_R[1:] <= slots_R[:-1]).any() and len(np.unique(slots_R)) < len(slots_R):
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
        """bool per row: whether `grow` would refuse it if called for one row after another."""
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
        """How many rows hold a block. Copies that are queued from it do not count: they happen before any write."""
        return int(self._pool.ref_P[block]) - self.copies.num_from(block)

    def _copy_on_write(self, slot: int, column: int, block: int) -> None:
        copy = self._pool.allocate(1)
        origin = self.copies.origin(block)
        self._pool.share(np.array([origin], np.int32))
        self.copies.append(source=origin, destination=int(copy[0]))
        if self._pool.index.is_tainted_P[block]:
            self._pool.index.taint(copy)
        self._pool.drop(np.array([block], np.int32))
        self._tables.replace(slot, column, int(copy[0]))
