"""Limits that gateways share, in a simulation: what is overshot is what was not told yet, and nothing is refused for
ever."""

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.gateway.peers.limits import FORGET_S, GAP_S, SNAPSHOT_S
from tests.support.gateway.sharing import (
    BURST,
    KINDS,
    MAX_QUEUED,
    MAX_REQUESTS,
    MAX_SERVICE,
    RATE,
    TENANT,
    Gate,
    Service,
    unseen,
)

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
    service.run(FORGET_S + SNAPSHOT_S + (num + 1) * (BURST + RATE / 60 * FORGET_S) / (RATE / 60))
    for gate in service.gates:
        assert gate.admission.num_elsewhere == 0
        request = service.enter(gate, TENANT, MAX_QUEUED, BURST)
        assert request is not None
        service.leave(gate, request, num_used=0)
        service.run(1.0)
