"""What each kind of message from a worker means. Frames in; decisions and ended outputs out.

Everything a peer can send comes through here, so everything it can get wrong is counted here. Must not know sockets.
"""

from collections.abc import Callable

from gateway.workers.decisions import Decision, Peer
from gateway.workers.outputs import Output, Outputs
from gateway.workers.prefixes import Prefixes
from gateway.workers.queries import Queries
from gateway.workers.records import WorkerRecord
from gateway.workers.registry import Registry
from gateway.workers.stats import PoolStats
from wire.bundle import BundleError
from wire.codec import ProtocolError, decode_to_gateway
from wire.messages import AdminReply, Heartbeat, KvEvents, Leaving, Register, StepOutput, ToGateway, TokenizerBundle

Outcome = tuple[list[Decision], list[Output]]


class Inbound:
    """check_process(incarnation): report an exit of its process now, if there was one (it calls back by itself)."""

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
