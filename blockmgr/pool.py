"""Where every block is, and how often it is referenced.

    blank ── allocate ──► active ── last reference dropped ──► (deferred, while steps are in flight)
      ▲                     ▲                                     │ indexed            │ not indexed
      │                     └── share ── cached ◄─────────────────┘                    │
      └──── evict ───────────────────────┘ └────────────────────────► blank ◄──────────┘

A block is in exactly one of these places; `ref_P` counts live table entries and queued copies. It must not know who
the owners are, nor what a table row looks like.
"""

import numpy as np

from blockmgr.errors import OutOfBlocks
from blockmgr.fence import StepFence
from blockmgr.lru import LruQueue
from blockmgr.prefix_index import PrefixIndex

_NO_BLOCKS = np.empty(0, np.int32)


class BlockPool:
    """The blocks of one device.

    Order in which free blocks are handed out: blank ones first, last released first (at the start: rising ids); then
    cached ones, least recently released first, within one release the tail of the row before its head.
    """

    def __init__(self, num_blocks: int, index: PrefixIndex) -> None:
        self.num_blocks = num_blocks
        self.index = index
        self.ref_P = np.zeros(num_blocks, np.int32)
        self.lru = LruQueue(num_blocks)
        self.fence = StepFence(num_blocks)
        self.num_evicted_blocks = 0
        self._blank = np.arange(num_blocks, dtype=np.int32)[::-1].copy()  # a stack; its top is at the end
        self._num_blank = num_blocks

    @property
    def num_blank(self) -> int:
        """Blocks that hold nothing of use."""
        return self._num_blank

    @property
    def num_cached(self) -> int:
        """Blocks that nobody references and that a later request may hit."""
        return len(self.lru)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give."""
        return self._num_blank + len(self.lru)

    def blank_blocks(self) -> np.ndarray:
        """Blank blocks, int32, the next one to be handed out last."""
        return self._blank[: self._num_blank].copy()

    def allocate(self, num: int) -> np.ndarray:
        """``num`` blocks with one reference each, int32. OutOfBlocks leaves everything as it was.

        A cached block leaves the index, and its REMOVED event is out, before it is handed out.
        """
        if num > self.num_available:
            raise OutOfBlocks(wanted=num, free=self.num_available)
        num_from_blank = min(num, self._num_blank)
        blocks = self._pop_blank(num_from_blank)
        if num > num_from_blank:
            blocks = np.concatenate([blocks, self._evict(num - num_from_blank)])
        self.ref_P[blocks] = 1
        self.index.unbar(blocks)
        return blocks

    def num_taken_by_sharing(self, blocks: np.ndarray) -> int:
        """By how much `share` of these blocks lowers `num_available`."""
        return int(np.count_nonzero(self.lru.contains(blocks)))

    def share(self, blocks: np.ndarray) -> None:
        """One more reference to each block, int32, distinct: active, deferred or cached ones, never blank."""
        idle = blocks[self.ref_P[blocks] == 0]
        if len(idle):
            is_held = self.fence.contains(idle)
            self.fence.discard(idle[is_held])
            self.lru.discard(idle[~is_held])
        self.ref_P[blocks] += 1

    def drop(self, blocks: np.ndarray) -> None:
        """One reference less to each block, int32, distinct; the first one is the first to be given up."""
        self.ref_P[blocks] -= 1
        idle = blocks[self.ref_P[blocks] == 0]
        if self.fence.is_open and len(idle):
            self.fence.hold(idle)
        else:
            self._settle(idle)

    def end_step(self, step: int) -> None:
        """The oldest step in flight has ended: what waited for it becomes free."""
        for blocks in self.fence.end(step):
            self._settle(blocks)

    def forget(self, blocks: np.ndarray) -> None:
        """Take blocks out of the prefix index, wherever they are; cached ones become blank."""
        self.index.remove(blocks)
        self.blank_out(blocks)

    def blank_out(self, blocks: np.ndarray) -> None:
        """These blocks have left the prefix index: those that were cached are blank now."""
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
        self._num_blank += len(blocks)
