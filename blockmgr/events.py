"""What happened to the prefix cache, for routers and the live page.

It must not know who listens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class EventKind(Enum):
    """What became of a block."""

    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"  # every block


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockEvent:
    """One change of the prefix index.

    parent_hash: empty for the first block of a chain, so that the secret root stays secret.
    token_ids: int32, little-endian, block_size of them; STORED only, as are parent_hash and salt.
    """

    kind: EventKind
    block_hash: bytes = b""
    parent_hash: bytes = b""
    token_ids: bytes = b""
    salt: str = ""


def stored_event(*, digest: bytes, parent: bytes, token_bytes: bytes, salt: str) -> BlockEvent:
    """STORED for one block."""
    return BlockEvent(kind=EventKind.STORED, block_hash=digest, parent_hash=parent, token_ids=token_bytes, salt=salt)


class EventLog:
    """Events since the last `take`, in order.

    Nobody may be listening: beyond ``max_events`` the log is thrown away, and the next `take` gives CLEARED and then
    everything that is stored now, which leaves a listener at the same state.
    """

    def __init__(self, max_events: int, snapshot: Callable[[], list[BlockEvent]]) -> None:
        self._max_events = max_events
        self._snapshot = snapshot
        self._events: list[BlockEvent] = []
        self._has_overflowed = False

    def stored(self, *, digest: bytes, parent: bytes, token_bytes: bytes, salt: str) -> None:
        """A block entered the index."""
        if not self._has_overflowed:
            self._append(stored_event(digest=digest, parent=parent, token_bytes=token_bytes, salt=salt))

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
