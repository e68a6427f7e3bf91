"""What each kind of message from a worker means. Frames in; decisions and ended outputs out.

Everything a peer can send comes through here, so everything it can get wrong is counted here. Must not know sockets.
"""

from collections.abc import Callable

import structlog

from octavo.gateway.workers.decisions import Accept, Announce, AskTokenizer, Decision, Lose, Peer, Refuse, Watch
from octavo.gateway.workers.link import Outbox, RouterLink
from octavo.gateway.workers.outputs import Output, Outputs
from octavo.gateway.workers.queries import Queries
from octavo.gateway.workers.registry import Registry, WorkerRecord
from octavo.gateway.workers.router import Prefixes
from octavo.gateway.workers.stats import PoolStats
from octavo.gateway.workers.views import LostReason
from octavo.gateway.workers.watch import ProcessWatch
from octavo.wire.bundle import BundleError
from octavo.wire.codec import ProtocolError, decode_to_gateway
from octavo.wire.messages import (
    AdminReply,
    Heartbeat,
    KvEvents,
    Leaving,
    ModelCard,
    NeedTokenizer,
    Refused,
    Register,
    StepOutput,
    ToGateway,
    TokenizerBundle,
    Welcome,
)

log = structlog.get_logger(__name__)
Outcome = tuple[list[Decision], list[Output]]
OnModel = Callable[[ModelCard, dict[str, bytes]], None]


class Executor:
    """Carries out what the registry decides: welcomes, refusals, watches, announcements, losses. watch: by incarnation.
    on_lost: what becomes of an output whose worker is gone.

    Callbacks of others that raise are logged, never passed on.
    """

    def __init__(
        self,
        *,
        gateway_id: str,
        registry: Registry,
        link: RouterLink,
        outputs: Outputs,
        prefixes: Prefixes,
        queries: Queries,
        stats: PoolStats,
        watch: ProcessWatch,
        on_model: OnModel | None,
        on_lost: Callable[[Output, LostReason, str], None],
    ) -> None:
        self.outbox = Outbox(link, registry, self.carry_out)
        self.watch = watch
        self.on_change: list[Callable[[], None]] = []
        self._gateway_id = gateway_id
        self._registry = registry
        self._outputs = outputs
        self._prefixes = prefixes
        self._queries = queries
        self._stats = stats
        self._on_model = on_model
        self._on_lost = on_lost

    def carry_out(self, decisions: list[Decision]) -> None:
        """In their order."""
        for decision in decisions:
            match decision:
                case Accept():
                    self._stats.registrations += 1
                    self.outbox.tell(decision.peer, Welcome(gateway_id=self._gateway_id, epoch=decision.epoch))
                case AskTokenizer():
                    self.outbox.tell(decision.peer, NeedTokenizer(epoch=decision.epoch, digest=decision.digest))
                case Refuse():
                    self._refuse(decision)
                case Watch():
                    self._start_watch(decision)
                case Announce():
                    self._announce(decision)
                case Lose():
                    self._lose(decision)

    def changed(self) -> None:
        """The set of workers or models is another."""
        for callback in self.on_change:
            try:
                callback()
            except Exception:
                log.exception("on_change_failed")

    # ------------------------------------------------------------ parts

    def _refuse(self, decision: Refuse) -> None:
        self._stats.refusals[decision.kind] += 1
        log.warning("worker_refused", kind=decision.kind, reason=decision.reason)
        self.outbox.tell(decision.peer, Refused(epoch=decision.epoch, reason=decision.reason))

    def _start_watch(self, decision: Watch) -> None:
        record = self._registry.get(decision.incarnation)
        if record is not None:
            record.is_watched = self.watch.add(decision.incarnation, decision.pid, decision.pid_namespace)

    def _announce(self, decision: Announce) -> None:
        record = self._registry.get(decision.incarnation)
        if record is None:
            return
        log.info("worker_ready", worker_id=record.worker_id, model=record.card.name, pid=record.pid)
        if self._on_model is not None:
            try:
                self._on_model(decision.card, self._registry.bundle(decision.card.tokenizer_digest))
            except Exception:
                log.exception("on_model_failed", model=decision.card.name)
        self.changed()

    def _lose(self, decision: Lose) -> None:
        tell = log.info if decision.reason is LostReason.DRAINING else log.warning
        tell("worker_lost", worker_id=decision.worker_id, reason=decision.reason.value, detail=decision.detail)
        self._stats.workers_lost[decision.reason.value] += 1
        self.watch.drop(decision.incarnation)
        self._prefixes.forget(decision.incarnation)
        self._queries.lose(decision.incarnation)
        for output in self._outputs.of(decision.incarnation):
            self._on_lost(output, decision.reason, f"worker {decision.worker_id}: {decision.detail}")
        self.changed()


class Inbound:
    """Takes the frames of workers. check_process(incarnation): report an exit of its process now, if there was one (it
    calls back by itself)."""

    def __init__(
        self,
        registry: Registry,
        outputs: Outputs,
        prefixes: Prefixes,
        queries: Queries,
        stats: PoolStats,
        check_process: Callable[[int], None],
    ) -> None:
        self._registry = registry
        self._outputs = outputs
        self._prefixes = prefixes
        self._queries = queries
        self._stats = stats
        self._check_process = check_process

    def take(self, peer: Peer, frame: bytes, now_s: float) -> Outcome:
        """One frame of one peer."""
        try:
            message = decode_to_gateway(frame)
        except ProtocolError:
            self._stats.undecodable_frames += 1
            return [], []
        if isinstance(message, StepOutput):
            return self._take_step(peer, message, now_s)
        return self._take_rare(peer, message, now_s), []

    # ------------------------------------------------------------ parts

    def _take_step(self, peer: Peer, message: StepOutput, now_s: float) -> Outcome:
        record = self._registry.sender(peer, message.epoch)
        if record is None:
            self._stats.stale_messages += 1
            return [], []
        gap = self._registry.on_sequence(record, message.seq)
        if gap:
            self._stats.sequence_gaps += 1
            return gap, []
        record.take_step(now_s)
        return [], self._outputs.take(record.incarnation, message)

    def _take_rare(self, peer: Peer, message: ToGateway, now_s: float) -> list[Decision]:
        match message:
            case Heartbeat():
                return self._take_heartbeat(message, now_s)
            case Register():
                return self._take_register(peer, message, now_s)
            case TokenizerBundle():
                return self._take_bundle(peer, message)
        assert not isinstance(message, StepOutput)
        record = self._registry.sender(peer, message.epoch)
        if record is None:
            self._stats.stale_messages += 1
            return []
        return self._take_known(record, message)

    def _take_heartbeat(self, message: Heartbeat, now_s: float) -> list[Decision]:
        if self._registry.on_heartbeat(message, now_s) is not None:
            return []
        self._stats.stale_messages += 1
        return self._registry.on_stale_heartbeat(message.epoch)

    def _take_known(self, record: WorkerRecord, message: KvEvents | AdminReply | Leaving) -> list[Decision]:
        match message:
            case KvEvents():
                self._stats.kv_events += len(message.events)
                self._prefixes.apply(record, message)
            case AdminReply():
                if not self._queries.take(record.incarnation, message):
                    self._stats.late_outputs += 1
            case Leaving():
                return self._registry.on_leaving(record, message.reason)
        return []

    def _take_register(self, peer: Peer, message: Register, now_s: float) -> list[Decision]:
        known = self._registry.find(message.worker_id)
        if known is not None and known.epoch != message.epoch:
            # A restarted worker may be faster than the news of its former life's end.
            self._check_process(known.incarnation)
        return self._registry.on_register(peer, message, now_s)

    def _take_bundle(self, peer: Peer, message: TokenizerBundle) -> list[Decision]:
        try:
            return self._registry.on_bundle(peer, message)
        except BundleError:
            self._stats.protocol_errors["bundle"] += 1
            return []
