"""One DEALER socket towards one gateway, with the monitor that tells when its connection stands and breaks.

Used by one thread only (ZeroMQ sockets are not thread safe). Must not know what messages mean.
"""

from collections import deque
from dataclasses import dataclass
from enum import Enum

import zmq
from zmq.utils.monitor import recv_monitor_message

from octavo.wire.curve import secure_client
from octavo.wire.endpoints import Transport, parse_endpoint
from octavo.wire.keys import KeyPair
from octavo.wire.options import new_dealer

MAX_BACKLOG_MESSAGES = 4_096  # besides the socket's own queue
MAX_BACKLOG_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveKeys:
    """Our own pair, and the gateways' public key."""

    own: KeyPair
    gateway_public: bytes


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
    """The gateway takes nothing any more; give it up."""


def new_gateway_dealer(
    context: "zmq.Context[zmq.Socket[bytes]]", address: str, curve: CurveKeys | None
) -> "zmq.Socket[bytes]":
    """A DEALER for one address; CURVE is for tcp, the run directory's permissions are for ipc."""
    socket = new_dealer(context)
    if curve is not None and parse_endpoint(address).transport is Transport.TCP:
        secure_client(socket, curve.own, curve.gateway_public)
    return socket


class GatewaySocket:
    """Connects by itself, again and again."""

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
        while self.monitor.poll(0):
            event = int(recv_monitor_message(self.monitor)["event"])
            if event in _EVENTS:
                happened.append(_EVENTS[event])
        return happened

    def receive(self, limit: int) -> list[bytes]:
        """Up to ``limit`` messages that are here; of several frames only the last counts. Never blocks."""
        frames: list[bytes] = []
        try:
            while len(frames) < limit:
                frames.append(self.socket.recv_multipart(zmq.NOBLOCK)[-1])
        except zmq.Again:
            pass
        return frames

    def send(self, frame: bytes) -> None:
        """Send, or keep in order until the socket takes it. Raises BacklogFull."""
        if self._backlog:
            self.flush()
        if self._backlog or not self._try_send(frame):
            if len(self._backlog) >= MAX_BACKLOG_MESSAGES or self._backlog_bytes + len(frame) > MAX_BACKLOG_BYTES:
                raise BacklogFull(f"{len(self._backlog)} messages wait for {self.address}")
            self._backlog.append(frame)
            self._backlog_bytes += len(frame)

    def flush(self) -> None:
        """Send what had to wait."""
        while self._backlog and self._try_send(self._backlog[0]):
            self._backlog_bytes -= len(self._backlog.popleft())

    @property
    def has_backlog(self) -> bool:
        """Whether something waits."""
        return bool(self._backlog)

    def forget(self) -> None:
        """Throw away what waits in either direction: it belongs to a connection that is over."""
        self._backlog.clear()
        self._backlog_bytes = 0
        while self.receive(1_000):
            pass

    def reconnect(self) -> None:
        """Cut the connection and dial anew, which empties the socket's own queues too."""
        self.socket.disconnect(self.address)
        self.forget()
        self.socket.connect(self.address)

    def close(self) -> None:
        """What the socket holds goes out for as long as its LINGER says. Idempotent."""
        if not self.socket.closed:
            self.socket.disable_monitor()
            self.monitor.close(linger=0)
            self.socket.close()

    def _try_send(self, frame: bytes) -> bool:
        try:
            self.socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True
