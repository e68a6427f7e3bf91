"""Between the wire's messages and the scheduler's and block manager's own values. Pure; knows no sockets."""

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from octavo.blockmgr.manager import BlockManager
from octavo.blockmgr.prefix_index import BlockEvent, EventKind, IndexWalk
from octavo.wire.messages import Finished, KvEvent, KvEventKind, KvEvents, Run, Sampling, StepOutput, WireFinishReason
from octavo.worker.engine.interfaces import GatewayIndex, Outbox
from octavo.worker.scheduler.outputs import GatewayOutput
from octavo.worker.scheduler.request import AddRequest, RequestKey
from octavo.worker.scheduler.request_queue import MAX_WEIGHT

MAX_EVENTS_PER_MESSAGE = 512  # some milliseconds of the gateway's loop, and far from what a frame may hold
_RARE_KINDS = {EventKind.REMOVED: KvEventKind.REMOVED, EventKind.CLEARED: KvEventKind.CLEARED}


def asked_by(gateway: GatewayIndex, run: Run) -> AddRequest:
    """What a Run asks for. Raises ValueError where its token ids are no int32, or fewer than it resumes."""
    token_ids_T = np.frombuffer(run.prompt_ids, np.dtype("<i4"))
    num_prompt_tokens = len(token_ids_T) - run.num_resumed_tokens
    if not 0 <= num_prompt_tokens <= len(token_ids_T):
        raise ValueError(f"num_resumed_tokens: {run.num_resumed_tokens} of {len(token_ids_T)} tokens")
    if run.fork_handles and (run.num_resumed_tokens or run.pooling is not None):
        raise ValueError("fork_handles: with resumed output or pooling")
    if len({run.handle, *run.fork_handles}) <= len(run.fork_handles):
        raise ValueError("fork_handles: not distinct")
    if not 1 <= run.weight <= MAX_WEIGHT:
        raise ValueError(f"weight: {run.weight} is not in [1, {MAX_WEIGHT}]")
    return AddRequest(
        key=RequestKey(gateway, run.handle),
        request_id=run.request_id,
        prompt_ids_T=token_ids_T[:num_prompt_tokens],
        resumed_ids_T=token_ids_T[num_prompt_tokens:],
        sampling=run.sampling if run.pooling is None else Sampling(temperature=0.0, ignore_eos=True, max_tokens=1),
        priority=run.priority,
        cache_salt=run.cache_salt,
        timeout_s=run.timeout_s,
        pooling=run.pooling,
        fork_handles=run.fork_handles,
        tenant=run.tenant,
        weight=run.weight,
    )


def refused_run(run: Run, detail: str) -> GatewayOutput:
    """The answer to a Run that cannot even be read."""
    return GatewayOutput(
        finished=tuple(
            Finished(handle=handle, reason=WireFinishReason.ERROR, error="INVALID_FIELD", detail=detail)
            for handle in dict.fromkeys((run.handle, *run.fork_handles))
        )
    )


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
# step, whoever else waits.
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
        """Whether somebody has not heard everything yet."""
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
