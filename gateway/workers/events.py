"""Changes of a model's prefix caches, for subscribers: all workers of the model as if they were one cache.

A subscriber gets the present state first, in chunks that are made when they are taken, and then every change. A change
may be in a chunk already, or be sent before the chunk that it belongs to: subscribers ignore stores of a known block
and removals of an unknown one. Bounded: a subscriber that is too slow is cut off, and may subscribe again. Pure but for
one future; must not know sockets.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import islice

from octavo.gateway.workers.errors import FeedCut, FeedEnded, FeedFull
from octavo.wire.messages import KvTier

MAX_FOLLOWERS = 64
MAX_WAITING_CHANGES = 65_536  # per follower
CHUNK_CHANGES = 256  # some milliseconds of the loop


class ChangeKind(Enum):
    """What happened to a block."""

    STORED = "stored"  # a first worker has it now
    REMOVED = "removed"  # the last worker dropped it


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockChange:
    """A block of the prefix cache was stored or removed.

    block_id: unique while the block exists. parent_id: None for the first block of a prompt.
    token_ids: int32, little-endian.
    tier: DEVICE if any worker has it there.

    REMOVED has only kind, block_id and tier. A block that changes its tier is removed from one and stored on the other.
    """

    kind: ChangeKind
    block_id: int
    parent_id: int | None = None
    token_ids: bytes = b""
    tier: KvTier = KvTier.DEVICE


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Where a batch stands in the initial state. num_blocks: in the whole state, when it was begun."""

    index: int
    count: int
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockBatch:
    """sequence: one more than the previous batch's. chunk: None for changes after the initial state."""

    sequence: int
    changes: tuple[BlockChange, ...]
    chunk: Chunk | None = None


class BlockSubscription:
    """One subscriber's; it must call `leave` at its end. first_sequence: above every number that its earlier
    subscriptions used. next_sequence: above those that this one used."""

    def __init__(
        self, feed: "BlockFeed", salt: str, state: Iterator[BlockChange], num_blocks: int, *, first_sequence: int
    ) -> None:
        self._feed = feed
        self.salt = salt
        self._state = state
        self._num_blocks = num_blocks
        self._num_chunks = max(1, -(-num_blocks // CHUNK_CHANGES))
        self._next_chunk = 0
        self.next_sequence = first_sequence
        self._waiting: deque[tuple[BlockChange, ...]] = deque()
        self._num_waiting = 0
        self._cut: FeedCut | FeedEnded | None = None
        self._waiter: asyncio.Future[None] | None = None

    def leave(self) -> None:
        """End the subscription. Idempotent."""
        self._feed.leave(self)

    def put(self, changes: tuple[BlockChange, ...]) -> None:
        """Queue changes; dropped once the subscriber is cut off."""
        if self._cut is not None:
            return
        self._num_waiting += len(changes)
        if self._num_waiting > MAX_WAITING_CHANGES:
            self.cut(FeedCut(f"more than {MAX_WAITING_CHANGES} changes of the prefix cache wait to be read"))
            return
        self._waiting.append(changes)
        self._wake()

    def cut(self, why: FeedCut | FeedEnded) -> None:
        """Drop what is queued; the reader gets this error."""
        self._cut = why
        self._waiting.clear()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> BlockBatch:
        """The next batch, as soon as there is one. Raises FeedCut, FeedEnded. One caller at a time."""
        while self._cut is None:
            if self._next_chunk < self._num_chunks:
                return self._take_chunk()
            if self._waiting:
                changes = self._waiting.popleft()
                self._num_waiting -= len(changes)
                return self._batch(changes, None)
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        raise self._cut

    def _take_chunk(self) -> BlockBatch:
        index, self._next_chunk = self._next_chunk, self._next_chunk + 1
        is_last = self._next_chunk == self._num_chunks
        changes = tuple(self._state if is_last else islice(self._state, CHUNK_CHANGES))
        return self._batch(changes, Chunk(index=index, count=self._num_chunks, num_blocks=self._num_blocks))

    def _batch(self, changes: tuple[BlockChange, ...], chunk: Chunk | None) -> BlockBatch:
        sequence, self.next_sequence = self.next_sequence, self.next_sequence + 1
        return BlockBatch(sequence=sequence, changes=changes, chunk=chunk)


class BlockFeed:
    """One model's. now_us(): microseconds of a clock that does not restart with the process, and may be set back."""

    def __init__(self, now_us: Callable[[], int]) -> None:
        self._now_us = now_us
        self.is_followed = False  # whether there are subscribers; an attribute because it is read for each block
        self._followers: list[BlockSubscription] = []
        self._next_sequence = 0  # above all numbers that ended subscriptions used
        self._changes: list[tuple[str, BlockChange]] = []

    def publish(self, salt: str, change: BlockChange) -> None:
        """A block of this salt changed; subscribers get the change with the next `flush`."""
        self._changes.append((salt, change))

    def flush(self) -> None:
        """Queue the changes since the last call for every subscriber."""
        changes, self._changes = self._changes, []
        for follower in self._followers if changes else ():
            theirs = [change for salt, change in changes if salt == follower.salt]
            for some in _batched(theirs, CHUNK_CHANGES):
                follower.put(some)

    def follow(self, salt: str, state: Iterator[BlockChange], num_blocks: int) -> BlockSubscription:
        """Subscribe to the current state and every later change to blocks of this salt. Raises FeedFull."""
        if len(self._followers) >= MAX_FOLLOWERS:
            raise FeedFull(f"{MAX_FOLLOWERS} subscribers follow the prefix cache already")
        first = max(self._now_us(), self._next_sequence)
        subscription = BlockSubscription(self, salt, state, num_blocks, first_sequence=first)
        self._followers.append(subscription)
        self.is_followed = True
        return subscription

    def end(self) -> None:
        """End every subscription."""
        for follower in self._followers:
            follower.cut(FeedEnded("this gateway shuts down"))

    def leave(self, subscription: BlockSubscription) -> None:
        """Idempotent."""
        if subscription in self._followers:
            self._followers.remove(subscription)
            self._next_sequence = max(self._next_sequence, subscription.next_sequence)
            self.is_followed = bool(self._followers)


def _batched(changes: list[BlockChange], size: int) -> Iterator[tuple[BlockChange, ...]]:
    return (tuple(changes[begin : begin + size]) for begin in range(0, len(changes), size))
