"""A worker's socket towards one gateway: the real `worker.gateway_socket.GatewaySocket` with its edge replaced."""

from collections import deque
from collections.abc import Callable

from sim.network import Connection, Hub
from wire.options import RECONNECT_MAX_MS, RECONNECT_MS
from worker.gateway_socket import GatewaySocket, Transition


class SimDealer(GatewaySocket):
    """Dials by itself, again and again, until closed. on_event: something may be here for the worker.

    Frames sent while the worker computes leave when the step ends (`release`): its clock is ahead until then.
    """

    def __init__(self, hub: Hub, *, high_water: int, on_event: Callable[[], None]) -> None:
        self.address = "sim"
        self._backlog: deque[bytes] = deque()
        self._backlog_bytes = 0
        self.connection: Connection | None = None
        self._hub = hub
        self._high_water = high_water
        self._on_event = on_event
        self._inbox: deque[bytes] = deque()
        self._transitions: list[Transition] = []
        self._outgoing: list[bytes] = []
        self._is_computing = False
        self._is_closed = False
        self._no_dial_before_s = 0.0
        self._dial_soon()

    # ------------------------------------------------------------ the edge of GatewaySocket

    def transitions(self) -> list[Transition]:
        happened, self._transitions = self._transitions, []
        return happened

    def receive(self, limit: int) -> list[bytes]:
        return [self._inbox.popleft() for _ in range(min(limit, len(self._inbox)))]

    def reconnect(self) -> None:
        self.cut()
        self._transitions.clear()  # the link knows; zmq_disconnect tells no monitor of the break that it makes
        self.forget()

    def close(self) -> None:
        self._is_closed = True
        self._outgoing.clear()
        self.cut()

    def _try_send(self, frame: bytes) -> bool:
        connection = self.connection
        if connection is None or len(connection.up) + len(self._outgoing) >= self._high_water:
            return False
        if self._is_computing:
            self._outgoing.append(frame)
        else:
            connection.up.send(frame)
        return True

    # ------------------------------------------------------------ the simulation's side

    def compute(self) -> None:
        """A step begins."""
        self._is_computing = True

    def release(self) -> None:
        """The step has ended: what it said leaves."""
        self._is_computing = False
        frames, self._outgoing = self._outgoing, []
        for frame in frames:
            if self.connection is not None:
                self.connection.up.send(frame)

    def cut(self) -> None:
        """Break the connection."""
        if self.connection is not None and self._hub.listener is not None:
            self._hub.listener.drop(self.connection)

    def partition(self, until_s: float, *, cut_after_s: float) -> None:
        """Nothing gets through until then; where that takes long, both sides notice and cut."""
        loop = self._hub.loop
        if self.connection is not None:
            self.connection.hold(until_s)
        if until_s - loop.time() > cut_after_s:
            self._no_dial_before_s = max(self._no_dial_before_s, until_s)
            loop.call_later(cut_after_s, self.cut)

    def _dial_soon(self) -> None:
        wait_s = self._hub.rng.uniform(RECONNECT_MS, RECONNECT_MAX_MS) / 1000
        self._hub.loop.call_at(max(self._hub.loop.time() + wait_s, self._no_dial_before_s), self._dial)

    def _dial(self) -> None:
        if self._is_closed or self.connection is not None:
            return
        self.connection = self._hub.connect(self._arrived, self._closed)
        if self.connection is None:
            self._dial_soon()
            return
        self._transitions.append(Transition.CONNECTED)
        self._on_event()

    def _arrived(self, frame: bytes) -> None:
        self._inbox.append(frame)
        self._on_event()

    def _closed(self) -> None:
        self.connection = None
        self._outgoing.clear()
        self._transitions.append(Transition.DISCONNECTED)
        if not self._is_closed:
            self._dial_soon()
            self._on_event()
