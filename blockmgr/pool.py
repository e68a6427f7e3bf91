"""The state of every block, and how often it is referenced.

    blank ── allocate ──► active ── last reference dropped ──► (deferred, while steps are in flight)
      ▲                     ▲                                     │ indexed            │ not indexed
      │                     └── share ── cached ◄─────────────────┘                    │
      └──── evict ───────────────────────┘ └────────────────────────► blank ◄──────────┘

A block is in exactly one of these states; `ref_P` counts live table entries and queued copies. The fence holds deferred
blocks; a queue holds cached ones, least recently released first. There is one pool for each tier. It must not know who
the owners are, what a table row looks like, nor that there is another tier.
"""

from collections import deque
from collections.abc import Callable, Collection

import numpy as np

from octavo.blockmgr.errors import OutOfBlocks
from octavo.blockmgr.prefix_index import PrefixIndex

_NO_BLOCKS = np.empty(0, np.int32)
_NOT_HELD = 0  # by the fence
_ABSENT = -1  # from the queue


class StepFence:
    """Holds blocks that were released while steps were in flight until all of these steps have ended.

        begin 1 ── begin 2 ── release of b ── end 1 ── end 2 ── b may be used again

    Steps begin in ascending order and end in the order in which they began.
    """

    def __init__(self, num_blocks: int) -> None:
        self._open: deque[int] = deque()
        self._last_begun: int | None = None
        self._holds: deque[tuple[int, int, np.ndarray]] = deque()  # (last step begun, number of the hold, blocks)
        self._hold_P = np.zeros(num_blocks, np.int64)  # number of the hold that a block waits in
        self._num_holds = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def is_open(self) -> bool:
        """Whether a step is in flight."""
        return bool(self._open)

    def begin(self, step: int) -> None:
        """A step is launched. Raises ValueError if its number is not greater than the last one's."""
        if self._last_begun is not None and step <= self._last_begun:
            raise ValueError(f"step {step} begins after step {self._last_begun}")
        self._open.append(step)
        self._last_begun = step

    def end(self, step: int) -> np.ndarray:
        """The oldest step in flight has ended. Returns the blocks that are no longer held, int32, in order of release.
        Raises ValueError for any other step."""
        if not self._open or self._open[0] != step:
            raise ValueError(f"step {step} ends, in flight are {list(self._open)}")
        self._open.popleft()
        passed = []
        while self._holds and self._holds[0][0] <= step:
            passed.append(self._holds.popleft())
        if not passed:
            return _NO_BLOCKS
        alive = self._alive(passed)
        self.discard(alive)
        return alive

    def hold(self, blocks: np.ndarray) -> None:
        """Hold released blocks, int32, distinct, until all steps now in flight have ended. Raises ValueError if none
        is."""
        if self._last_begun is None or not self._open:
            raise ValueError("no step is in flight")
        self._num_holds += 1
        self._holds.append((self._last_begun, self._num_holds, blocks))
        self._hold_P[blocks] = self._num_holds
        self._count += len(blocks)

    def discard(self, blocks: np.ndarray) -> None:
        """Forget held blocks: they are in use again."""
        self._hold_P[blocks] = _NOT_HELD
        self._count -= len(blocks)

    def contains(self, blocks: np.ndarray) -> np.ndarray:
        """bool per block: whether it is held."""
        return self._hold_P[blocks] != _NOT_HELD

    def to_array(self) -> np.ndarray:
        """Held blocks, int32, in order of release."""
        return self._alive(self._holds)

    def _alive(self, holds: Collection[tuple[int, int, np.ndarray]]) -> np.ndarray:
        """The blocks of these holds that have not been taken out since."""
        if not holds:
            return _NO_BLOCKS
        blocks = np.concatenate([blocks for _, _, blocks in holds])
        return blocks[self._hold_P[blocks] == np.repeat([hold for _, hold, _ in holds], [len(b) for _, _, b in holds])]


class LruQueue:
    """Cached blocks in the order of eviction, with removal from the middle. Operations take whole arrays.

    The first block pushed is the first popped. A request's blocks are pushed tail first, so that a prefix loses its end
    before its beginning. A block that is pushed again (after `discard`) is the newest.

    An entry is live while its block's position points at it. `discard` only resets the position; dead entries are
    skipped by `pop`, or removed when the array is full, so every operation is amortised O(blocks given).
    An intrusive doubly linked list was measured for comparison: 250 blocks in and out take 20 us there and 4 us here,
    one block 0.3 us there and 3 us here, and two linked lists of 500,000 take 0.12 s to build (see
    bench/worker/blockmgr.py).
    """

    def __init__(self, num_blocks: int) -> None:
        self._entries = np.empty(2 * num_blocks, np.int32)
        self._position_P = np.full(num_blocks, _ABSENT, np.int32)
        self._head = 0
        self._tail = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, blocks: np.ndarray) -> None:
        """Append blocks, int32, distinct, none of them in the queue; the first one counts as the oldest."""
        num = len(blocks)
        if self._tail + num > len(self._entries):
            self._squeeze()
        end = self._tail + num
        self._entries[self._tail : end] = blocks
        self._position_P[blocks] = np.arange(self._tail, end, dtype=np.int32)
        self._tail = end
        self._count += num

    def discard(self, blocks: np.ndarray) -> None:
        """Take these blocks out, wherever they are in the queue. All of them must be in it."""
        self._position_P[blocks] = _ABSENT
        self._count -= len(blocks)

    def pop(self, num: int) -> np.ndarray:
        """Take out the ``num`` oldest blocks, int32, oldest first. Raises LookupError if there are fewer."""
        if num > self._count:
            raise LookupError(f"{num} wanted, {self._count} in the queue")
        found: list[np.ndarray] = []
        missing = num
        while missing:
            live = self._live_positions(self._head, self._head + max(missing, 64))[:missing]
            found.append(self._entries[live])
            missing -= len(live)
            self._head = (
                int(live[-1]) + 1 if not missing else min(self._head + max(missing + len(live), 64), self._tail)
            )
        blocks = np.concatenate(found) if found else np.empty(0, np.int32)
        self.discard(blocks)
        return blocks

    def contains(self, blocks: np.ndarray) -> np.ndarray:
        """bool per block: whether it is in the queue."""
        return self._position_P[blocks] != _ABSENT

    def stands(self, begin: int, end: int) -> np.ndarray:
        """bool for each id from begin to end: whether the block is where its position says. Does not rely on the count,
        so that audits can check it."""
        position_B = self._position_P[begin:end]
        is_inside_B = (position_B >= self._head) & (position_B < self._tail)
        found_B = self._entries[np.where(is_inside_B, position_B, 0)] == np.arange(begin, end, dtype=np.int32)
        return np.asarray(is_inside_B & found_B)

    def to_array(self) -> np.ndarray:
        """All blocks, oldest first, int32."""
        return self._entries[self._live_positions(self._head, self._tail)]

    def _live_positions(self, start: int, stop: int) -> np.ndarray:
        stop = min(stop, self._tail)
        positions = np.arange(start, stop, dtype=np.int32)
        return positions[self._position_P[self._entries[start:stop]] == positions]

    def _squeeze(self) -> None:
        blocks = self.to_array()
        self._entries[: len(blocks)] = blocks
        self._position_P[blocks] = np.arange(len(blocks), dtype=np.int32)
        self._head, self._tail = 0, len(blocks)


class BlockPool:
    """The blocks of one tier: ids first to first + num_blocks - 1. Arrays have rows for all lower ids, too.

    Available blocks are allocated in this order: blank ones, last released first (at the start: ascending ids); then
    cached ones, least recently released first, within one release the tail of the row before its head.

    offload: called with cached blocks before they are evicted, while they are still in the index; it may move their
    entries to blocks of another tier.
    """

    def __init__(self, num_blocks: int, index: PrefixIndex, *, first: int = 0) -> None:
        self.first = first
        self.num_blocks = num_blocks
        self.index = index
        self.offload: Callable[[np.ndarray], None] | None = None
        self.ref_P = np.zeros(first + num_blocks, np.int32)
        self.lru = LruQueue(first + num_blocks)
        self.fence = StepFence(first + num_blocks)
        self.num_evicted_blocks = 0
        rising = np.arange(first, first + num_blocks, dtype=np.int32)
        self._blank = rising[::-1].copy()  # a stack; its top is at the end
        self._blank_place_P = np.arange(first + num_blocks - 1, -1, -1, dtype=np.int32)  # unused for ids below `first`
        self._num_blank = num_blocks

    @property
    def num_blank(self) -> int:
        """Blocks without useful content."""
        return self._num_blank

    @property
    def num_cached(self) -> int:
        """Unreferenced blocks that a later request may hit."""
        return len(self.lru)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out."""
        return self._num_blank + len(self.lru)

    def blank_blocks(self) -> np.ndarray:
        """Blank blocks, int32; the last one is handed out next."""
        return self._blank[: self._num_blank].copy()

    def is_blank(self, begin: int, end: int) -> np.ndarray:
        """bool for each id from begin to end: whether the block is in the stack of blank ones."""
        place_B = self._blank_place_P[begin:end]
        is_inside_B = place_B < self._num_blank
        found_B = self._blank[np.where(is_inside_B, place_B, 0)] == np.arange(begin, end, dtype=np.int32)
        return np.asarray(is_inside_B & found_B)

    def allocate(self, num: int) -> np.ndarray:
        """Hand out ``num`` blocks, int32, with one reference each. Raises OutOfBlocks, which changes nothing.

        Before a cached block is handed out, it leaves the index, with a REMOVED event, or its entry moves to another
        tier.
        """
        if num > self.num_available:
            raise OutOfBlocks(wanted=num, free=self.num_available)
        num_from_blank = min(num, self._num_blank)
        blocks = self._pop_blank(num_from_blank)
        if num > num_from_blank:
            blocks = np.concatenate([blocks, self._evict(num - num_from_blank)])
        self.ref_P[blocks] = 1
        self.index.clear_taint(blocks)
        return blocks

    def num_taken_by_sharing(self, blocks: np.ndarray) -> int:
        """By how much sharing these blocks would lower `num_available`."""
        return int(np.count_nonzero(self.lru.contains(blocks)))

    def freed_by(self, blocks: np.ndarray) -> np.ndarray:
        """int32: blocks that have no reference left if one to each of these, which may repeat, is dropped."""
        distinct, counts = np.unique(blocks, return_counts=True)  # not over the pool, which may have a million
        return distinct[counts == self.ref_P[distinct]]

    def share(self, blocks: np.ndarray) -> None:
        """Add a reference to each block, int32, distinct. They may be active, deferred or cached, never blank."""
        idle = blocks[self.ref_P[blocks] == 0]
        if len(idle):
            is_held = self.fence.contains(idle)
            self.fence.discard(idle[is_held])
            self.lru.discard(idle[~is_held])
        self.ref_P[blocks] += 1

    def drop(self, blocks: np.ndarray) -> None:
        """Drop a reference to each block, int32, distinct; the first one will be the first to be evicted."""
        self.ref_P[blocks] -= 1
        idle = blocks[self.ref_P[blocks] == 0]
        if self.fence.is_open and len(idle):
            self.fence.hold(idle)
        else:
            self._settle(idle)

    def end_step(self, step: int) -> None:
        """The oldest step in flight has ended: blocks that no longer wait for a step become cached or blank."""
        blocks = self.fence.end(step)
        if len(blocks):
            self._settle(blocks)

    def forget(self, blocks: np.ndarray) -> None:
        """Take blocks out of the prefix index, whatever their state; cached ones become blank."""
        self.index.remove(blocks)
        self.blank_out(blocks)

    def blank_out(self, blocks: np.ndarray) -> None:
        """These blocks have left the prefix index: cached ones of this tier become blank."""
        blocks = blocks[(blocks >= self.first) & (blocks < self.first + self.num_blocks)]
        if not len(blocks):
            return
        was_cached = blocks[self.lru.contains(blocks)]
        self.lru.discard(was_cached)
        self._push_blank(was_cached)

    def _settle(self, blocks: np.ndarray) -> None:
        is_indexed = self.index.holds(blocks)
        self.lru.push(blocks[is_indexed])
        self._push_blank(blocks[~is_indexed])

    def _evict(self, num: int) -> np.ndarray:
        victims = self.lru.pop(num)
        if self.offload is not None:
            self.offload(victims)
        self.index.remove(victims)
        self.num_evicted_blocks += num
        return victims

    def _pop_blank(self, num: int) -> np.ndarray:
        if not num:
            return _NO_BLOCKS
        self._num_blank -= num
        return self._blank[self._num_blank : self._num_blank + num][::-1].copy()

    def _push_blank(self, blocks: np.ndarray) -> None:
        self._blank[self._num_blank : self._num_blank + len(blocks)] = blocks
        self._blank_place_P[blocks] = np.arange(self._num_blank, self._num_blank + len(blocks), dtype=np.int32)
        self._num_blank += len(blocks)
