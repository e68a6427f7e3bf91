"""The worker's links to its gateways: the engine's Inbox and Outbox over ZeroMQ.

One DEALER per gateway endpoint, all used by the engine's thread; only ``wake`` may be called from elsewhere. Presents
the worker until it is welcome, hands out the tokenizer, and reports a gateway that is gone as GatewayLost: on a broken
connection, on a restart, or when it has taken nothing for so long that the backlog is full. Must not know what the
engine does with messages. No asyncio.
"""

import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum

import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message

from octavo.wire.codec import MessageTooLarge, ProtocolError, decode_to_worker, encode
from octavo.wire.curve import CurveKeys, new_gateway_dealer
from octavo.wire.messages import GatewayLeaving, NeedTokenizer, Refused, Register, TokenizerBundle, Welcome
from octavo.worker.engine.interfaces import GatewayJoined, GatewayLost, InboxMessage, LinkStats, OutboxMessage
from octavo.worker.scheduler.plan import GatewayIndex
from octavo.worker.transport.registration import LinkState, Registration

log = structlog.get_logger(__name__)
MAX_BACKLOG_MESSAGES = 4_096  # besides the socket's own queue
MAX_BACKLOG_BYTES = 64 * 1024 * 1024
MAX_DRAIN = 1_000  # messages per gateway and call: the engine must get to its step
Received = list[tuple[GatewayIndex, InboxMessage]]


class Transition(Enum):
    """What happened to the connection."""

    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    REFUSED = "refused"  # by CURVE: the keys do not fit


_EVENTS: dict[int, Transition] = {
    zmq.EVENT_HANDSHAKE_SUCCEEDED: Transition.CONNECTED,
    zmq.EVENT_DISCONNECTED: Transition.DISCONNECTED,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: Transition.REFUSED,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: Transition.REFUSED,
}


class BacklogFull(Exception):
    """The gateway has stopped reading; give it up."""


def _is_readable(socket: "zmq.Socket[bytes]") -> bool:
    # Half of what a poller of one socket, or a message that is not there, costs.
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


class GatewaySocket:
    """One DEALER towards one gateway, with a monitor that reports when its connection is made and breaks. Reconnects by
    itself. For one thread; knows nothing of what messages mean."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, curve: CurveKeys | None) -> None:
        self.address = address
        self._backlog: deque[bytes] = deque()
        self._backlog_bytes = 0
        self.socket = new_gateway_dealer(context, address, curve)
        self.monitor = self.socket.get_monitor_socket(sum(_EVENTS))
        self.socket.connect(address)

    def transitions(self) -> list[Transition]:
        """What happened to the connection since the last call. Never blocks."""
        happened = []
        while _is_readable(self.monitor):
            if (event := int(recv_monitor_message(self.monitor)["event"])) in _EVENTS:
                happened.append(_EVENTS[event])
        return happened

    def receive(self, limit: int) -> list[bytes]:
        """Up to ``limit`` messages that have arrived; of several frames only the last counts. Never blocks."""
        frames: list[bytes] = []
        with suppress(zmq.Again):
            while len(frames) < limit and _is_readable(self.socket):
                frames.append(self.socket.recv_multipart(zmq.NOBLOCK)[-1])
        return frames

    def send(self, frame: bytes) -> None:
        """Send, or queue in order until the socket accepts it. Raises BacklogFull."""
        if self._backlog:
            self.flush()
        if self._backlog or not self._try_send(frame):
            if len(self._backlog) >= MAX_BACKLOG_MESSAGES or self._backlog_bytes + len(frame) > MAX_BACKLOG_BYTES:
                raise BacklogFull(f"{len(self._backlog)} messages wait for {self.address}")
            self._backlog.append(frame)
            self._backlog_bytes += len(frame)

    def flush(self) -> None:
        """Send what is queued."""
        while self._backlog and self._try_send(self._backlog[0]):
            self._backlog_bytes -= len(self._backlog.popleft())

    @property
    def has_backlog(self) -> bool:
        """Whether anything is queued."""
        return bool(self._backlog)

    def forget(self) -> None:
        """Drop everything queued in either direction: it belongs to a connection that is over."""
        self._backlog.clear()
        self._backlog_bytes = 0
        while self.receive(1_000):
            pass

    def reconnect(self) -> None:
        """Cut the connection and dial again, which also empties the socket's own queues."""
        self.socket.disconnect(self.address)
        self.forget()
        self.socket.connect(self.address)

    def close(self) -> None:
        """What the socket holds is sent for as long as its LINGER allows. Idempotent."""
        if not self.socket.closed:
            self.socket.disable_monitor()
            self.monitor.close(linger=0)
            self.socket.close()

    def _try_send(self, frame: bytes) -> bool:
        with suppress(zmq.Again):
            self.socket.send(frame, zmq.NOBLOCK)
            return True
        return False


@dataclass(slots=True)
class _Gateway:
    index: GatewayIndex
    socket: GatewaySocket
    registration: Registration = field(default_factory=Registration)
    is_leaving: bool = False  # it has said so, on the connection that there is


class WorkerLink:
    """Implements `worker.engine.interfaces.Inbox` and `worker.engine.interfaces.Outbox`."""

    def __init__(
        self,
        endpoints: Sequence[str],
        register: Register,
        tokenizer_files: dict[str, bytes],
        *,
        curve: CurveKeys | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Dials at once; registers from the first ``drain`` or ``wait`` on."""
        self.stats = LinkStats()
        self.on_refused: Callable[[str], None] = lambda reason: None  # why a gateway refused this worker
        self._register = register
        self._files = tokenizer_files
        self._clock = clock
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._curve = curve
        self._gateways: dict[GatewayIndex, _Gateway] = {}  # replaced, never changed: other threads look at it
        self._wanted = endpoints
        self._lost: list[GatewayIndex] = []  # noticed while sending; reported by the next drain
        self._wake_descriptor: int | None = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._change(endpoints, [])

    @property
    def welcomed(self) -> dict[str, bool]:
        """By endpoint, whether the gateway there has accepted this worker. From any thread."""
        return {each.socket.address: each.registration.state is LinkState.WELCOMED for each in self._gateways.values()}

    def dial(self, endpoints: Sequence[str]) -> None:
        """All gateways from now on: the next ``drain`` dials new ones and drops the others. From any thread."""
        self._wanted = tuple(endpoints)
        self.wake()

    # ------------------------------------------------------------ Inbox

    def drain(self) -> Received:
        """All messages that have arrived. Never blocks."""
        received: Received = [(index, GatewayLost()) for index in self._lost]
        self._lost.clear()
        if self._wanted is not self._endpoints:
            self._change(self._wanted, received)
        for gateway in self._readable():
            self._take_transitions(gateway, received)
            for frame in gateway.socket.receive(MAX_DRAIN):
                self._take(gateway, frame, received)
        for gateway in self._gateways.values():
            if gateway.registration.state is LinkState.PRESENTING:
                self._present(gateway)
            gateway.socket.flush()
        return received

    def wait(self, timeout_s: float) -> None:
        """Return as soon as ``drain`` may return something or ``wake`` was called, and after timeout_s at the
        latest."""
        if self._lost:
            return
        if any(g.registration.state is LinkState.PRESENTING or g.socket.has_backlog for g in self._gateways.values()):
            timeout_s = min(timeout_s, 0.05)
        descriptor = self._wake_descriptor
        if descriptor in dict(self._poller.poll(math.ceil(max(timeout_s, 0.0) * 1000))) and descriptor is not None:
            os.eventfd_read(descriptor)

    def wake(self) -> None:
        """End a ``wait`` now. From any thread or signal handler, also of one that comes after ``close``."""
        if self._wake_descriptor is not None:
            os.eventfd_write(self._wake_descriptor, 1)

    # ------------------------------------------------------------ Outbox

    def put(self, gateway: GatewayIndex, message: OutboxMessage) -> None:
        """Send to one gateway; dropped and counted if it is gone."""
        self._send_frame(self._gateways.get(gateway), encode(message))

    def put_all(self, message: OutboxMessage) -> None:
        """Send to every gateway that has welcomed this worker."""
        frame = encode(message)
        for gateway in self._gateways.values():
            if gateway.registration.state is LinkState.WELCOMED:
                self._send_frame(gateway, frame)

    def linger(self, timeout_s: float) -> None:
        """Give the last message (Leaving) time to be sent: sockets are closed without lingering otherwise."""
        deadline_s = self._clock() + timeout_s
        while any(gateway.socket.has_backlog for gateway in self._gateways.values()) and self._clock() < deadline_s:
            time.sleep(0.005)
            for gateway in self._gateways.values():
                gateway.socket.flush()
        for gateway in self._gateways.values():
            gateway.socket.socket.setsockopt(zmq.LINGER, int(timeout_s * 1000))

    def close(self) -> None:
        """Close the sockets. Idempotent."""
        if self._context.closed:
            return
        for gateway in self._gateways.values():
            gateway.socket.close()
        descriptor, self._wake_descriptor = self._wake_descriptor, None
        self._context.term()
        if descriptor is not None:
            os.close(descriptor)

    # ------------------------------------------------------------ parts

    def _change(self, endpoints: Sequence[str], received: Received) -> None:
        self._endpoints, gateways = endpoints, dict(self._gateways)
        for gateway in (each for each in self._gateways.values() if each.socket.address not in endpoints):
            self._disconnected(gateway, "it is no gateway of the service any more", received)
            gateway.socket.close()
            del gateways[gateway.index]
        known = {each.socket.address for each in gateways.values()}
        for address in dict.fromkeys(each for each in endpoints if each not in known):
            index = GatewayIndex(next(n for n in range(len(gateways) + 1) if n not in gateways))
            gateways[index] = _Gateway(index, GatewaySocket(self._context, address, self._curve))
        self._gateways = gateways
        self._poller = zmq.Poller()
        self._poller.register(self._wake_descriptor, zmq.POLLIN)
        for gateway in gateways.values():
            self._poller.register(gateway.socket.socket, zmq.POLLIN)
            self._poller.register(gateway.socket.monitor, zmq.POLLIN)

    def _readable(self) -> list[_Gateway]:
        """Gateways with something to read; a single poll for all, since most have nothing between two steps."""
        ready = dict(self._poller.poll(0))
        return [g for g in self._gateways.values() if g.socket.socket in ready or g.socket.monitor in ready]

    def _disconnected(self, gateway: _Gateway, reason: str, received: Received) -> None:
        if gateway.registration.on_disconnected():
            self._note_lost(gateway, reason)
            received.append((gateway.index, GatewayLost()))

    def _take_transitions(self, gateway: _Gateway, received: Received) -> None:
        for transition in gateway.socket.transitions():
            if transition is Transition.CONNECTED:
                gateway.is_leaving = False
                gateway.registration.on_connected()
            elif transition is Transition.DISCONNECTED:
                # Whatever is here now came before the break, so before the Register that follows it.
                gateway.socket.forget()
                self._disconnected(gateway, "connection closed", received)
            else:
                log.error("gateway_refused_keys", gateway=gateway.socket.address)

    def _take(self, gateway: _Gateway, frame: bytes, received: Received) -> None:
        self.stats.received_messages += 1
        self.stats.received_bytes += len(frame)
        try:
            message = decode_to_worker(frame)
        except ProtocolError:
            self.stats.undecodable_frames += 1
            return
        if isinstance(message, GatewayLeaving):
            gateway.is_leaving = True
        elif isinstance(message, Welcome | Refused | NeedTokenizer):
            self._take_own(gateway, message, received)
        elif gateway.registration.state is LinkState.WELCOMED:
            received.append((gateway.index, message))
        else:
            self.stats.unexpected_messages += 1

    def _take_own(self, gateway: _Gateway, message: Welcome | Refused | NeedTokenizer, received: Received) -> None:
        if message.epoch != self._register.epoch:
            self.stats.unexpected_messages += 1
        elif isinstance(message, Welcome):
            self._welcome(gateway, message, received)
        elif isinstance(message, Refused):
            self._refuse(gateway, message, received)
        else:
            self._send_bundle(gateway, message.digest)

    def _welcome(self, gateway: _Gateway, message: Welcome, received: Received) -> None:
        is_new = gateway.registration.state is not LinkState.WELCOMED
        if gateway.registration.on_welcome(message.gateway_id):
            self._note_lost(gateway, "restarted")
            received.append((gateway.index, GatewayLost()))
            is_new = True
        if is_new:
            log.info("gateway_joined", gateway=gateway.socket.address)
            received.append((gateway.index, GatewayJoined()))

    def _refuse(self, gateway: _Gateway, message: Refused, received: Received) -> None:
        log.error("gateway_refused_worker", gateway=gateway.socket.address, reason=message.reason)
        self._disconnected(gateway, "refused", received)
        self.on_refused(message.reason)

    def _send_bundle(self, gateway: _Gateway, digest: str) -> None:
        bundle = TokenizerBundle(epoch=self._register.epoch, digest=digest, files=self._files)
        try:
            self._send_frame(gateway, encode(bundle))
        except MessageTooLarge as error:
            log.error("tokenizer_too_large", error=str(error))

    def _present(self, gateway: _Gateway) -> None:
        if not gateway.socket.has_backlog and gateway.registration.takes_register(self._clock()):  # one is enough
            self._count_sent(encoded := encode(self._register))
            gateway.socket.send(encoded)

    def _send_frame(self, gateway: _Gateway | None, frame: bytes) -> None:
        if gateway is None or gateway.registration.state is not LinkState.WELCOMED:
            self.stats.dropped_messages += 1
            return
        try:
            gateway.socket.send(frame)
            self._count_sent(frame)
        except BacklogFull as error:
            self._give_up(gateway, str(error))

    def _give_up(self, gateway: _Gateway, reason: str) -> None:
        """The gateway has stopped reading. A new connection tells both sides that the old one is over."""
        gateway.registration.on_disconnected()
        gateway.socket.reconnect()
        self._note_lost(gateway, reason)
        self._lost.append(gateway.index)

    def _note_lost(self, gateway: _Gateway, reason: str) -> None:
        self.stats.gateways_lost += 1
        if gateway.is_leaving:
            log.info("gateway_left", gateway=gateway.socket.address)
        else:
            log.warning("gateway_lost", gateway=gateway.socket.address, reason=reason)

    def _count_sent(self, frame: bytes) -> None:
        self.stats.sent_messages += 1
        self.stats.sent_bytes += len(frame)
