"""Carries out what the registry decides: welcomes, refusals, watches, announcements, losses. Must not know sockets."""

from collections.abc import Callable

import structlog

from octavo.gateway.workers.decisions import Accept, Announce, AskTokenizer, Decision, Lose, Refuse, Watch
from octavo.gateway.workers.link import Outbox, RouterLink
from octavo.gateway.workers.outputs import Output, Outputs
from octavo.gateway.workers.prefix_index import PrefixIndexes
from octavo.gateway.workers.queries import Queries
from octavo.gateway.workers.registry import Registry, WorkerRecord
from octavo.gateway.workers.stats import PoolStats
from octavo.gateway.workers.views import LostReason, WorkerState
from octavo.gateway.workers.watch import ProcessWatch
from octavo.wire.messages import GatewayLeaving, ModelCard, NeedTokenizer, Refused, Welcome

log = structlog.get_logger(__name__)
OnModel = Callable[[ModelCard, dict[str, bytes]], None]


class Executor:
    """One per pool. watch: of processes, by incarnation. on_lost: decides what becomes of an output whose worker is
    gone.

    Exceptions from callbacks are logged, never passed on.
    """

    def __init__(
        self,
        *,
        gateway_id: str,
        registry: Registry,
        link: RouterLink,
        outputs: Outputs,
        prefixes: PrefixIndexes,
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
        """Carry out decisions in order."""
        for decision in decisions:
            match decision:
                case Accept():
                    self._stats.registrations += 1
                    self.outbox.send_unconfirmed(
                        decision.peer, Welcome(gateway_id=self._gateway_id, epoch=decision.epoch)
                    )
                case AskTokenizer():
                    self.outbox.send_unconfirmed(
                        decision.peer, NeedTokenizer(epoch=decision.epoch, digest=decision.digest)
                    )
                case Refuse():
                    self._refuse(decision)
                case Watch():
                    self._start_watch(decision)
                case Announce():
                    self._announce(decision)
                case Lose():
                    self._lose(decision)

    def drains(self, record: WorkerRecord) -> None:
        """From now on this worker gets nothing new. Idempotent."""
        if record.state is not WorkerState.DRAINING:
            record.state = WorkerState.DRAINING
            self.changed()

    def take_leave(self) -> None:
        """Tell every worker that this gateway ends."""
        for record in self._registry:
            self.outbox.send_unconfirmed(record.peer, GatewayLeaving())

    def close(self) -> None:
        """Forget every worker; open outputs end (on_lost DRAINING)."""
        for record in self._registry:
            self.carry_out(self._registry.give_up(record, LostReason.DRAINING, "the gateway is shutting down"))

    def changed(self) -> None:
        """The set of workers or models has changed."""
        for callback in self.on_change:
            try:
                callback()
            except Exception:
                log.exception("on_change_failed")

    # ------------------------------------------------------------ parts

    def _refuse(self, decision: Refuse) -> None:
        self._stats.refusals[decision.kind] += 1
        log.warning("worker_refused", kind=decision.kind, reason=decision.reason)
        self.outbox.send_unconfirmed(decision.peer, Refused(epoch=decision.epoch, reason=decision.reason))

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
