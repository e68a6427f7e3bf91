"""How much this gateway holds, and how much each tenant may. Limits count outputs: a request for eight counts eight
times, until the last of them has ended.

    Admission:     enter ──► place ──► leave
    TenantQuotas:  enter ──► (in flight, queued) ──► reserve ──► started (no longer queued) ──► leave

A request enters before it costs anything (tokenizing included), is placed on a worker and reserves its tokens when its
prompt is known, and leaves exactly once, however it ends; tokens that it did not use are refunded. What the other
gateways of the service reported counts too: limits are exact for what is here, and eventually consistent for what is
elsewhere (see `gateway.peers.limits`). Pure: no sockets, and times are arguments.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from octavo.gateway.auth.authenticator import Caller, TenantLimits, id_in
from octavo.gateway.errors import DuplicateRequest, ExceedsCapacity, QueueFull, TenantLimit
from octavo.gateway.requests.token_bucket import NotEnough, TokenBucket
from octavo.wire.peer_messages import TenantUse

_NS_PER_MS = 1_000_000
MAX_KNOWN_CONNECTIONS = 16_384
_UNLIMITED = TenantLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantCounts:
    """Outputs of one tenant. num_queued: those in flight that no worker has begun."""

    num_in_flight: int = 0
    num_queued: int = 0


@dataclass(slots=True, eq=False)
class _Tenant:
    name: str
    limits: TenantLimits
    bucket: TokenBucket | None
    num_in_flight: int = 0
    num_queued: int = 0
    num_spent: int = 0  # tokens reserved less those given back, here
    num_spent_before: int = 0  # the same when the bucket was full for the last time


@dataclass(frozen=True, slots=True)
class _PeerTenantUse:
    use: TenantUse
    at_ns: int


@dataclass(slots=True, eq=False)
class _Held:
    tenant: _Tenant
    num_outputs: int
    queued: set[int]  # by index
    bucket: TokenBucket | None = None  # the one that was reserved from
    reserved: int = 0


class TenantQuotas:
    """What each tenant has in flight, by request key (`Caller.key_of`). Callers without a tenant are not counted.
    on_change: called when the use of the tenants in `changed` has changed here."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._held: dict[str, _Held] = {}
        self._peer_uses: dict[str, dict[str, _PeerTenantUse]] = {}  # by tenant and gateway
        self.changed: set[str] = set()
        self.on_change: Callable[[], None] | None = None

    def enter(self, key: str, caller: Caller, now_ns: int, *, num_outputs: int = 1) -> None:
        """Admit a new request, whose key is not in flight. Raises TenantLimit, ExceedsCapacity; then nothing has
        changed."""
        if caller.tenant is None:
            return
        limits = caller.limits
        for where, limit in (("in flight", limits.max_requests), ("queued", limits.max_queued)):
            if limit is not None and num_outputs > limit:
                raise ExceedsCapacity(f"{num_outputs} outputs are more than this tenant may ever have {where}")
        tenant, reported = self._tenant(caller.tenant, limits, now_ns), self._peer_uses.get(caller.tenant, {}).values()
        num_in_flight = tenant.num_in_flight + sum(each.use.num_in_flight for each in reported)
        num_queued = tenant.num_queued + sum(each.use.num_queued for each in reported)
        _check("in flight", num_outputs, num_in_flight, limits.max_requests)
        _check("queued", num_outputs, num_queued, limits.max_queued)
        tenant.num_in_flight += num_outputs
        tenant.num_queued += num_outputs
        self._held[key] = _Held(tenant, num_outputs, set(range(num_outputs)))
        self._note(tenant)

    def reserve(self, key: str, num_tokens: int, now_ns: int) -> None:
        """Reserve the prompt and max_tokens of every output. Reserving again, for another worker, costs nothing. Raises
        TenantLimit, ExceedsCapacity; then nothing has changed."""
        held = self._held.get(key)
        if held is None or held.bucket is not None or held.tenant.bucket is None:
            return
        tenant, bucket = held.tenant, held.tenant.bucket
        was_full = not bucket.lacking(now_ns)
        try:
            bucket.take(num_tokens, now_ns)
        except NotEnough as error:
            if error.wait_ns is None:
                raise ExceedsCapacity(f"{num_tokens} tokens are more than this tenant may ever ask for") from None
            wait_ms = -(-error.wait_ns // _NS_PER_MS)
            raise TenantLimit(f"{num_tokens} tokens are too many now for this tenant", retry_after_ms=wait_ms) from None
        held.bucket, held.reserved = bucket, num_tokens
        if was_full:
            tenant.num_spent_before = tenant.num_spent
        tenant.num_spent += num_tokens
        self._note(tenant)

    def started(self, key: str, output_index: int = 0) -> None:
        """A worker has begun this output. Idempotent."""
        held = self._held.get(key)
        if held is not None and output_index in held.queued:
            held.queued.remove(output_index)
            held.tenant.num_queued -= 1
            self._note(held.tenant)

    def leave(self, key: str, *, num_used: int, now_ns: int) -> None:
        """The request ended after this many tokens, prompt included. Idempotent."""
        held = self._held.pop(key, None)
        if held is None:
            return
        tenant = held.tenant
        if held.bucket is not None:
            num_unused = max(0, held.reserved - num_used)
            held.bucket.give_back(num_unused, now_ns)
            tenant.num_spent -= num_unused
        tenant.num_in_flight -= held.num_outputs
        tenant.num_queued -= len(held.queued)
        if not tenant.num_in_flight and tenant.bucket is None and not tenant.num_spent:
            self._tenants.pop(tenant.name, None)
        self._note(tenant)

    # ------------------------------------------------------------ the other gateways

    def uses(self, names: Iterable[str] | None, now_ns: int) -> list[TenantUse]:
        """What these tenants use at this gateway, as reports to the others; None: every tenant that has limits and uses
        anything."""
        found = []
        for name in tuple(self._tenants) if names is None else names:
            tenant = self._tenants.get(name) or _Tenant(name, _UNLIMITED, None)
            num_lacking = 0 if tenant.bucket is None else tenant.bucket.lacking(now_ns)
            if names is not None or (tenant.limits != _UNLIMITED and (tenant.num_in_flight or num_lacking)):
                rate, burst = _rate_and_burst(tenant.limits)
                use = TenantUse(
                    name=name,
                    num_in_flight=tenant.num_in_flight,
                    num_queued=tenant.num_queued,
                    num_spent=tenant.num_spent,
                    num_spent_before=tenant.num_spent_before,
                    num_lacking=num_lacking,
                    tokens_per_minute=rate,
                    burst_tokens=burst,
                )
                found.append(use)
        return found

    def on_peer_use(self, gateway_id: str, use: TenantUse, now_ns: int, *, is_first: bool) -> None:
        """Another gateway reported a tenant's use. is_first: it may have used more before the two gateways met."""
        reported = self._peer_uses.setdefault(use.name, {})
        former, reported[gateway_id] = reported.get(gateway_id), _PeerTenantUse(use, now_ns)
        tenant = self._tenants.get(use.name)
        if tenant is None and use.tokens_per_minute:
            limits = TenantLimits(tokens_per_minute=use.tokens_per_minute, burst_tokens=use.burst_tokens)
            tenant = self._tenant(use.name, limits, now_ns)
        if tenant is None or tenant.bucket is None:
            return
        if former is not None:
            since = former.use.num_spent
            if former.use.num_spent_before != use.num_spent_before:  # its bucket has been full meanwhile
                since = min(since, use.num_spent_before)
            tenant.bucket.charge(use.num_spent - since, now_ns)
        elif is_first:  # its bucket has what we and others spent in it
            tenant.bucket.empty_to(use.num_lacking, now_ns)
        else:
            tenant.bucket.charge(use.num_spent - use.num_spent_before, now_ns)

    def forget_peer(self, gateway_id: str, *, before_ns: int | None = None) -> None:
        """Drop what another gateway had in flight. before_ns: only what it last reported before then. Tokens it spent
        stay spent until the bucket has refilled."""
        for name, reported in tuple(self._peer_uses.items()):
            each = reported.get(gateway_id)
            if each is not None and before_ns is None:
                del reported[gateway_id]
            elif each is not None and each.use.num_in_flight and before_ns is not None and each.at_ns < before_ns:
                use = TenantUse(name=name, num_spent=each.use.num_spent, num_spent_before=each.use.num_spent_before)
                reported[gateway_id] = _PeerTenantUse(use, each.at_ns)
            if not reported:
                del self._peer_uses[name]

    def _note(self, tenant: _Tenant) -> None:
        if self.on_change is not None and tenant.limits != _UNLIMITED:
            self.changed.add(tenant.name)
            self.on_change()

    def counts(self, tenant: str) -> TenantCounts:
        """The tenant's outputs at this gateway."""
        found = self._tenants.get(tenant)
        if found is None:
            return TenantCounts()
        return TenantCounts(num_in_flight=found.num_in_flight, num_queued=found.num_queued)

    def _tenant(self, name: str, limits: TenantLimits, now_ns: int) -> _Tenant:
        """The tenant's counts. A changed rate gets a new bucket."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(name, limits, _bucket(limits, now_ns))
        elif tenant.limits != limits:
            if _rate_and_burst(tenant.limits) != _rate_and_burst(limits):
                tenant.bucket = _bucket(limits, now_ns)
            tenant.limits = limits
        return tenant


def _rate_and_burst(limits: TenantLimits) -> tuple[int, int]:
    """(tokens per minute, burst); zeros if the tenant has no rate."""
    rate = limits.tokens_per_minute or 0
    return rate, limits.burst_tokens or rate


def _bucket(limits: TenantLimits, now_ns: int) -> TokenBucket | None:
    rate, burst = _rate_and_burst(limits)
    return TokenBucket(tokens_per_minute=rate, burst_tokens=burst, now_ns=now_ns) if rate else None


def _check(where: str, num_new: int, count: int, limit: int | None) -> None:
    if limit is not None and count + num_new > limit:
        raise TenantLimit(f"{count} outputs are {where}, the limit of this tenant is {limit}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionCounts:
    """num_entered: requests in flight. num_outputs: their outputs. num_placed: outputs that a worker has."""

    num_entered: int
    num_outputs: int
    num_placed: int


class Admission:
    """What all requests together have in flight. Requests are told apart by key (`Caller.key_of`). A call that raises
    has changed nothing."""

    def __init__(self, *, max_requests: int, max_service_requests: int | None = None) -> None:
        """max_requests: outputs in flight here. max_service_requests: outputs at all gateways of the service; None: no
        limit."""
        self._max_requests = max_requests
        self._max_service_requests = max_service_requests
        self.num_elsewhere = 0  # outputs that the other gateways have reported
        self.on_change: Callable[[], None] | None = None  # is called when the number of outputs has changed here
        self._num_outputs = 0
        self._workers_of: dict[str, list[str | None]] = {}  # one place an output
        self._placed: Counter[str] = Counter()

    def enter(self, request_id: str, *, num_outputs: int = 1) -> None:
        """Raises DuplicateRequest, QueueFull, ExceedsCapacity; then nothing has changed."""
        if request_id in self._workers_of:
            raise DuplicateRequest(f"request id {id_in(request_id)!r} is in flight")
        if num_outputs > self._max_requests:
            raise ExceedsCapacity(f"{num_outputs} outputs; this gateway holds {self._max_requests} at most")
        if self._num_outputs + num_outputs > self._max_requests:
            raise QueueFull(f"{self._num_outputs} outputs are in flight, the limit of this gateway")
        if (limit := self._max_service_requests) is not None:
            if num_outputs > limit:
                raise ExceedsCapacity(f"{num_outputs} outputs; this service holds {limit} at most")
            if (count := self._num_outputs + self.num_elsewhere) + num_outputs > limit:
                raise QueueFull(f"{count} outputs are in flight at all gateways, the limit of the service is {limit}")
        self._workers_of[request_id] = [None] * num_outputs
        self._count(num_outputs)

    def place(self, request_id: str, worker_id: str, *, max_on_worker: int) -> None:
        """Assign all outputs of an entered request to a worker, or to another one if the first is gone. Raises
        QueueFull, and LookupError for a key that has not entered."""
        former = self._workers_of[request_id]
        on_worker = self._placed[worker_id] - former.count(worker_id)
        if on_worker + len(former) > max_on_worker:
            raise QueueFull(f"worker {worker_id} has {on_worker} outputs of this gateway, its limit")
        for index in range(len(former)):
            self._put(former, index, worker_id)

    def move(self, request_id: str, worker_id: str, output_index: int = 0) -> None:
        """Another worker has taken a placed output. No limit applies: the pool has checked. Does nothing for a key that
        is not in flight."""
        places = self._workers_of.get(request_id)
        if places is not None:
            self._put(places, output_index, worker_id)

    def leave(self, request_id: str) -> None:
        """The request ended. Idempotent."""
        places = self._workers_of.pop(request_id, [])
        self._count(-len(places))
        for index in range(len(places)):
            self._put(places, index, None)

    def _count(self, num_more: int) -> None:
        self._num_outputs += num_more
        if self._max_service_requests is not None and self.on_change is not None:
            self.on_change()

    def _put(self, places: list[str | None], index: int, worker_id: str | None) -> None:
        former, places[index] = places[index], worker_id
        if worker_id is not None:
            self._placed[worker_id] += 1
        if former is not None:
            self._placed[former] -= 1
            if not self._placed[former]:
                del self._placed[former]

    def holds(self, request_id: str) -> bool:
        """Whether the request is in flight."""
        return request_id in self._workers_of

    def request_ids(self) -> tuple[str, ...]:
        """Keys of all requests in flight."""
        return tuple(self._workers_of)

    def counts(self) -> AdmissionCounts:
        """The counts now."""
        return AdmissionCounts(
            num_entered=len(self._workers_of), num_outputs=self._num_outputs, num_placed=self._placed.total()
        )

    def on_worker(self, worker_id: str) -> int:
        """How many outputs this worker has."""
        return self._placed.get(worker_id, 0)


class ConnectionsInUse:
    """Which connections have requests in flight, and in what order the others last had one. A connection is named by
    gRPC's name of its peer."""

    def __init__(self) -> None:
        self._in_flight: Counter[str] = Counter()
        self._last_used: dict[str, None] = {}

    def begin(self, peer: str) -> None:
        """One of the connection's requests enters."""
        self._in_flight[peer] += 1
        self._touch(peer)

    def end(self, peer: str) -> None:
        """One of the connection's requests left."""
        self._in_flight[peer] -= 1
        if self._in_flight[peer] <= 0:
            del self._in_flight[peer]
        self._touch(peer)

    def busy(self) -> list[str]:
        """Connections with requests in flight."""
        return list(self._in_flight)

    def used(self) -> list[str]:
        """Connections that have had a request, most recent last."""
        return list(self._last_used)

    def _touch(self, peer: str) -> None:
        self._last_used.pop(peer, None)
        self._last_used[peer] = None
        if len(self._last_used) > MAX_KNOWN_CONNECTIONS:
            del self._last_used[next(iter(self._last_used))]
