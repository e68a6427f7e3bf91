"""What a listener is told of the prefix cache: a change of it, or all that is in it while it goes on changing.

Must not know how a block is found, nor who listens.
"""

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np

from octavo.blockmgr.ids import Tier

LOOK_AHEAD = 16  # parts of a walk that are sorted at once: one pass over all entries for so many


class EventKind(Enum):
    """What became of a block."""

    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"  # every block


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockEvent:
    """One change of the prefix index. STORED for a block that is known already: it is on another tier now.

    parent_hash: empty for the first block of a chain, so that the secret root stays secret.
    token_ids: int32, little-endian, block_size of them; STORED only, as are parent_hash, salt and tier.
    """

    kind: EventKind
    block_hash: bytes = b""
    parent_hash: bytes = b""
    token_ids: bytes = b""
    salt: str = ""
    tier: Tier = Tier.DEVICE


class WalkedIndex(Protocol):
    """The part of a PrefixIndex that a walk reads. entry_P: of each block; below 1 for those that are not in it.
    digest_of: of each block that is in it; block_of: the block of each digest."""

    entry_P: np.ndarray
    digest_of: list[bytes | None]
    block_of: dict[bytes, int]

    def stored_event(self, block: int) -> BlockEvent:
        """STORED for an indexed block."""


class IndexWalk:
    """Gives one listener everything that is in the index, in parts, while the index goes on changing.

    Parts come in the order of entries, parents before children, and each says what is in the index when it is taken.
    A listener that gets every change as well has the whole index at the end: what entered behind the walk comes with
    it, perhaps again; what left before its turn does not come, and what left after it came as a change. An entry that
    another block takes over keeps its turn: the listener may not have known its parent when it came as a change.
    """

    def __init__(self, index: WalkedIndex) -> None:
        self._index = index
        self._last_entry = 0  # of those that were sorted; entries begin at 1
        self._ahead: deque[tuple[int, bytes]] = deque()  # (entry, digest), in order

    def take(self, max_blocks: int) -> list[BlockEvent]:
        """STORED for the next blocks, at most max_blocks. Fewer: the end is reached, for now."""
        index, events = self._index, list[BlockEvent]()
        while len(events) < max_blocks:
            if not self._ahead and not self._sort(LOOK_AHEAD * max_blocks):
                break
            entry, digest = self._ahead.popleft()
            block = index.block_of.get(digest)
            if block is not None and index.entry_P[block] == entry:
                events.append(index.stored_event(block))
        return events

    def _sort(self, max_blocks: int) -> bool:
        """Look up the next entries. Whether there are any."""
        entry_P = self._index.entry_P
        blocks = np.flatnonzero(entry_P > self._last_entry)
        if len(blocks) > max_blocks:
            blocks = blocks[np.argpartition(entry_P[blocks], max_blocks)[:max_blocks]]
        blocks = blocks[np.argsort(entry_P[blocks])]
        digests = [self._index.digest_of[block] or b"" for block in blocks.tolist()]
        self._ahead.extend(zip(entry_P[blocks].tolist(), digests, strict=True))
        if self._ahead:
            self._last_entry = self._ahead[-1][0]
        return bool(self._ahead)
