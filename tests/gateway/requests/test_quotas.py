"""Tenants' limits against exact arithmetic and a recount."""

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.gateway.auth.authenticator import UNIDENTIFIED, Caller, TenantLimits
from octavo.gateway.errors import ExceedsCapacity, TenantLimit
from octavo.gateway.requests.admission import TenantCounts, TenantQuotas
from octavo.gateway.requests.token_bucket import NotEnough, TokenBucket

MINUTE_NS = 60_000_000_000


def caller(tenant: str, **limits: int) -> Caller:
    return Caller(name="k", tenant=tenant, scopes=frozenset(), limits=TenantLimits(**limits))


STEPS = st.lists(
    st.tuples(st.sampled_from(["take", "give"]), st.integers(0, 60), st.integers(0, 10**11)), max_size=40
)  # fmt: skip


@settings(max_examples=300)
@given(rate=st.integers(1, 10**6), burst=st.integers(1, 50), steps=STEPS)
def test_a_bucket_is_exact(rate: int, burst: int, steps: list[tuple[str, int, int]]) -> None:
    """Against fractions of tokens: what is taken, what is refused, and how long to wait to the nanosecond."""
    bucket, level, now_ns = TokenBucket(tokens_per_minute=rate, burst_tokens=burst, now_ns=5), Fraction(burst), 5
    for action, num_tokens, passed_ns in steps:
        now_ns += passed_ns
        level = min(Fraction(burst), level + Fraction(passed_ns * rate, MINUTE_NS))
        if action == "give":
            bucket.give_back(num_tokens, now_ns)
            level = min(Fraction(burst), level + num_tokens)
        elif num_tokens <= level:
            bucket.take(num_tokens, now_ns)
            level -= num_tokens
        else:
            with pytest.raises(NotEnough) as caught:
                bucket.take(num_tokens, now_ns)
            wait = (num_tokens - level) * MINUTE_NS / rate
            assert caught.value.wait_ns == (None if num_tokens > burst else -(-wait.numerator // wait.denominator))
        assert Fraction(bucket.level(now_ns), MINUTE_NS) == level


def test_after_the_wait_that_was_told_there_is_enough_and_not_before() -> None:
    bucket = TokenBucket(tokens_per_minute=7, burst_tokens=10, now_ns=0)
    bucket.take(10, 0)
    with pytest.raises(NotEnough) as caught:
        bucket.take(3, 0)
    wait_ns = caught.value.wait_ns
    assert wait_ns is not None
    with pytest.raises(NotEnough):
        bucket.take(3, wait_ns - 1)
    bucket.take(3, wait_ns)


def test_a_clock_that_goes_back_gives_nothing() -> None:
    bucket = TokenBucket(tokens_per_minute=60, burst_tokens=10, now_ns=MINUTE_NS)
    bucket.take(10, MINUTE_NS)
    assert bucket.level(0) == 0
    assert bucket.level(MINUTE_NS) == 0


def test_a_request_that_can_never_fit_is_told_so_and_one_that_must_wait_how_long() -> None:
    quotas, tenant = TenantQuotas(), caller("t", tokens_per_minute=60, burst_tokens=10)
    for key in "ab":
        quotas.enter(key, tenant, 0)
    with pytest.raises(ExceedsCapacity):
        quotas.reserve("a", 11, 0)
    quotas.reserve("a", 10, 0)
    quotas.reserve("a", 10, 0)  # for a second worker: no second price
    with pytest.raises(TenantLimit) as caught:
        quotas.reserve("b", 4, 1_500_000_000)
    assert caught.value.retry_after_ms == 2500
    quotas.leave("a", num_used=7, now_ns=1_500_000_000)  # 1.5 came in, 3 come back
    quotas.reserve("b", 4, 1_500_000_000)


def test_tenants_do_not_feel_each_other_and_strangers_are_not_counted() -> None:
    quotas = TenantQuotas()
    quotas.enter("a", caller("one", max_requests=1), 0)
    quotas.enter("b", caller("two", max_requests=1), 0)
    for _ in range(3):
        quotas.enter("c", UNIDENTIFIED, 0)
        quotas.reserve("c", 10**9, 0)
    with pytest.raises(TenantLimit):
        quotas.enter("d", caller("one", max_requests=1), 0)
    assert [quotas.counts(name) for name in ("one", "two", "three")] == [
        TenantCounts(num_in_flight=1, num_queued=1), TenantCounts(num_in_flight=1, num_queued=1), TenantCounts(),
    ]  # fmt: skip


def test_a_queue_is_full_until_something_begins() -> None:
    quotas, tenant = TenantQuotas(), caller("t", max_queued=1)
    quotas.enter("a", tenant, 0)
    with pytest.raises(TenantLimit):
        quotas.enter("b", tenant, 0)
    quotas.started("a")
    quotas.enter("b", tenant, 0)
    assert quotas.counts("t") == TenantCounts(num_in_flight=2, num_queued=1)


def test_new_limits_are_in_force_at_the_next_request_and_old_ones_forgotten() -> None:
    quotas = TenantQuotas()
    quotas.enter("a", caller("t", max_requests=1, tokens_per_minute=5), 0)
    quotas.reserve("a", 5, 0)
    quotas.enter("b", caller("t", max_requests=2), 0)
    quotas.reserve("b", 10**6, 0)
    quotas.leave("a", num_used=0, now_ns=0)
    quotas.leave("b", num_used=0, now_ns=0)
    assert quotas._tenants == {}


def test_every_output_counts_and_a_request_that_can_never_fit_is_told_so() -> None:
    quotas, tenant = TenantQuotas(), caller("t", max_requests=8, max_queued=6)
    for num_outputs in (7, 9):
        with pytest.raises(ExceedsCapacity):
            quotas.enter("a", tenant, 0, num_outputs=num_outputs)
    quotas.enter("a", tenant, 0, num_outputs=5)
    with pytest.raises(TenantLimit):
        quotas.enter("b", tenant, 0, num_outputs=2)
    for index in (0, 0, 3):
        quotas.started("a", index)
    assert quotas.counts("t") == TenantCounts(num_in_flight=5, num_queued=3)
    quotas.enter("b", tenant, 0, num_outputs=3)
    assert quotas.counts("t") == TenantCounts(num_in_flight=8, num_queued=6)
    quotas.leave("a", num_used=0, now_ns=0)
    assert quotas.counts("t") == TenantCounts(num_in_flight=3, num_queued=3)


MAX_REQUESTS, MAX_QUEUED, BURST, RATE = 6, 4, 40, 120
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["enter", "enter", "start", "leave", "reserve"]),
        st.sampled_from("abcd"),
        st.sampled_from("xy"),
        st.integers(1, 7),
        st.integers(0, 10**10),
    ),
    max_size=80,
)  # fmt: skip


class Shadow:
    """The same by lists and fractions: [tenant, which outputs have begun, tokens reserved] of each request."""

    def __init__(self) -> None:
        self.held: dict[str, list[Any]] = {}
        self.levels = {name: Fraction(BURST) for name in "xy"}

    def rows(self, tenant: str) -> list[list[bool]]:
        return [begun for name, begun, _ in self.held.values() if name == tenant]

    def fits(self, tenant: str, num_outputs: int) -> bool:
        begun = [each for row in self.rows(tenant) for each in row]
        return len(begun) + num_outputs <= MAX_REQUESTS and begun.count(False) + num_outputs <= MAX_QUEUED

    def counts(self, tenant: str) -> TenantCounts:
        begun = [each for row in self.rows(tenant) for each in row]
        return TenantCounts(num_in_flight=len(begun), num_queued=begun.count(False))


@settings(max_examples=400)
@given(actions=ACTIONS)
def test_limits_and_tokens_are_what_exact_arithmetic_says(actions: list[tuple[str, str, str, int, int]]) -> None:
    """Never above a quota, and refused only where it would be; what was not used comes back whole."""
    quotas, shadow, now_ns = TenantQuotas(), Shadow(), 0
    for action, request_id, tenant, number, passed_ns in actions:
        now_ns += passed_ns
        for name, level in shadow.levels.items():
            shadow.levels[name] = min(Fraction(BURST), level + Fraction(passed_ns * RATE, MINUTE_NS))
        who = caller(
            tenant, max_requests=MAX_REQUESTS, max_queued=MAX_QUEUED, tokens_per_minute=RATE, burst_tokens=BURST
        )
        key = who.key_of(request_id)
        held = shadow.held.get(key)
        if action == "enter" and held is None:
            fits = shadow.fits(tenant, number)
            try:
                quotas.enter(key, who, now_ns, num_outputs=number)
                shadow.held[key] = [tenant, [False] * number, None]
                assert fits
            except ExceedsCapacity:
                assert number > MAX_QUEUED
            except TenantLimit:
                assert not fits
                assert number <= MAX_QUEUED
        elif action == "start":
            quotas.started(key, number - 1)
            if held is not None and number <= len(held[1]):
                held[1][number - 1] = True
        elif action == "leave":
            quotas.leave(key, num_used=number, now_ns=now_ns)
            if (left := shadow.held.pop(key, None)) is not None and left[2] is not None:
                shadow.levels[tenant] = min(Fraction(BURST), shadow.levels[tenant] + max(0, left[2] - number))
        elif action == "reserve" and held is not None and held[2] is None:
            num_tokens = 4 + number * len(held[1])
            try:
                quotas.reserve(key, num_tokens, now_ns)
                assert num_tokens <= shadow.levels[tenant]
                held[2] = num_tokens
                shadow.levels[tenant] -= num_tokens
            except ExceedsCapacity:
                assert num_tokens > BURST
            except TenantLimit:
                assert num_tokens > shadow.levels[tenant]
        for name in "xy":
            assert quotas.counts(name) == shadow.counts(name)
