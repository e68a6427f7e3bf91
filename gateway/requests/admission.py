"""How much this gateway holds, and how much each tenant may. Limits count outputs: a request for eight counts eight
times, until the last of them has ended.

    Admission:     enter ──► place ──► leave
    TenantQuotas:  enter ──► (in flight, queued) ──► reserve ──► started (no longer queued) ──► leave

A request enters before it costs anything (tokenizing included), is placed on a worker and reserves its tokens when its
prompt is known, and leaves exactly once, however it ends; tokens that it did not use are refunded. Pure: no sockets,
and times are arguments.
"""

from collections import Counter
from dataclasses import dataclass

from octavo.gateway.auth.authenticator import Caller, TenantLimits, id_in
from octavo.gateway.errors import DuplicateRequest, ExceedsCapacity, QueueFull, TenantLimit

_UNITS_PER_TOKEN = 60_000_000_000  # one unit comes in per nanosecond and token a minute: whole numbers, no rounding
_NS_PER_MS = 1_000_000
MAX_KNOWN_PEERS = 16_384


class NotEnough(Exception):
    """A bucket is too empty. wait_ns: until it is full enough, None for never."""

    def __init__(self, wait_ns: int | None) -> None:
        super().__init__(wait_ns)
        self.wait_ns = wait_ns


class TokenBucket:
    """Fills by tokens_per_minute up to burst_tokens; starts full. Exact: an integer of 1/60e9 tokens."""

    def __init__(self, *, tokens_per_minute: int, burst_tokens: int, now_ns: int) -> None:
        self._rate = tokens_per_minute
        self._capacity = burst_tokens * _UNITS_PER_TOKEN
        self._level = self._capacity
        self._at_ns = now_ns

    def take(self, num_tokens: int, now_ns: int) -> None:
        """Raises NotEnough; then nothing was taken."""
        self._fill(now_ns)
        wanted = num_tokens * _UNITS_PER_TOKEN
        if wanted > self._capacity:
            raise NotEnough(None)
        if wanted > self._level:
            raise NotEnough(-(-(wanted - self._level) // self._rate))
        self._level -= wanted

    def give_back(self, num_tokens: int, now_ns: int) -> None:
        """Tokens that were taken and not used."""
        self._fill(now_ns)
        self._level = min(self._capacity, self._level + num_tokens * _UNITS_PER_TOKEN)

    def level(self, now_ns: int) -> int:
        """In units of 1/60e9 tokens."""
        self._fill(now_ns)
        return self._level

    def _fill(self, now_ns: int) -> None:
        passed_ns = max(0, now_ns - self._at_ns)
        self._level = min(self._capacity, self._level + passed_ns * self._rate)
        self._at_ns += passed_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantCounts:
    """Outputs. num_queued: of those in flight, not begun by a worker yet."""

    num_in_flight: int = 0
    num_queued: int = 0


@dataclass(slots=True, eq=False)
class _Tenant:
    name: str
    limits: TenantLimits
    bucket: TokenBucket | None
    num_in_flight: int = 0
    num_queued: int = 0


@dataclass(slots=True, eq=False)
class _Held:
    tenant: _Tenant
    num_outputs: int
    queued: set[int]  # by index
    bucket: TokenBucket | None = None  # the one that was reserved from
    reserved: int = 0


class TenantQuotas:
    """What each tenant has in flight, by the key of a request (`Caller.key_of`). Callers without a tenant are not
    counted."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._held: dict[str, _Held] = {}

    def enter(self, key: str, caller: Caller, now_ns: int, *, num_outputs: int = 1) -> None:
        """A new request, its key not in flight. Raises TenantLimit, ExceedsCapacity; then nothing has changed."""
        if caller.tenant is None:
            return
        limits = caller.limits
        for where, limit in (("in flight", limits.max_requests), ("queued", limits.max_queued)):
            if limit is not None and num_outputs > limit:
                raise ExceedsCapacity(f"{num_outputs} outputs are more than this tenant may ever have {where}")
        tenant = self._tenant(caller.tenant, limits, now_ns)
        _check("in flight", num_outputs, tenant.num_in_flight, limits.max_requests)
        _check("queued", num_outputs, tenant.num_queued, limits.max_queued)
        tenant.num_in_flight += num_outputs
        tenant.num_queued += num_outputs
        self._held[key] = _Held(tenant, num_outputs, set(range(num_outputs)))

    def reserve(self, key: str, num_tokens: int, now_ns: int) -> None:
        """Prompt and max_tokens of every output of a request. A second time, for another worker, it costs nothing.
        Raises TenantLimit, ExceedsCapacity; then nothing has changed."""
        held = self._held.get(key)
        if held is None or held.bucket is not None or held.tenant.bucket is None:
            return
        try:
            held.tenant.bucket.take(num_tokens, now_ns)
        except NotEnough as error:
            if error.wait_ns is None:
                raise ExceedsCapacity(f"{num_tokens} tokens are more than this tenant may ever ask for") from None
            wait_ms = -(-error.wait_ns // _NS_PER_MS)
            raise TenantLimit(f"{num_tokens} tokens are too many now for this tenant", retry_after_ms=wait_ms) from None
        held.bucket, held.reserved = held.tenant.bucket, num_tokens

    def started(self, key: str, output_index: int = 0) -> None:
        """A worker has begun this output. Idempotent."""
        held = self._held.get(key)
        if held is not None and output_index in held.queued:
            held.queued.remove(output_index)
            held.tenant.num_queued -= 1

    def leave(self, key: str, *, num_used: int, now_ns: int) -> None:
        """The request ended after so many tokens, prompt included. Idempotent."""
        held = self._held.pop(key, None)
        if held is None:
            return
        if held.bucket is not None:
            held.bucket.give_back(max(0, held.reserved - num_used), now_ns)
        tenant = held.tenant
        tenant.num_in_flight -= held.num_outputs
        tenant.num_queued -= len(held.queued)
        if not tenant.num_in_flight and tenant.bucket is None:
            self._tenants.pop(tenant.name, None)

    def counts(self, tenant: str) -> TenantCounts:
        """Now."""
        found = self._tenants.get(tenant)
        if found is None:
            return TenantCounts()
        return TenantCounts(num_in_flight=found.num_in_flight, num_queued=found.num_queued)

    def _tenant(self, name: str, limits: TenantLimits, now_ns: int) -> _Tenant:
        """The tenant's counts; where its limits have changed, with a new bucket."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(name, limits, _bucket(limits, now_ns))
        elif tenant.limits != limits:
            tenant.limits, tenant.bucket = limits, _bucket(limits, now_ns)
        return tenant


def _bucket(limits: TenantLimits, now_ns: int) -> TokenBucket | None:
    rate = limits.tokens_per_minute
    if rate is None:
        return None
    return TokenBucket(tokens_per_minute=rate, burst_tokens=limits.burst_tokens or rate, now_ns=now_ns)


def _check(where: str, num_new: int, count: int, limit: int | None) -> None:
    if limit is not None and count + num_new > limit:
        raise TenantLimit(f"{count} outputs are {where}, the limit of this tenant is {limit}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionCounts:
    """num_entered: requests in flight; num_outputs: of them; num_placed: outputs that a worker has."""

    num_entered: int
    num_outputs: int
    num_placed: int


class Admission:
    """What all requests have in flight. An id is what distinguishes requests (`Caller.key_of`). A call that raises has
    changed nothing."""

    def __init__(self, *, max_requests: int) -> None:
        """max_requests: outputs in flight."""
        self._max_requests = max_requests
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
        self._workers_of[request_id] = [None] * num_outputs
        self._num_outputs += num_outputs

    def place(self, request_id: str, worker_id: str, *, max_on_worker: int) -> None:
        """Give all outputs of an entered request to a worker (again, after the first one left). Raises QueueFull; then
        nothing has changed; LookupError for an id that did not enter."""
        former = self._workers_of[request_id]
        on_worker = self._placed[worker_id] - former.count(worker_id)
        if on_worker + len(former) > max_on_worker:
            raise QueueFull(f"worker {worker_id} has {on_worker} outputs of this gateway, its limit")
        for index in range(len(former)):
            self._put(former, index, worker_id)

    def move(self, request_id: str, worker_id: str, output_index: int = 0) -> None:
        """Another worker has taken a placed output, whatever its limit: the pool has seen to that. Nothing for an id
        that is not in flight."""
        places = self._workers_of.get(request_id)
        if places is not None:
            self._put(places, output_index, worker_id)

    def leave(self, request_id: str) -> None:
        """The request ended. Idempotent."""
        places = self._workers_of.pop(request_id, [])
        self._num_outputs -= len(places)
        for index in range(len(places)):
            self._put(places, index, None)

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
        """Of all requests in flight."""
        return tuple(self._workers_of)

    def counts(self) -> AdmissionCounts:
        """Now."""
        return AdmissionCounts(
            num_entered=len(self._workers_of), num_outputs=self._num_outputs, num_placed=self._placed.total()
        )

    def on_worker(self, worker_id: str) -> int:
        """Outputs that this worker has."""
        return self._placed.get(worker_id, 0)


class Peers:
    """Which peers have requests in flight, and in which order the others last had one. Peers as gRPC calls them."""

    def __init__(self) -> None:
        self._in_flight: Counter[str] = Counter()
        self._last_used: dict[str, None] = {}

    def begin(self, peer: str) -> None:
        """One of its requests enters."""
        self._in_flight[peer] += 1
        self._touch(peer)

    def end(self, peer: str) -> None:
        """One of its requests left."""
        self._in_flight[peer] -= 1
        if self._in_flight[peer] <= 0:
            del self._in_flight[peer]
        self._touch(peer)

    def busy(self) -> list[str]:
        """Those with requests in flight."""
        return list(self._in_flight)

    def used(self) -> list[str]:
        """Those that had one, the latest last."""
        return list(self._last_used)

    def _touch(self, peer: str) -> None:
        self._last_used.pop(peer, None)
        self._last_used[peer] = None
        if len(self._last_used) > MAX_KNOWN_PEERS:
            del self._last_used[next(iter(self._last_used))]
