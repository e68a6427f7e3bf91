"""The transport between workers and gateways, as ZeroMQ behaves: order within a pipe is kept, whole messages are lost
only with their connection or at a full queue, nothing is repeated by itself.

One `Connection` per DEALER and life of a connection, two `Pipe`s in it. Knows frames, not what they mean.
"""

import random
from collections import deque
from collections.abc import Callable

from sim.edges.loop import SimLoop
from sim.journal import Journal


class Pipe:
    """One direction of a connection. deliver: called as each frame arrives, in order."""

    def __init__(self, loop: SimLoop, rng: random.Random, *, delay_s: float, deliver: Callable[[bytes], None]) -> None:
        self._loop = loop
        self._rng = rng
        self._delay_s = delay_s
        self._deliver = deliver
        self._frames: deque[tuple[float, bytes]] = deque()
        self._held_until_s = 0.0
        self._last_due_s = 0.0

    def __len__(self) -> int:
        return len(self._frames)

    def send(self, frame: bytes) -> None:
        """Send a frame; it arrives after those sent before."""
        delay_s = self._delay_s * (0.2 + self._rng.expovariate(1.0))
        due_s = max(self._loop.time() + delay_s, self._last_due_s, self._held_until_s)
        self._last_due_s = due_s
        self._frames.append((due_s, frame))
        self._loop.call_at(due_s, self._arrive)

    def hold(self, until_s: float) -> None:
        """Deliver nothing before then."""
        self._held_until_s = max(self._held_until_s, until_s)
        if self._frames:
            self._loop.call_at(self._held_until_s, self._arrive)

    def cut(self, num_kept: int = 0) -> None:
        """Lose all frames in transit except the oldest ``num_kept``."""
        while len(self._frames) > num_kept:
            self._frames.pop()

    def _arrive(self) -> None:
        now_s = self._loop.time()
        if now_s < self._held_until_s:
            self._loop.call_at(self._held_until_s, self._arrive)
            return
        while self._frames and self._frames[0][0] <= now_s + 1e-9:
            self._deliver(self._frames.popleft()[1])


class Connection:
    """One connection, from connect to disconnect. up: to the gateway; down: to the worker."""

    def __init__(self, routing_id: bytes, up: Pipe, down: Pipe) -> None:
        self.routing_id = routing_id
        self.up = up
        self.down = down
        self.is_open = True

    def hold(self, until_s: float) -> None:
        """A partition or a delay, in both directions."""
        self.up.hold(until_s)
        self.down.hold(until_s)


class Hub:
    """An address of a gateway, across restarts: at most one listener at a time."""

    def __init__(self, loop: SimLoop, rng: random.Random, journal: Journal, *, delay_s: float) -> None:
        self.loop = loop
        self.rng = rng
        self.journal = journal
        self.delay_s = delay_s
        self.listener: Listener | None = None
        self._num_drawn = 0

    def connect(self, on_frame: Callable[[bytes], None], on_closed: Callable[[], None]) -> Connection | None:
        """A new connection; None if nothing listens."""
        listener = self.listener
        if listener is None:
            return None
        self._num_drawn += 1
        routing_id = self._num_drawn.to_bytes(5, "big")
        up = Pipe(self.loop, self.rng, delay_s=self.delay_s, deliver=lambda frame: listener.take(routing_id, frame))
        down = Pipe(self.loop, self.rng, delay_s=self.delay_s, deliver=on_frame)
        connection = Connection(routing_id, up, down)
        listener.connections[routing_id] = (connection, on_closed)
        return connection


class Listener:
    """A gateway's socket, for one run of its process."""

    def __init__(self, hub: Hub, on_frame: Callable[[bytes, bytes], None]) -> None:
        self.connections: dict[bytes, tuple[Connection, Callable[[], None]]] = {}
        self._hub = hub
        self._on_frame = on_frame
        self._is_open = True
        hub.listener = self

    def take(self, routing_id: bytes, frame: bytes) -> None:
        """A frame arrived."""
        if self._is_open:
            self._hub.journal.note_bytes("up", frame)
            self._on_frame(routing_id, frame)

    def drop(self, connection: Connection) -> None:
        """The connection breaks: all frames on the way down are lost, and some of those on the way up."""
        if not connection.is_open:
            return
        connection.is_open = False
        _, on_closed = self.connections.pop(connection.routing_id)
        connection.down.cut()
        connection.up.cut(self._hub.rng.randint(0, len(connection.up)))
        on_closed()

    def close(self) -> None:
        """The process has ended."""
        self._is_open = False
        if self._hub.listener is self:
            self._hub.listener = None
        for connection, _ in tuple(self.connections.values()):
            self.drop(connection)
