"""The prefix indexes of all models: one per model name and block size. And one feed per model of what changes there."""

import time
from collections.abc import Callable, Iterable
from itertools import chain

import numpy as np

from gateway.workers.block_feed import BlockFeed, BlockSubscription
from gateway.workers.prefix_index import PrefixIndex
from gateway.workers.records import WorkerRecord
from wire.messages import KvEvents


def _now_us() -> int:
    return time.time_ns() // 1000


class Prefixes:
    """Each index is bounded by ``max_nodes``; an index goes with its last worker, a feed stays. now_us: see
    `BlockFeed`."""

    def __init__(self, *, max_nodes: int, now_us: Callable[[], int] = _now_us) -> None:
        self._max_nodes = max_nodes
        self._now_us = now_us
        self._feeds: dict[str, BlockFeed] = {}
        self._indexes: dict[tuple[str, int], PrefixIndex] = {}
        self._key_of: dict[int, tuple[str, int]] = {}

    def apply(self, record: WorkerRecord, message: KvEvents) -> None:
        """Take a worker's events, in their order."""
        key = (record.card.name, record.capacity.block_size)
        index, feed = self._indexes.get(key), self._feed(key[0])
        if index is None:
            index = self._indexes[key] = PrefixIndex(block_size=key[1], max_nodes=self._max_nodes, feed=feed)
        self._key_of[record.incarnation] = key
        for event in message.events:
            index.apply(record.incarnation, event)
        feed.flush()

    def match(self, records: Iterable[WorkerRecord], token_ids_T: np.ndarray, salt: str) -> dict[int, int]:
        """Cached tokens by incarnation, for workers of one model. token_ids_T: int32."""
        keys = {(record.card.name, record.capacity.block_size) for record in records}
        matched: dict[int, int] = {}
        for key in keys & self._indexes.keys():
            matched |= self._indexes[key].match(token_ids_T, salt)
        return matched

    def forget(self, incarnation: int) -> None:
        """The worker is gone."""
        key = self._key_of.pop(incarnation, None)
        if key is None:
            return
        self._indexes[key].forget(incarnation)
        self._feed(key[0]).flush()
        if key not in self._key_of.values():
            del self._indexes[key]

    def follow(self, model: str, salt: str) -> BlockSubscription:
        """Hear which blocks of this salt the workers of a model have, and what changes. Raises FeedFull."""
        indexes = [index for (name, _), index in self._indexes.items() if name == model]
        state = chain.from_iterable(index.blocks(salt) for index in indexes)
        return self._feed(model).follow(salt, state, sum(index.num_blocks(salt) for index in indexes))

    def leave(self, model: str, subscription: BlockSubscription) -> None:
        """Idempotent."""
        self._feed(model).leave(subscription)

    def _feed(self, model: str) -> BlockFeed:
        feed = self._feeds.get(model)
        if feed is None:
            feed = self._feeds[model] = BlockFeed(self._now_us)
        return feed
