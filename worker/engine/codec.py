"""What the scheduler and the block manager have to say, as messages of the wire. Pure; knows no sockets."""

from collections import OrderedDict
from collections.abc import Iterator

from octavo.blockmgr.manager import BlockManager
from octavo.blockmgr.prefix_index import BlockEvent, EventKind, IndexWalk
from octavo.wire.messages import KvEvent, KvEventKind, KvEvents, StepOutput
from octavo.worker.engine.interfaces import Outbox
from octavo.worker.scheduler.plan import GatewayIndex, GatewayOutput

MAX_EVENTS_PER_MESSAGE = 512  # some milliseconds of the gateway's loop, and far from what a frame may hold
_RARE_KINDS = {EventKind.REMOVED: KvEventKind.REMOVED, EventKind.CLEARED: KvEventKind.CLEARED}


def step_output(output: GatewayOutput, *, epoch: str, seq: int, step: int) -> StepOutput:
    """One gateway's news as it travels."""
    return StepOutput(
        epoch=epoch,
        seq=seq,
        step=step,
        handles=output.handles_N.astype("<i8", copy=False).tobytes(),
        tokens=output.tokens_N.astype("<i4", copy=False).tobytes(),
        logprobs=output.logprobs,
        started=output.started,
        finished=output.finished,
        prompt_logprobs=output.prompt_logprobs,
        embeddings={
            handle: embedding_D.astype("<f4", copy=False).tobytes() for handle, embedding_D in output.embeddings.items()
        },
    )


def kv_events(events: list[BlockEvent], *, epoch: str) -> Iterator[KvEvents]:
    """Changes of the prefix cache as they travel, in messages of a bounded size."""
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
    )


# Gateways hear what is cached here: every change at once, and those that join all the rest, a part of a bounded size a
# step, whichever others wait.
#
# A part says what is cached now, and changes go to every gateway as they come, so the parts may take as long as they
# like (`blockmgr.prefix_index`). Gateways that join together take turns: a step never waits for more than one part.
# Must not know sockets.


MAX_PART_BLOCKS = 256  # 1 to 3 ms of the engine's thread


class KvEventPublisher:
    """epoch: of this life of the process."""

    def __init__(self, blocks: BlockManager, outbox: Outbox, *, epoch: str) -> None:
        self._blocks = blocks
        self._outbox = outbox
        self._epoch = epoch
        self._walks: OrderedDict[GatewayIndex, IndexWalk] = OrderedDict()

    @property
    def is_due(self) -> bool:
        """Whether a gateway has not heard everything yet."""
        return bool(self._walks)

    def begin(self, gateway: GatewayIndex) -> None:
        """It knows nothing, or something that is over. What has changed before is told first, to the others."""
        self.publish_changes()
        self._walks.pop(gateway, None)
        if self._blocks.num_indexed:
            self._walks[gateway] = self._blocks.walk_events()
            self._put(gateway, [BlockEvent(kind=EventKind.CLEARED)])

    def end(self, gateway: GatewayIndex) -> None:
        """It is gone. Idempotent."""
        self._walks.pop(gateway, None)

    def publish_changes(self) -> None:
        """All since the last call, to every gateway."""
        for message in kv_events(self._blocks.take_events(), epoch=self._epoch):
            self._outbox.put_all(message)

    def publish_part(self) -> None:
        """To the gateway that has waited longest. All changes so far must have been told."""
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
