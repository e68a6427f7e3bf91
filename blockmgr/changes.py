"""What listeners learn about the prefix cache: its changes, and its whole content while it keeps changing.

Must not know how a block is found, nor who listens.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np

from octavo.blockmgr.ids import Tier

LOOK_AHEAD = 16  # parts of a walk that are sorted at once, in one pass over all entries


class EventKind(Enum):
    """What happened to a block."""

    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"  # every block


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockEvent:
    """One change of the prefix index. STORED for a known block means that it is on another tier now.

    parent_hash: empty for the first block of a chain, so that the secret root stays secret.
    token_ids: int32, little-endian, block_size of them; STORED only, as are parent_hash, salt and tier.
    """

    kind: EventKind
    block_hash: bytes = b""
    parent_hash: bytes = b""
    token_ids: bytes = b""
    salt: str = ""
    tier: Tier = Tier.DEVICE


class EventLog:
    """Events since the last `take`, in order.

    There may be no listener, so beyond ``max_events`` the log is dropped. The next `take` then returns CLEARED and
    everything that is stored at that time, which brings a listener to the same state.
    """

    def __init__(self, max_events: int, snapshot: Callable[[], list[BlockEvent]]) -> None:
        self._max_events = max_events
        self._snapshot = snapshot
        self._events: list[BlockEvent] = []
        self._has_overflowed = False

    def stored(self, event: BlockEvent) -> None:
        """A block entered the index."""
        if not self._has_overflowed:
            self._append(event)

    def removed(self, digest: bytes) -> None:
        """A block left the index."""
        if not self._has_overflowed:
            self._append(BlockEvent(kind=EventKind.REMOVED, block_hash=digest))

    def cleared(self) -> None:
        """Every block left the index."""
        self._events.clear()
        self._has_overflowed = False
        self._append(BlockEvent(kind=EventKind.CLEARED))

    def take(self) -> list[BlockEvent]:
        """Events since the last call."""
        if self._has_overflowed:
            self._has_overflowed = False
            return [BlockEvent(kind=EventKind.CLEARED), *self._snapshot()]
        events, self._events = self._events, []
        return events

    def _append(self, event: BlockEvent) -> None:
        self._events.append(event)
        if len(self._events) > self._max_events:
            self._events.clear()
            self._has_overflowed = True


class WalkedIndex(Protocol):
    """The part of a PrefixIndex that a walk reads. entry_P: entry number of each block; below 1 if it is not in the
    index. digest_of: digest of each block in the index. block_of: block of each digest."""

    entry_P: np.ndarray
    digest_of: list[bytes | None]
    block_of: dict[bytes, int]

    def stored_event(self, block: int) -> BlockEvent:
        """The STORED event for an indexed block."""


class IndexWalk:
    """Lists everything that is in the index for one listener, in parts, while the index keeps changing.

    Parts are in the order of entries, parents before children, and each says what is in the index when it is taken. A
    listener that also gets every change has the whole index at the end. Entries that are added meanwhile have higher
    numbers, so the walk reaches them too, perhaps a second time for the listener. Those that are removed before their
    turn are left out; those that are removed later are removed by a change. An entry that moves to another block keeps
    its turn, since the listener may not have known its parent when the change came.
    """

    def __init__(self, index: WalkedIndex) -> None:
        self._index = index
        self._last_entry = 0  # the last one that was sorted; entries begin at 1
        self._ahead: deque[tuple[int, bytes]] = deque()  # (entry, digest), in order

    def take(self, max_blocks: int) -> list[BlockEvent]:
        """STORED events for the next blocks, at most max_blocks. If there are fewer, the end is reached for now."""
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
        """Look up the next entries, at most max_blocks. Returns whether there are any."""
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
