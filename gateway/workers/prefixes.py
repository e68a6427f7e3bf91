"""The prefix indexes of all models: one per model name and block size."""

from collections.abc import Iterable

import numpy as np

from gateway.workers.prefix_index import PrefixIndex
from gateway.workers.records import WorkerRecord
from wire.messages import KvEvents


class Prefixes:
    """Each index is bounded by ``max_nodes``; an index goes with its last worker."""

    def __init__(self, *, max_nodes: int) -> None:
        self._max_nodes = max_nodes
        self._indexes: dict[tuple[str, int], PrefixIndex] = {}
        self._key_of: dict[int, tuple[str, int]] = {}

    def apply(self, record: WorkerRecord, message: KvEvents) -> None:
        """Take a worker's events, in their order."""
        key = (record.card.name, record.capacity.block_size)
        index = self._indexes.get(key)
        if index is None:
            index = self._indexes[key] = PrefixIndex(block_size=key[1], max_nodes=self._max_nodes)
        self._key_of[record.incarnation] = key
        for event in message.events:
            index.apply(record.incarnation, event)

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
        if key not in self._key_of.values():
            del self._indexes[key]
