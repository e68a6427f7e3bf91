"""Gateways hear what is cached here: every change at once, and those that join all the rest, a part of a bounded size a
step, whoever else waits.

A part says what is cached now, and changes go to every gateway as they come, so the parts may take as long as they like
(`blockmgr.walk`). Gateways that join together take turns: a step never waits for more than one part.
Must not know sockets.
"""

from collections import OrderedDict

from blockmgr.events import BlockEvent, EventKind
from blockmgr.manager import BlockManager
from blockmgr.walk import IndexWalk
from worker.ports import GatewayIndex, Outbox
from worker.translate import kv_events

MAX_PART_BLOCKS = 256  # 1 to 3 ms of the engine's thread


class CacheTelling:
    """epoch: of this life of the process."""

    def __init__(self, blocks: BlockManager, outbox: Outbox, *, epoch: str) -> None:
        self._blocks = blocks
        self._outbox = outbox
        self._epoch = epoch
        self._walks: OrderedDict[GatewayIndex, IndexWalk] = OrderedDict()

    @property
    def is_due(self) -> bool:
        """Whether somebody has not heard everything yet."""
        return bool(self._walks)

    def begin(self, gateway: GatewayIndex) -> None:
        """It knows nothing, or something that is over. What has changed before is told first, to the others."""
        self.tell_changes()
        self._walks.pop(gateway, None)
        if self._blocks.num_indexed:
            self._walks[gateway] = self._blocks.walk_events()
            self._put(gateway, [BlockEvent(kind=EventKind.CLEARED)])

    def end(self, gateway: GatewayIndex) -> None:
        """It is gone. Idempotent."""
        self._walks.pop(gateway, None)

    def tell_changes(self) -> None:
        """All since the last call, to every gateway."""
        for message in kv_events(self._blocks.take_events(), epoch=self._epoch):
            self._outbox.put_all(message)

    def tell_a_part(self) -> None:
        """To whoever has waited longest. All changes so far must have been told."""
        if not self._walks:
            return
        gateway, walk = self._walks.popitem(last=False)
        events = walk.take(MAX_PART_BLOCKS)
        if len(events) == MAX_PART_BLOCKS:
            self._walks[gateway] = walk
        self._put(gateway, events)

    def _put(self, gateway: GatewayIndex, events: list[BlockEvent]) -> None:
        for message in kv_events(events, epoch=self._epoch):
            self._outbox.put(gateway, message)
