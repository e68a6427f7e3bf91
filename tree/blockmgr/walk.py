"""Everything that is in the prefix index, in parts, while the index goes on changing.

Parts come in the order of entries, parents before children, and each says what is in the index when it is taken. So
whoever hears every change as well has the whole index at the end: what entered behind the walk comes with it, perhaps
again, what left before its turn does not come, and what left after it was heard as a change.
It must not know who listens.
"""

from collections import deque
from typing import Protocol

import numpy as np

from blockmgr.events import BlockEvent

LOOK_AHEAD = 16  # parts that are sorted at once: one pass over all entries for so many


class Entries(Protocol):
    """What a walk needs of the index. entry_P: int64, growing with each entry, negative where a block has none."""

    entry_P: np.ndarray

    def stored_event(self, block: int) -> BlockEvent:
        """STORED for a block of the index."""


class IndexWalk:
    """One listener's way through the index."""

    def __init__(self, index: Entries) -> None:
        self._index = index
        self._last_entry = 0  # of those that were sorted; entries begin at 1
        self._ahead: deque[tuple[int, int]] = deque()  # (entry, block), in order

    def take(self, max_blocks: int) -> list[BlockEvent]:
        """STORED for the next blocks, at most max_blocks. Fewer: the end is reached, for now."""
        events: list[BlockEvent] = []
        while len(events) < max_blocks:
            if not self._ahead and not self._sort(LOOK_AHEAD * max_blocks):
                break
            entry, block = self._ahead.popleft()
            if self._index.entry_P[block] == entry:
                events.append(self._index.stored_event(block))
        return events

    def _sort(self, max_blocks: int) -> bool:
        """Look up the next entries. Whether there are any."""
        entry_P = self._index.entry_P
        blocks = np.flatnonzero(entry_P > self._last_entry)
        if len(blocks) > max_blocks:
            blocks = blocks[np.argpartition(entry_P[blocks], max_blocks)[:max_blocks]]
        blocks = blocks[np.argsort(entry_P[blocks])]
        self._ahead.extend(zip(entry_P[blocks].tolist(), blocks.tolist(), strict=True))
        if self._ahead:
            self._last_entry = self._ahead[-1][0]
        return bool(self._ahead)
