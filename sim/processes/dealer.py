"""A worker's sockets towards gateways and what they make together: the real `worker.transport.link` with its edge
replaced.

Also an outbox that can lie: one message in a while says what no correct worker says.
"""

from collections import deque
from collections.abc import Callable

import msgspec
import numpy as np

from octavo.wire.messages import Finished, Register, StepOutput, WireFinishReason
from octavo.wire.options import RECONNECT_MAX_MS, RECONNECT_MS
from octavo.worker.engine.interfaces import LinkStats, OutboxMessage
from octavo.worker.scheduler.plan import GatewayIndex
from octavo.worker.transport.link import GatewaySocket, Received, Transition, WorkerLink, _Gateway
from octavo.worker.transport.registration import LinkState
from sim.edges.network import Connection, Hub
from sim.journal import Journal
from sim.processes.runner import VOCAB_SIZE, SimClock

LIES = (
    "token_out_of_range",
    "unknown_handle",
    "ends_twice",
    "wrong_count",
    "gap",
    "old_epoch",
    "garbage",
    "late_token",
)
IDLE_WAIT_S = 0.5


class FaultyOutbox:
    """An Outbox that can lie. ``lie``: what to falsify in the next message where that is possible; "" for none."""

    def __init__(self, link: WorkerLink, journal: Journal) -> None:
        self.lie = ""
        self._ended: int | None = None  # a handle that can have no more tokens
        self._link = link
        self._journal = journal

    def put_all(self, message: OutboxMessage) -> None:
        self._link.put_all(message)

    def put(self, gateway: GatewayIndex, message: OutboxMessage) -> None:
        if self.lie and isinstance(message, StepOutput):
            if self.lie == "garbage":
                self._link._gateways[gateway].socket.send(b"\x01\xc1garbage")
            lie = self._lied(message)
            if lie is not message or self.lie == "garbage":
                self._journal.faults[f"lie:{self.lie}"] += 1
                self.lie = ""
            message = lie
        self._link.put(gateway, message)
        if isinstance(message, StepOutput) and message.finished:
            self._ended = message.finished[0].handle

    def _lied(self, message: StepOutput) -> StepOutput:
        replace = msgspec.structs.replace
        match self.lie:
            case "token_out_of_range" if message.tokens:
                tokens = message.tokens[:-4] + np.array([VOCAB_SIZE + 7], "<i4").tobytes()
                return replace(message, tokens=tokens)
            case "unknown_handle":
                stranger = Finished(handle=1 << 40, reason=WireFinishReason.LENGTH)
                return replace(message, finished=(*message.finished, stranger))
            case "ends_twice" if message.finished:
                return replace(message, finished=message.finished * 2)
            case "wrong_count" if message.finished:
                first = message.finished[0]
                wrong = replace(first, completion_tokens=first.completion_tokens + 1)
                return replace(message, finished=(wrong, *message.finished[1:]))
            case "gap":
                return replace(message, seq=message.seq + 1)
            case "old_epoch":
                return replace(message, epoch="0" * 32)
            case "late_token" if self._ended is not None:
                handles = message.handles + np.array([self._ended], "<i8").tobytes()
                return replace(message, handles=handles, tokens=message.tokens + np.array([5], "<i4").tobytes())
        return message


class SimDealer(GatewaySocket):
    """Dials by itself until closed. on_event: called when there may be something to receive.

    Frames sent while the worker computes leave when the step ends (`release`): the worker's clock is ahead until then.
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
        """The step has ended: send what it produced."""
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
        """Deliver nothing until then; if that takes too long, both sides notice and disconnect."""
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


class SimLink(WorkerLink):
    """The real link, on simulated sockets and without a poller."""

    def __init__(self, dealers: list[SimDealer], register: Register, files: dict[str, bytes], clock: SimClock) -> None:
        self.stats = LinkStats()
        self.on_refused = lambda reason: None
        self._register = register
        self._files = files
        self._clock = clock
        for n, dealer in enumerate(dealers):
            dealer.address = f"sim-{n}"
        self._gateways = {GatewayIndex(n): _Gateway(GatewayIndex(n), dealer) for n, dealer in enumerate(dealers)}
        self._wanted = self._endpoints = tuple(dealer.address for dealer in dealers)
        self._lost = []
        self.on_drained: Callable[[Received], None] = lambda messages: None

    def drain(self) -> Received:
        received = super().drain()
        self.on_drained(received)
        return received

    def _readable(self) -> list[_Gateway]:
        return list(self._gateways.values())  # there is nothing to poll

    @property
    def patience_s(self) -> float:
        """How long an idle engine may wait, like `WorkerLink.wait`."""
        if self._lost:
            return 0.0
        is_busy = any(
            g.registration.state is LinkState.PRESENTING or g.socket.has_backlog for g in self._gateways.values()
        )
        return 0.05 if is_busy else IDLE_WAIT_S
