"""Limits that gateways share, case by case."""

from typing import Any

import pytest

from octavo.gateway.auth.authenticator import Caller, TenantLimits
from octavo.gateway.errors import ExceedsCapacity, QueueFull, TenantLimit
from octavo.gateway.peers.limits import FORGET_S, GAP_S, SNAPSHOT_S
from octavo.gateway.requests.admission import TenantQuotas
from octavo.wire.peer_messages import PeerUse, TenantUse
from tests.support.gateway.sharing import BURST, MAX_REQUESTS, MAX_SERVICE, TENANT, Gate, Request, Service


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
    two.run(FORGET_S - SNAPSHOT_S)
    assert two.enter(other, TENANT, 1, 0) is None
    two.run(2 * SNAPSHOT_S)
    fill(two, other, MAX_REQUESTS)


def test_a_gateway_that_takes_its_leave_frees_at_once_and_what_is_late_of_it_changes_nothing(two: Service) -> None:
    one, other = two.gates
    fill(two, one, MAX_REQUESTS)
    (late,) = one.limits.take_snapshot(two.now_ns)
    other.limits.on_report(one.limits.farewell(), two.now_ns)
    other.limits.on_report(late, two.now_ns)
    fill(two, other, MAX_REQUESTS)


def test_what_was_spent_behind_a_refund_that_nobody_heard_of_is_charged_whole() -> None:
    quotas, minute_ns = TenantQuotas(), 60 * 10**9
    limits = TenantLimits(tokens_per_minute=100, burst_tokens=100)
    caller = Caller(name="t", tenant="t", scopes=frozenset(), limits=limits)
    spent = TenantUse(name="t", num_spent=100, num_lacking=100, tokens_per_minute=100, burst_tokens=100)
    quotas.on_peer_use("other", spent, 0, is_first=True)
    # 60 came back, the bucket was full again, and 50 were spent since.
    again = TenantUse(name="t", num_spent=90, num_spent_before=40, tokens_per_minute=100, burst_tokens=100)
    quotas.on_peer_use("other", again, minute_ns, is_first=False)
    quotas.enter("t\nr", caller, minute_ns)
    with pytest.raises(TenantLimit):
        quotas.reserve("t\nr", 51, minute_ns)
    quotas.reserve("t\nr", 50, minute_ns)


def test_a_gateway_that_took_its_leave_is_not_missed_and_one_that_died_is() -> None:
    for has_left in (True, False):
        service = Service(1, 2, delay_s=0.0, loss=0.0)
        service.run(0.1)
        one, other = service.gates
        assert len(other.limits.reporting_peers(service.now_ns)) == 1
        if has_left:
            other.limits.on_report(one.limits.farewell(), service.now_ns)
        later_ns = service.now_ns + round(FORGET_S * 2e9)
        assert len(other.limits.reporting_peers(later_ns)) == (0 if has_left else 1)
        assert other.limits.age_s(later_ns) == (0.0 if has_left else pytest.approx(2 * FORGET_S, abs=SNAPSHOT_S))
        assert len(other.limits.forget_silent(later_ns)) == (0 if has_left else 1)


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
    service.run(SNAPSHOT_S + GAP_S)
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
    two.run(SNAPSHOT_S + GAP_S)
    for gate in (one, other):
        assert gate.quotas.uses(["t"], two.now_ns)[0].num_lacking <= BURST


def test_a_change_before_the_first_snapshot_and_a_message_of_oneself_say_nothing(two: Service) -> None:
    one, _ = two.gates
    use = TenantUse(name="t", num_in_flight=MAX_REQUESTS)
    stranger = PeerUse(call_id=0, gateway_id="x", number=1, tenants=(use,), num_outputs=99)
    assert not one.limits.on_report(stranger, two.now_ns)
    assert not one.limits.on_report(
        PeerUse(call_id=0, gateway_id=one.gateway_id, number=99, is_snapshot=True), two.now_ns
    )
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
    assert len(one.limits.take_snapshot(two.now_ns)) == 3
    one.quotas.changed |= set("abcde")
    two.run(SNAPSHOT_S + GAP_S)
    for name in "abcde":
        who = Caller(name=name, tenant=name, scopes=frozenset(), limits=TenantLimits(max_requests=1))
        with pytest.raises(TenantLimit):
            other.quotas.enter(f"{name}\nr2", who, two.now_ns)


def test_what_was_told_once_and_not_again_is_not_believed_for_ever(two: Service) -> None:
    """The message that a request had ended was lost, and snapshots leave out who uses nothing."""
    one, other = two.gates
    held = fill(two, one, MAX_REQUESTS)
    two.run(2 * GAP_S)
    two.loss = 1.0
    for each in held:
        two.leave(one, each, num_used=0)
    two.run(2 * GAP_S)
    two.loss = 0.0
    two.run(FORGET_S + 2 * SNAPSHOT_S)
    fill(two, other, MAX_REQUESTS)


def test_tenants_without_limits_cost_no_messages(two: Service) -> None:
    one, _ = two.gates
    one.quotas.changed.clear()
    one.quotas.enter("u\nr", Caller(name="u", tenant="u", scopes=frozenset()), two.now_ns)
    assert (one.quotas.changed, one.quotas.uses(None, two.now_ns)) == (set(), [])
