"""Gateways that share limits, in a simulation: gateways, clocks and the network between them are simulated here; the
code that counts and reports is the product's."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from random import Random

from octavo.gateway.auth.authenticator import Caller, TenantLimits
from octavo.gateway.errors import QueueFull, TenantLimit
from octavo.gateway.peers.limits import GAP_S, SNAPSHOT_S, SharedLimits
from octavo.gateway.requests.admission import Admission, TenantQuotas
from octavo.wire.peer_messages import PeerUse

MAX_REQUESTS, MAX_QUEUED, MAX_SERVICE = 6, 4, 9
RATE, BURST = 1200, 60  # tokens a minute: 20 a second
TENANT = Caller(
    name="k",
    tenant="t",
    scopes=frozenset(),
    limits=TenantLimits(max_requests=MAX_REQUESTS, max_queued=MAX_QUEUED, tokens_per_minute=RATE, burst_tokens=BURST),
)
OTHER = Caller(name="o", tenant="o", scopes=frozenset(), limits=TenantLimits(max_requests=5))
KINDS = ("service", "requests", "queued")


@dataclass(eq=False)
class Request:
    key: str
    who: Caller
    queued: set[int]
    num_outputs: int
    reserved: int = 0


@dataclass(eq=False)
class Gate:
    """One life of a gateway. let_in, net: outputs of each kind that were admitted, and tokens reserved minus tokens
    given back, since its start. heard: for each other gateway, both of these at the time when the last message that
    arrived here and reported them was sent."""

    gateway_id: str
    place: int
    has_begun_s: float = 0.0
    is_alive: bool = True
    admission: Admission = field(default_factory=lambda: Admission(max_requests=99, max_service_requests=MAX_SERVICE))
    quotas: TenantQuotas = field(default_factory=TenantQuotas)
    requests: dict[str, Request] = field(default_factory=dict)
    let_in: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    net: int = 0
    heard: dict[str, tuple[dict[str, int], int]] = field(default_factory=dict)
    is_tell_due: bool = False
    told_s: float = -1.0

    def __post_init__(self) -> None:
        self.limits = SharedLimits(self, PeerUse(call_id=0, number=0, gateway_id=self.gateway_id))

    def in_flight(self, kind: str) -> int:
        own = [each for each in self.requests.values() if kind == "service" or each.who is TENANT]
        return sum(len(each.queued) if kind == "queued" else each.num_outputs for each in own)


class Service:
    """Gateways that report to each other over a network with delays, losses, and cuts between places."""

    def __init__(self, seed: int, num: int, *, delay_s: float, loss: float) -> None:
        self.rng, self.now_s = Random(seed), 0.0
        self.delay_s, self.loss = delay_s, loss
        self.cut: set[frozenset[int]] = set()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order, self._ids = count(), count()
        self._latest: dict[tuple[str, str], float] = {}
        self.gates: list[Gate] = []
        self.dead: list[Gate] = []
        for place in range(num):
            self.begin(place)

    @property
    def now_ns(self) -> int:
        return round(self.now_s * 1e9)

    def at(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._order), action))

    def run(self, for_s: float) -> None:
        end_s = self.now_s + for_s
        while self._events and self._events[0][0] <= end_s:
            self.now_s, _, action = heapq.heappop(self._events)
            action()
        self.now_s = end_s

    # ------------------------------------------------------------ gateways

    def begin(self, place: int) -> Gate:
        gate = Gate(f"g{next(self._ids)}", place, self.now_s)
        self.gates.append(gate)

        def changed() -> None:
            if not gate.is_tell_due:
                gate.is_tell_due = True
                self.at(max(0.0, gate.told_s + GAP_S - self.now_s), lambda: self.tell(gate, gate.limits.take_changes))

        gate.quotas.on_change = gate.admission.on_change = changed
        self.at(0.0, lambda: self.send_snapshot(gate))
        return gate

    def kill(self, gate: Gate) -> None:
        gate.is_alive = False
        self.gates.remove(gate)
        self.dead.append(gate)

    def send_snapshot(self, gate: Gate) -> None:
        if gate.is_alive:
            gate.limits.forget_silent(self.now_ns)
            self.tell(gate, gate.limits.take_snapshot)
            self.at(SNAPSHOT_S, lambda: self.send_snapshot(gate))

    def tell(self, gate: Gate, take: Callable[[int], list[PeerUse]]) -> None:
        if not gate.is_alive:
            return
        gate.is_tell_due, gate.told_s = False, self.now_s
        messages, state = take(self.now_ns), (dict(gate.let_in), gate.net)
        for to in self.gates:
            is_cut = frozenset((gate.place, to.place)) in self.cut
            if to is not gate and not is_cut and self.rng.random() >= self.loss:
                pair = (gate.gateway_id, to.gateway_id)
                come_s = max(self._latest.get(pair, 0.0), self.now_s + self.rng.uniform(0.0, self.delay_s))
                self._latest[pair] = come_s
                self.at(come_s - self.now_s, lambda to=to: self.arrive(gate, to, messages, state))  # type: ignore[misc]

    def arrive(self, of: Gate, to: Gate, messages: list[PeerUse], state: tuple[dict[str, int], int]) -> None:
        if to.is_alive:
            outputs, net = to.heard.get(of.gateway_id, (dict.fromkeys(KINDS, 0), 0))
            outputs = outputs | {"service": state[0]["service"]}
            for message in messages:
                to.limits.on_report(message, self.now_ns)
                if any(each.name == "t" for each in message.tenants):
                    outputs, net = state
            to.heard[of.gateway_id] = (outputs, net)

    # ------------------------------------------------------------ callers

    def enter(self, gate: Gate, who: Caller, num_outputs: int, num_tokens: int) -> Request | None:
        """Admits a request as the tracker does; None if it was refused."""
        key = who.key_of(f"r{next(self._ids)}")
        try:
            gate.admission.enter(key, num_outputs=num_outputs)
        except QueueFull:
            return None
        request = Request(key, who, set(range(num_outputs)), num_outputs)
        try:
            gate.quotas.enter(key, who, self.now_ns, num_outputs=num_outputs)
            gate.requests[key] = request
            if num_tokens and who is TENANT:
                gate.quotas.reserve(key, num_tokens, self.now_ns)
                request.reserved = num_tokens
                gate.net += num_tokens
        except TenantLimit:
            self.leave(gate, request, num_used=0)
            return None
        gate.let_in["service"] += num_outputs
        if who is TENANT:
            gate.let_in["requests"] += num_outputs
            gate.let_in["queued"] += num_outputs
        return request

    def leave(self, gate: Gate, request: Request, *, num_used: int) -> None:
        gate.requests.pop(request.key, None)
        gate.admission.leave(request.key)
        gate.quotas.leave(request.key, num_used=num_used, now_ns=self.now_ns)
        gate.net -= max(0, request.reserved - num_used)

    def act(self, gate: Gate) -> Request | None:
        """A random action of callers; the request, if one was admitted."""
        action, waiting = self.rng.random(), list(gate.requests.values())
        if action < 0.55 or not waiting:
            who = TENANT if self.rng.random() < 0.8 else OTHER
            return self.enter(gate, who, self.rng.randint(1, 3), self.rng.choice([0, 5, 20, BURST]))
        request = self.rng.choice(waiting)
        if action < 0.75 and request.queued:
            index = request.queued.pop()
            gate.quotas.started(request.key, index)
        else:
            self.leave(gate, request, num_used=self.rng.randint(0, request.reserved + 2))
        return None


def unseen(service: Service, gate: Gate) -> dict[str, int]:
    """What the other gateways admitted since they sent the last report that arrived at this gateway, by kind."""
    nothing = (dict.fromkeys(KINDS, 0), 0)
    others = [each for each in service.gates if each is not gate]
    return {
        kind: sum(each.let_in[kind] - gate.heard.get(each.gateway_id, nothing)[0][kind] for each in others)
        for kind in KINDS
    }
