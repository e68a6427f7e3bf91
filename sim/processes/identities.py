"""Callers with identities: a key for each tenant, its limits and weight, and an eye on its quota.

What a tenant holds is counted again from the tracker's own requests, and its tokens by fractions, never by what
`gateway.requests.admission` has counted itself: nobody may hold more than the quota, nobody may be refused below it.
"""

from fractions import Fraction
from typing import Any

from octavo.gateway.auth.authenticator import AccessList, Caller, KeyEntry, KeyRing, Scope, TenantLimits, digest_of
from octavo.gateway.errors import ExceedsCapacity, TenantLimit
from octavo.gateway.requests.admission import TenantQuotas
from octavo.gateway.requests.tracker import RequestTracker
from sim.journal import Journal
from sim.scenario import SimConfig, Tenant

UNLIMITED = Tenant(name="nobody in particular")  # callers without a tenant, where the others have one
_NS_PER_MINUTE = 60_000_000_000


def tenant_of(config: SimConfig, name: str) -> Tenant:
    """The tenant of a request by this name."""
    return next((tenant for tenant in config.tenants if tenant.name == name), UNLIMITED)


def metadata_of(config: SimConfig, name: str) -> tuple[tuple[str, str], ...]:
    """The metadata that a caller of this tenant sends."""
    return (("x-api-key", _key(tenant_of(config, name))),) if config.tenants else ()


def access_list_of(config: SimConfig) -> AccessList | None:
    """None: callers are not identified."""
    if not config.tenants:
        return None
    return AccessList(ring=KeyRing(map(_entry, (*config.tenants, UNLIMITED))))


def _key(tenant: Tenant) -> str:
    return f"the key of {tenant.name}"


def _entry(tenant: Tenant) -> KeyEntry:
    limits = TenantLimits(
        max_requests=tenant.max_requests,
        max_queued=tenant.max_queued,
        tokens_per_minute=tenant.tokens_per_minute,
        burst_tokens=tenant.burst_tokens,
    )
    caller = Caller(
        name=tenant.name,
        tenant=tenant.name,
        scopes=frozenset({Scope.GENERATE}),
        limits=limits,
        weight=tenant.weight,
    )
    return KeyEntry(digest=digest_of(_key(tenant)), caller=caller)


class WatchedQuotas(TenantQuotas):
    """The real quotas, checked against a recount. tracker: whose requests are counted."""

    def __init__(self, tracker: RequestTracker, journal: Journal) -> None:
        super().__init__()
        self._tracker, self._journal = tracker, journal
        self._sizes: dict[str, int] = {}  # outputs of the requests that were let in
        self._levels: dict[str, tuple[Fraction, int]] = {}  # tokens, at which time
        self._reserved: dict[str, tuple[str, TenantLimits, int]] = {}

    def enter(self, key: str, caller: Caller, now_ns: int, *, num_outputs: int = 1) -> None:
        """Must refuse exactly if the quota would be exceeded."""
        held, queued = self._recount(str(caller.tenant), key)
        limits = caller.limits
        is_over = _is_over(held + num_outputs, limits.max_requests) or _is_over(queued + num_outputs, limits.max_queued)
        try:
            super().enter(key, caller, now_ns, num_outputs=num_outputs)
        except (TenantLimit, ExceedsCapacity) as error:
            self._check(is_over, f"{key!r} with {num_outputs} refused at {held} outputs, {queued} queued: {error}")
            raise
        self._sizes[key] = num_outputs
        self._check(not is_over, f"{key!r} with {num_outputs} let in above the quota: {held} outputs, {queued} queued")

    def reserve(self, key: str, num_tokens: int, now_ns: int) -> None:
        """Must refuse exactly if the bucket holds too little."""
        held = self._held.get(key)
        if held is None or held.tenant.limits.tokens_per_minute is None or key in self._reserved:
            super().reserve(key, num_tokens, now_ns)
            return
        tenant, limits = held.tenant.name, held.tenant.limits
        level = self._level(tenant, limits, now_ns)
        try:
            super().reserve(key, num_tokens, now_ns)
        except (TenantLimit, ExceedsCapacity) as error:
            self._check(num_tokens > level, f"{key!r}: {num_tokens} of {float(level)} tokens refused: {error}")
            raise
        self._check(num_tokens <= level, f"{key!r}: {num_tokens} of {float(level)} tokens given")
        self._levels[tenant] = (level - num_tokens, now_ns)
        self._reserved[key] = (tenant, limits, num_tokens)

    def leave(self, key: str, *, num_used: int, now_ns: int) -> None:
        """Must return what was not used."""
        super().leave(key, num_used=num_used, now_ns=now_ns)
        self._sizes.pop(key, None)
        if (reserved := self._reserved.pop(key, None)) is not None:
            tenant, limits, num_tokens = reserved
            level = self._level(tenant, limits, now_ns) + max(0, num_tokens - num_used)
            self._levels[tenant] = (min(_burst(limits), level), now_ns)

    def check_quiet(self, name: str) -> None:
        """With nothing in flight, no tenant may hold anything."""
        counts = {tenant: self.counts(tenant) for tenant in self._tenants}
        is_empty = not any(each.num_in_flight or each.num_queued for each in counts.values()) and not self._held
        self._check(is_empty, f"{name}: quotas still hold {counts}")

    def _recount(self, tenant: str, without: str) -> tuple[int, int]:
        """(outputs of a tenant in flight, how many of these are not begun), from its requests."""
        held = queued = 0
        for tracked in self._tracker:
            if tracked.scope.key.startswith(f"{tenant}\n"):
                held += len(tracked.streams)
                queued += sum(not stream.scheduled_s for stream in tracked.streams)
        for key in self._tracker._preparing:
            if key.startswith(f"{tenant}\n") and key != without and self._tracker.get(key) is None:
                held += self._sizes.get(key, 0)
                queued += self._sizes.get(key, 0)
        return held, queued

    def _level(self, tenant: str, limits: TenantLimits, now_ns: int) -> Fraction:
        level, at_ns = self._levels.get(tenant, (_burst(limits), now_ns))
        passed = Fraction((now_ns - at_ns) * (limits.tokens_per_minute or 0), _NS_PER_MINUTE)
        return min(_burst(limits), level + passed)

    def _check(self, is_true: Any, what: str) -> None:
        self._journal.counts["checks"] += 1
        if not is_true:
            self._journal.violate(f"quota: {what}")


def _burst(limits: TenantLimits) -> Fraction:
    return Fraction(limits.burst_tokens or limits.tokens_per_minute or 0)


def _is_over(count: int, limit: int | None) -> bool:
    return limit is not None and count > limit
