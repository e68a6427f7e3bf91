"""Changes of the prefix cache as batches of VllmEngine's SubscribeKvEvents."""

import time

import numpy as np
from smg_grpc_proto.generated import common_pb2 as common  # type: ignore[import-untyped]

from gateway.workers.block_feed import BlockBatch, BlockChange, ChangeKind


class KvBatches:
    """Makes one subscriber's batches. Events that happened are numbered; those of the first state are 0, as the dialect
    wants it."""

    def __init__(self) -> None:
        self._next_event = 1

    def of(self, batch: BlockBatch) -> common.KvEventBatch:
        """The whole state begins with a Cleared: the subscriber may hold what is over."""
        message = common.KvEventBatch(sequence_number=batch.sequence, timestamp=time.time(), dp_rank=0)
        if batch.chunk is not None:
            message.snapshot.index, message.snapshot.count = batch.chunk.index, batch.chunk.count
            message.snapshot.blocks = batch.chunk.num_blocks
            if batch.chunk.index == 0:
                message.events.add().cleared.SetInParent()
        for change in batch.changes:
            self._add(message, change)
        if batch.chunk is None:
            for event in message.events:
                event.event_id, self._next_event = self._next_event, self._next_event + 1
        return message

    def _add(self, message: common.KvEventBatch, change: BlockChange) -> None:
        if change.kind is ChangeKind.STORED:
            _add_stored(message, change)
        elif message.events and message.events[-1].HasField("removed"):
            message.events[-1].removed.block_hashes.append(change.block_id)
        else:
            message.events.add().removed.block_hashes.append(change.block_id)


def _add_stored(message: common.KvEventBatch, change: BlockChange) -> None:
    """A block that follows the one before it joins its event, as engines tell a prompt's blocks."""
    token_ids = np.frombuffer(change.token_ids, "<i4").tolist()
    last = message.events[-1].stored if message.events and message.events[-1].HasField("stored") else None
    if last is None or last.blocks[-1].block_hash != change.parent_id:
        last = message.events.add().stored
        last.tier = common.KV_CACHE_TIER_DEVICE
        if change.parent_id is not None:
            last.parent_block_hash = change.parent_id
    last.blocks.add(block_hash=change.block_id, token_ids=token_ids, block_size=len(token_ids))
