"""Tenants' limits against exact arithmetic and a recount."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.access.caller import ANYBODY, Caller, TenantLimits
from gateway.errors import ExceedsCapacity, TenantLimit
from gateway.quotas import NotEnough, TenantCounts, TenantQuotas, TokenBucket

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
        quotas.enter("c", ANYBODY, 0)
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


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["enter", "start", "leave", "reserve"]), st.sampled_from("abcd"), st.sampled_from("xy")),
    max_size=60,
)  # fmt: skip


@settings(max_examples=300)
@given(actions=ACTIONS)
def test_counts_are_what_a_recount_says(actions: list[tuple[str, str, str]]) -> None:
    quotas, shadow = TenantQuotas(), dict[str, tuple[str, bool]]()
    for action, request_id, tenant in actions:
        who = caller(tenant, max_requests=3, max_queued=2, tokens_per_minute=1, burst_tokens=3)
        key = who.key_of(request_id)
        rows = [row for row in shadow.values() if row[0] == tenant]
        if action == "enter" and key not in shadow:
            full = len(rows) >= 3 or sum(not is_started for _, is_started in rows) >= 2
            try:
                quotas.enter(key, who, 0)
                shadow[key] = (tenant, False)
                assert not full
            except TenantLimit:
                assert full
        elif action == "start":
            quotas.started(key)
            if key in shadow:
                shadow[key] = (tenant, True)
        elif action == "leave":
            quotas.leave(key, num_used=0, now_ns=0)
            shadow.pop(key, None)
        elif action == "reserve":
            quotas.reserve(key, 1, 0)
        for name in "xy":
            rows = [row for row in shadow.values() if row[0] == name]
            expected = TenantCounts(num_in_flight=len(rows), num_queued=sum(not is_started for _, is_started in rows))
            assert quotas.counts(name) == expected
