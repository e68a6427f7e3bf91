"""What goes into the engine and what comes out of it: the protocols of transport, clock and observers, the messages of
the wire that say what the scheduler and the block manager have done, and whether every block is where it should be.

The engine and its scheduler know no sockets; `worker.transport.link` implements these over ZeroMQ, tests by plain
lists.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import structlog

from octavo.blockmgr.block_map import HostBlockMap
from octavo.blockmgr.changes import BlockEvent, EventKind, IndexWalk
from octavo.blockmgr.ids import Tier
from octavo.blockmgr.manager import BlockManager
from octavo.wire.messages import (
    AdminQuery,
    AdminReply,
    Cancel,
    Drain,
    Finished,
    HostBlocks,
    KvEvent,
    KvEventKind,
    KvEvents,
    KvTier,
    Leaving,
    Pause,
    Resume,
    Run,
    StepOutput,
)
from octavo.worker.scheduler.plan import GatewayIndex, GatewayOutput
from octavo.worker.scheduler.scheduler import Scheduler

log = structlog.get_logger(__name__)

RECOUNT_S = 1.0  # that recounting all blocks may take while steps are made,
RECOUNT_LOOK_S = 0.1  # and at least between two looks at a part of them
IDLE_S = 0.25  # without work, after which an audit delays no step,
IDLE_PER_AUDIT = 50  # and so many times what the last one took: who asks right then waits for it
AUDITED_AT_WORK = 1 << 14
"""Blocks that are audited between two steps, in a few milliseconds; larger pools only where there is no work."""
MAX_EVENTS_PER_MESSAGE = 512  # some milliseconds of the gateway's loop, and far from what a frame may hold
_RARE_KINDS = {EventKind.REMOVED: KvEventKind.REMOVED, EventKind.CLEARED: KvEventKind.CLEARED}
MAX_PART_BLOCKS = 256  # 1 to 3 ms of the engine's thread


@dataclass(frozen=True, slots=True)
class GatewayLost:
    """The gateway is gone (connection lost, or restarted under a new id): all its requests are cancelled silently."""


@dataclass(frozen=True, slots=True)
class GatewayJoined:
    """A gateway has welcomed this worker, and does not know yet what is cached here."""


InboxMessage = Run | Cancel | Pause | Resume | AdminQuery | Drain | GatewayJoined | GatewayLost
"""What reaches the engine. Welcome, Refused and NeedTokenizer are the link's own business."""

OutboxMessage = StepOutput | KvEvents | AdminReply | Leaving
"""What the engine sends. Register, TokenizerBundle and Heartbeat are the link's own business."""


@dataclass(slots=True, kw_only=True)
class LinkStats:
    """Counters of the link to the gateways since the start, over all of them."""

    received_messages: int = 0
    received_bytes: int = 0
    sent_messages: int = 0
    sent_bytes: int = 0
    undecodable_frames: int = 0
    unexpected_messages: int = 0  # before the welcome, or of another epoch
    dropped_messages: int = 0  # for gateways that were not there
    gateways_lost: int = 0


class Inbox(Protocol):
    """Messages from the gateways, in order of arrival per gateway."""

    def drain(self) -> list[tuple[GatewayIndex, InboxMessage]]:
        """All messages that are here now, possibly none. Never blocks."""

    def wait(self, timeout_s: float) -> None:
        """Return as soon as ``drain`` may have something (or another thread woke it), at the latest after
        ``timeout_s``."""


class Outbox(Protocol):
    """Messages to the gateways. Neither method blocks; what cannot be delivered is dropped and counted by the link,
    which then reports the gateway as lost."""

    def put(self, gateway: GatewayIndex, message: OutboxMessage) -> None:
        """To one gateway. Unknown or lost gateways are no error."""

    def put_all(self, message: OutboxMessage) -> None:
        """To every registered gateway."""


class Clock(Protocol):
    """Monotonic seconds; only differences mean anything."""

    def __call__(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One finished step, for metrics. Durations in seconds.

    step_s: from launch to the end of collect, so with two steps in flight it includes waiting for the former.
    host_s: from then on: applying the result, the masks of the next step, and sending (no device time).
    failed: "" or the name of the error that ended the step.
    """

    step: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_sampled: int
    step_s: float
    host_s: float
    failed: str = ""


class EngineStats(NamedTuple):
    """A snapshot after a step; safe to read from any thread. Counters as in `SchedulerCounters`. A tuple, as it is made
    at every step.

    waiting_since_s: by the engine's clock, of the request that has waited longest; None where none waits.
    """

    num_steps: int = 0
    num_running: int = 0
    num_waiting: int = 0
    waiting_since_s: float | None = None
    num_paused: int = 0
    num_in_flight: int = 0
    is_draining: bool = False
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_active_blocks: int = 0  # less those that leaked
    num_leaked_blocks: int = 0  # at the last recount
    num_violations: int = 0  # of the last audit
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0  # of them
    num_host_blocks: int = 0
    num_free_host_blocks: int = 0
    num_cached_host_blocks: int = 0
    num_copied_out_blocks: int = 0
    num_copied_in_blocks: int = 0
    num_pauses: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_generated_tokens: int = 0

    @property
    def has_work(self) -> bool:
        """Whether steps should advance: for paused requests there are none."""
        return bool(self.num_running or self.num_waiting or self.num_in_flight)


class Observer(Protocol):
    """Called by the engine, in its own thread; must not block."""

    def on_step(self, report: StepReport) -> None:
        """A step ended."""

    def on_finished(self, finished: Finished) -> None:
        """An output ended (refusals included)."""


class NullObserver:
    """Does nothing."""

    def on_step(self, report: StepReport) -> None:
        """Ignore."""

    def on_finished(self, finished: Finished) -> None:
        """Ignore."""


def step_output(output: GatewayOutput, *, epoch: str, seq: int, step: int) -> StepOutput:
    """One gateway's news as a message."""
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
    """Changes of the prefix cache, in messages of a bounded size."""
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


def host_blocks(found: HostBlockMap | None) -> HostBlocks | None:
    """The second tier for who looks; None where there is none."""
    if found is None:
        return None
    return HostBlocks(
        num_blocks=found.num_blocks,
        num_free=found.num_free,
        num_cached=found.num_cached,
        num_swapped=found.num_swapped,
        blocks_per_cell=found.blocks_per_cell,
        cells=found.cells_C.tobytes(),
    )


class KvEventPublisher:
    """Sends gateways what is cached here: every change at once, and to those that join all the rest, in parts of a
    bounded size, one a step.

    A part says what is cached now, and changes go to every gateway as they come, so the parts may take as long as they
    like (`blockmgr.changes`). Gateways that join together take turns: a step never waits for more than one part.
    epoch: of this life of the process.
    """

    def __init__(self, blocks: BlockManager, outbox: Outbox, *, epoch: str) -> None:
        self._blocks = blocks
        self._outbox = outbox
        self._epoch = epoch
        self._walks: OrderedDict[GatewayIndex, IndexWalk] = OrderedDict()

    @property
    def is_due(self) -> bool:
        """Whether a gateway has not got everything yet."""
        return bool(self._walks)

    def begin(self, gateway: GatewayIndex) -> None:
        """It knows nothing, or what is no longer so. What has changed before is sent first, to the others."""
        self._publish_changes()
        self._walks.pop(gateway, None)
        if self._blocks.num_indexed:
            self._walks[gateway] = self._blocks.walk_events()
            self._put(gateway, [BlockEvent(kind=EventKind.CLEARED)])

    def end(self, gateway: GatewayIndex) -> None:
        """The gateway is gone. Idempotent."""
        self._walks.pop(gateway, None)

    def _publish_changes(self) -> None:
        for message in kv_events(self._blocks.take_events(), epoch=self._epoch):
            self._outbox.put_all(message)

    def publish(self) -> None:
        """All changes since the last call to every gateway, and then a part to the one that has waited longest."""
        self._publish_changes()
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


class BlockChecks:
    """Looks whether every block is where it should be, and delays no step by it.

        work       a part of the blocks is recounted now and then; pools of up to AUDITED_AT_WORK blocks are audited
                   whole every audit_every_steps steps
        no work    one audit, after a while that is long against what it takes: who asks right then waits for it

    num_leaked, violations: as found last. audit_every_steps 0: recounts alone.
    """

    def __init__(self, blocks: BlockManager, clock: Clock, *, audit_every_steps: int) -> None:
        self.num_leaked = 0
        self.violations: tuple[str, ...] = ()
        self._blocks = blocks
        self._clock = clock
        self._every = audit_every_steps
        self._recount = blocks.recount()
        self._look_every_s = max(RECOUNT_S / len(self._recount), RECOUNT_LOOK_S)
        self._is_small = blocks.config.num_blocks + blocks.config.num_host_blocks <= AUDITED_AT_WORK
        self._looked_s = self._worked_s = clock()
        self._audit_s = 0.0  # that the last one took
        self._is_audit_due = False

    def note_work(self) -> None:
        """Something has been done since the last audit."""
        self._is_audit_due = True

    def note_step(self, num_steps: int) -> None:
        """The step of this number has ended."""
        self._is_audit_due = True
        if self._every and num_steps % self._every == 0 and self._is_small:
            self.audit()

    def look(self, scheduler: Scheduler) -> None:
        """Between two steps: what is due."""
        now_s = self._clock()
        if scheduler.has_work:
            self._worked_s = now_s
            if now_s - self._looked_s >= self._look_every_s:
                self._looked_s = now_s
                self._count(self._recount.look)
        elif self._is_audit_due and now_s - self._worked_s >= max(IDLE_S, IDLE_PER_AUDIT * self._audit_s):
            self._is_audit_due = False
            if self._every:
                self.audit()
            else:
                self._count(self._recount.look_at_all)

    def audit(self) -> tuple[str, ...]:
        """Recount everything now; what is wrong, which is logged once."""
        began_s = self._clock()
        audit, former = self._blocks.audit(), self.violations
        self._audit_s = self._clock() - began_s
        self.num_leaked, self.violations = audit.num_leaked, audit.violations
        if audit.violations and audit.violations != former:
            log.error("audit_failed", num_leaked_blocks=audit.num_leaked, violations=audit.violations)
        return audit.violations

    def _count(self, look: Callable[[], None]) -> None:
        former = self._recount.num_leaked
        look()
        if self._recount.num_leaked < former:
            self.num_leaked = self._recount.num_leaked
        elif self._recount.num_leaked > former:
            self.audit()  # which names them
