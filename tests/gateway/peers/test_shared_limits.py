"""Limits that gateways share, in a simulation: what is overshot is what was not told yet, and nothing is refused for
ever. Gateways, clocks and the network between them are this file's; what they count and tell is the product's."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.gateway.auth.authenticator import Caller, TenantLimits
from octavo.gateway.errors import ExceedsCapacity, QueueFull, TenantLimit
from octavo.gateway.peers.limits import FORGET_S, GAP_S, SWEEP_S, SharedLimits
from octavo.gateway.requests.admission import Admission, TenantQuotas
from octavo.wire.peer_messages import PeerUse, TenantUse

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
    """One start of a gateway. let_in, net: outputs of each kind that were let in, tokens reserved less those given
    back, in all its life. heard: of each other one the same two when the last of its messages that told of them
    and came here was sent."""

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
    """Gateways that tell each other over a network with delays, losses, and cuts between places."""

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
                self.at(max(0.0, gate.told_s + GAP_S - self.now_s), lambda: self.tell(gate, is_sweep=False))

        gate.quotas.on_change = gate.admission.on_change = changed
        self.at(0.0, lambda: self.sweep(gate))
        return gate

    def kill(self, gate: Gate) -> None:
        gate.is_alive = False
        self.gates.remove(gate)
        self.dead.append(gate)

    def sweep(self, gate: Gate) -> None:
        if gate.is_alive:
            gate.limits.forget_silent(self.now_ns)
            self.tell(gate, is_sweep=True)
            self.at(SWEEP_S, lambda: self.sweep(gate))

    def tell(self, gate: Gate, *, is_sweep: bool) -> None:
        if not gate.is_alive:
            return
        gate.is_tell_due, gate.told_s = False, self.now_s
        messages, state = gate.limits.tell(self.now_ns, is_sweep=is_sweep), (dict(gate.let_in), gate.net)
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
                to.limits.hear(message, self.now_ns)
                if any(each.name == "t" for each in message.tenants):
                    outputs, net = state
            to.heard[of.gateway_id] = (outputs, net)

    # ------------------------------------------------------------ callers

    def enter(self, gate: Gate, who: Caller, num_outputs: int, num_tokens: int) -> Request | None:
        """As the tracker does it; None where it was refused."""
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
        """Something that callers do; the request, where one entered."""
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
    """What the others let in since they sent what this gateway heard last."""
    nothing = (dict.fromkeys(KINDS, 0), 0)
    others = [each for each in service.gates if each is not gate]
    return {
        kind: sum(each.let_in[kind] - gate.heard.get(each.gateway_id, nothing)[0][kind] for each in others)
        for kind in KINDS
    }


LIMITS = {"service": MAX_SERVICE, "requests": MAX_REQUESTS, "queued": MAX_QUEUED}


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32), num=st.integers(2, 5), delay_s=st.sampled_from([0.0, 0.005, 0.1]), lossy=st.booleans()
)
def test_a_limit_is_overshot_by_what_was_not_told_yet_and_by_no_more(
    seed: int, num: int, delay_s: float, lossy: bool
) -> None:
    """Outputs in flight and queued, of a tenant and of the service."""
    service = Service(seed, num, delay_s=delay_s, loss=0.3 if lossy else 0.0)
    service.run(4.0)  # all have met
    recent: list[tuple[float, Gate, dict[str, int]]] = []
    for _ in range(250):
        service.run(service.rng.choice([0.0, 0.001, 0.01, 0.1]))
        gate = service.rng.choice(service.gates)
        before = dict(gate.let_in)
        request = service.act(gate)
        if request is None:
            continue
        new = {kind: gate.let_in[kind] - before[kind] for kind in KINDS}
        recent.append((service.now_s, gate, new))
        kinds = KINDS if request.who is TENANT else ("service",)
        not_told = unseen(service, gate)
        for kind in kinds:
            total = sum(each.in_flight(kind) for each in service.gates)
            assert total <= LIMITS[kind] + not_told[kind], kind
            if not lossy:  # in seconds: nothing is older than the gap between two messages, and the way of one
                since_s = service.now_s - GAP_S - delay_s - 1e-6
                late = sum(some[kind] for at_s, by, some in recent if by is not gate and at_s >= since_s)
                assert total <= LIMITS[kind] + late, kind
            assert gate.in_flight(kind) <= LIMITS[kind], kind  # its own are counted exactly


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32), num=st.integers(2, 4), delay_s=st.sampled_from([0.0, 0.005, 0.1]), lossy=st.booleans()
)
def test_tokens_above_the_rate_are_those_that_were_not_told_yet(
    seed: int, num: int, delay_s: float, lossy: bool
) -> None:
    """In every span of time, whatever came back: burst, rate times the span, and what the others had not told."""
    service = Service(seed, num, delay_s=delay_s, loss=0.3 if lossy else 0.0)
    service.run(4.0)
    marks: list[tuple[float, int, dict[str, dict[str, int]]]] = []

    def mark() -> None:
        of_gate = {
            gate.gateway_id: {
                each.gateway_id: each.net - gate.heard[each.gateway_id][1] for each in service.gates if each is not gate
            }
            for gate in service.gates
        }
        marks.append((service.now_s, sum(each.net for each in service.gates), of_gate))

    mark()
    for _ in range(150):
        service.run(service.rng.choice([0.0, 0.001, 0.01, 0.1, 1.0]))
        gate = service.rng.choice(service.gates)
        mark()
        request = service.act(gate)
        if request is None or not request.reserved:
            continue
        mark()
        now_s, net, views = marks[-1]
        for then_s, before, earlier in marks:
            late = sum(some - min(0, earlier[gate.gateway_id][name]) for name, some in views[gate.gateway_id].items())
            assert net - before <= BURST + (now_s - then_s) * RATE / 60 + late + 1e-6


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), num=st.integers(2, 4))
def test_after_deaths_cuts_and_losses_nothing_is_refused_for_ever(seed: int, num: int) -> None:
    service = Service(seed, num, delay_s=0.05, loss=0.1)
    for _ in range(200):
        service.run(service.rng.choice([0.01, 0.1, 1.0]))
        dice, rng = service.rng.random(), service.rng
        if dice < 0.02:
            gate = rng.choice(service.gates)
            service.kill(gate)
            service.begin(gate.place)
        elif dice < 0.05:
            places = rng.sample(range(num), 2)
            service.cut ^= {frozenset(places)}
        gate = rng.choice(service.gates)
        service.act(gate)
        for each in service.gates:  # each keeps its own limits, whatever it hears
            assert each.in_flight("requests") <= MAX_REQUESTS
            assert each.in_flight("queued") <= MAX_QUEUED
    service.cut.clear()
    service.loss = 0.0
    for gate in service.gates:
        for request in list(gate.requests.values()):
            service.leave(gate, request, num_used=request.reserved)
    # The dead are forgotten; what all together spent above the rate comes in again.
    service.run(FORGET_S + SWEEP_S + (num + 1) * (BURST + RATE / 60 * FORGET_S) / (RATE / 60))
    for gate in service.gates:
        assert gate.admission.num_elsewhere == 0
        request = service.enter(gate, TENANT, MAX_QUEUED, BURST)
        assert request is not None
        service.leave(gate, request, num_used=0)
        service.run(1.0)


# ---------------------------------------------------------------- by hand


@pytest.fixture
def two() -> Service:
    """Two gateways that have met, on a network without delay."""
    service = Service(1, 2, delay_s=0.0, loss=0.0)
    service.run(0.1)
    return service


def fill(service: Service, gate: Gate, num: int, num_tokens: int = 0) -> list[Request]:
    made = []
    for _ in range(num):
        request = service.enter(gate, TENANT, 1, num_tokens)
        assert request is not None
        gate.quotas.started(request.key)
        made.append(request)
    return made


def test_one_tenants_limit_holds_for_both_and_comes_free_at_either(two: Service) -> None:
    one, other = two.gates
    held = fill(two, one, MAX_REQUESTS - 1)
    two.run(2 * GAP_S)
    assert len(fill(two, other, 1)) == 1
    two.run(2 * GAP_S)
    for gate in (one, other):
        with pytest.raises(TenantLimit, match=f"{MAX_REQUESTS} outputs are in flight"):
            gate.quotas.enter("t\nmore", TENANT, two.now_ns)
    two.leave(one, held[0], num_used=0)
    two.run(2 * GAP_S)
    fill(two, other, 1)


def test_what_a_dead_gateway_had_in_flight_is_free_after_its_silence(two: Service) -> None:
    one, other = two.gates
    fill(two, one, MAX_REQUESTS)
    two.run(2 * GAP_S)
    two.kill(one)
    two.run(FORGET_S - SWEEP_S)
    assert two.enter(other, TENANT, 1, 0) is None
    two.run(2 * SWEEP_S)
    fill(two, other, MAX_REQUESTS)


def test_a_gateway_that_takes_its_leave_frees_at_once_and_what_is_late_of_it_changes_nothing(two: Service) -> None:
    one, other = two.gates
    fill(two, one, MAX_REQUESTS)
    (late,) = one.limits.tell(two.now_ns, is_sweep=True)
    other.limits.hear(one.limits.farewell(), two.now_ns)
    other.limits.hear(late, two.now_ns)
    fill(two, other, MAX_REQUESTS)


def test_tokens_spent_elsewhere_are_missing_here_and_unused_ones_come_back(two: Service) -> None:
    one, other = two.gates
    (held,) = fill(two, one, 1, BURST)
    two.run(2 * GAP_S)
    other.quotas.enter("t\nx", TENANT, two.now_ns)
    with pytest.raises(TenantLimit) as caught:
        other.quotas.reserve("t\nx", 10, two.now_ns)
    assert caught.value.retry_after_ms == pytest.approx(500, abs=60)  # 10 of 20 a second
    two.leave(one, held, num_used=BURST - 30)
    two.run(2 * GAP_S)
    other.quotas.reserve("t\nx", 30, two.now_ns)


def test_what_two_spent_at_once_is_owed_and_the_rate_holds_in_the_end(two: Service) -> None:
    for gate in two.gates:
        fill(two, gate, 1, BURST)  # neither knows of the other
    two.run(2 * GAP_S)
    for gate in two.gates:
        assert gate.quotas.uses(["t"], two.now_ns)[0].num_lacking == pytest.approx(2 * BURST, abs=2)


def test_a_gateway_that_starts_takes_over_how_empty_the_bucket_is_and_counts_it_once() -> None:
    service = Service(1, 3, delay_s=0.0, loss=0.0)
    service.run(0.1)
    fill(service, service.gates[0], 1, 20)
    fill(service, service.gates[1], 1, 20)
    service.run(2 * GAP_S)
    late = service.begin(3)
    service.run(SWEEP_S + GAP_S)
    late.quotas.enter("t\nx", TENANT, service.now_ns)
    with pytest.raises(TenantLimit) as caught:
        late.quotas.reserve("t\nx", BURST, service.now_ns)
    passed_s = service.now_s - 0.1
    assert caught.value.retry_after_ms == pytest.approx(1000 * (40 / 20 - passed_s), abs=100)


def test_after_an_hour_apart_nobody_owes_more_than_a_bucket(two: Service) -> None:
    one, other = two.gates
    two.cut = {frozenset((0, 1))}
    for _ in range(600):
        two.run(6.0)
        for gate in two.gates:
            (held,) = fill(two, gate, 1, BURST)
            two.leave(gate, held, num_used=BURST)
    two.cut.clear()
    two.run(SWEEP_S + GAP_S)
    for gate in (one, other):
        assert gate.quotas.uses(["t"], two.now_ns)[0].num_lacking <= BURST


def test_a_change_before_the_first_sweep_and_a_message_of_oneself_say_nothing(two: Service) -> None:
    one, _ = two.gates
    use = TenantUse(name="t", num_in_flight=MAX_REQUESTS)
    stranger = PeerUse(call_id=0, gateway_id="x", number=1, tenants=(use,), num_outputs=99)
    assert not one.limits.hear(stranger, two.now_ns)
    assert not one.limits.hear(PeerUse(call_id=0, gateway_id=one.gateway_id, number=99, is_sweep=True), two.now_ns)
    fill(two, one, MAX_REQUESTS)


def test_the_service_holds_no_more_than_it_may_and_a_request_that_never_fits_is_told_so(two: Service) -> None:
    one, other = two.gates
    for n in range(MAX_SERVICE):
        one.admission.enter(f"a{n}")
    two.run(2 * GAP_S)
    with pytest.raises(QueueFull, match=f"{MAX_SERVICE} outputs are in flight at all gateways"):
        other.admission.enter("b")
    with pytest.raises(ExceedsCapacity, match="this service holds 9 at most"):
        other.admission.enter("b", num_outputs=MAX_SERVICE + 1)
    one.admission.leave("a0")
    two.run(2 * GAP_S)
    other.admission.enter("b")


def test_more_tenants_than_a_message_holds_are_told_in_parts(two: Service, monkeypatch: Any) -> None:
    from octavo.gateway.peers import limits

    monkeypatch.setattr(limits, "MAX_ROWS", 2)
    one, other = two.gates
    for name in "abcde":
        who = Caller(name=name, tenant=name, scopes=frozenset(), limits=TenantLimits(max_requests=1))
        one.quotas.enter(f"{name}\nr", who, two.now_ns)
    assert len(one.limits.tell(two.now_ns, is_sweep=True)) == 3
    one.quotas.changed |= set("abcde")
    two.run(SWEEP_S + GAP_S)
    for name in "abcde":
        who = Caller(name=name, tenant=name, scopes=frozenset(), limits=TenantLimits(max_requests=1))
        with pytest.raises(TenantLimit):
            other.quotas.enter(f"{name}\nr2", who, two.now_ns)


def test_what_was_told_once_and_not_again_is_not_believed_for_ever(two: Service) -> None:
    """The message that a request had ended was lost, and sweeps leave out who uses nothing."""
    one, other = two.gates
    held = fill(two, one, MAX_REQUESTS)
    two.run(2 * GAP_S)
    two.loss = 1.0
    for each in held:
        two.leave(one, each, num_used=0)
    two.run(2 * GAP_S)
    two.loss = 0.0
    two.run(FORGET_S + 2 * SWEEP_S)
    fill(two, other, MAX_REQUESTS)


def test_tenants_without_limits_cost_no_messages(two: Service) -> None:
    one, _ = two.gates
    one.quotas.changed.clear()
    one.quotas.enter("u\nr", Caller(name="u", tenant="u", scopes=frozenset()), two.now_ns)
    assert (one.quotas.changed, one.quotas.uses(None, two.now_ns)) == (set(), [])
