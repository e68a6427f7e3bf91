"""Publishes changes of the prefix cache to the gateways as KV events."""

from collections import OrderedDict
from collections.abc import Iterator

from octavo.blockmgr.changes import BlockEvent, EventKind, IndexWalk
from octavo.blockmgr.ids import Tier
from octavo.blockmgr.manager import BlockManager
from octavo.wire.messages import KvEvent, KvEventKind, KvEvents, KvTier
from octavo.worker.engine.interfaces import Outbox
from octavo.worker.scheduler.plan import GatewayIndex

MAX_EVENTS_PER_MESSAGE = 512  # a few milliseconds of the gateway's loop, and well below the limit of a frame
MAX_PART_BLOCKS = 256  # 1 to 3 ms of the engine's thread
_RARE_KINDS = {EventKind.REMOVED: KvEventKind.REMOVED, EventKind.CLEARED: KvEventKind.CLEARED}


class KvEventPublisher:
    """Tells gateways what is cached here: every change at each step, and to a gateway that joins everything else, in
    parts of bounded size, one per step.

    A part says what is cached when it is taken, and changes go to every gateway, so it does not matter how long the
    parts take (`blockmgr.changes`). Gateways that join together take turns: a step never waits for more than one part.
    epoch: identifies this run of the process.
    """

    def __init__(self, blocks: BlockManager, outbox: Outbox, *, epoch: str) -> None:
        self._blocks = blocks
        self._outbox = outbox
        self._epoch = epoch
        self._walks: OrderedDict[GatewayIndex, IndexWalk] = OrderedDict()

    @property
    def is_due(self) -> bool:
        """Whether a gateway has not received everything yet."""
        return bool(self._walks)

    def begin(self, gateway: GatewayIndex) -> None:
        """A gateway joins: it knows nothing, or outdated contents. Changes so far are sent before it starts over."""
        self._publish_changes()
        self._walks.pop(gateway, None)
        if self._blocks.num_indexed:
            self._walks[gateway] = self._blocks.walk_events()
            self._put(gateway, [BlockEvent(kind=EventKind.CLEARED)])

    def end(self, gateway: GatewayIndex) -> None:
        """A gateway is lost. Idempotent."""
        self._walks.pop(gateway, None)

    def publish(self) -> None:
        """Send all changes since the last call to every gateway, then a part to the one that has waited longest."""
        self._publish_changes()
        if not self._walks:
            return
        gateway, walk = self._walks.popitem(last=False)
        events = walk.take(MAX_PART_BLOCKS)
        if len(events) == MAX_PART_BLOCKS:
            self._walks[gateway] = walk
        self._put(gateway, events)

    def _publish_changes(self) -> None:
        for message in kv_events(self._blocks.take_events(), epoch=self._epoch):
            self._outbox.put_all(message)

    def _put(self, gateway: GatewayIndex, events: list[BlockEvent]) -> None:
        for message in kv_events(events, epoch=self._epoch):
            self._outbox.put(gateway, message)


def kv_events(events: list[BlockEvent], *, epoch: str) -> Iterator[KvEvents]:
    """Changes of the prefix cache, in messages of bounded size."""
    for begin in range(0, len(events), MAX_EVENTS_PER_MESSAGE):
        some = events[begin : begin + MAX_EVENTS_PER_MESSAGE]
        yield KvEvents(epoch=epoch, events=tuple(_kv_event(event) for event in some))


def _kv_event(event: BlockEvent) -> KvEvent:
    return KvEvent(
        kind=KvEventKind.STORED if event.kind is EventKind.STORED else _RARE_KINDS[event.kind],
        block_hash=event.block_hash,
        parent_hash=event.parent_hash,
        token_ids=event.token_ids,
        salt=event.salt,
        tier=KvTier.HOST if event.tier is Tier.HOST else KvTier.DEVICE,
    )
