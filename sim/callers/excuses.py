"""Whom a fault may hit: for each status, what in the scenario excuses it. What nothing excuses is a violation.

Knows the scenario, not how the service works.
"""

from collections import Counter

import msgspec

from sim.edges.rpc import Status
from sim.processes.identities import tenant_of
from sim.processes.runner import NAN_TOKEN, POISON_TOKEN
from sim.scenario import FaultKind, RequestSpec, Scenario, Tenant

_K = FaultKind
_TAKES_WORKERS_AWAY = {
    _K.CRASH,
    _K.CRASH_AT,
    _K.FREEZE,
    _K.HANG,
    _K.LIE,
    _K.DISCONNECT,
    _K.PARTITION,
    _K.LAG,
    _K.DRAIN_WORKER,
    _K.KILL_GATEWAY,
    _K.DRAIN_GATEWAY,
    _K.HANG_UP_AND_CRASH,
    _K.CRASH_WHEN,
    _K.DISCONNECT_WHEN,
    _K.RANK_DIES,
    _K.RANK_STOPS,
}
_ENDS_GROUPS = {
    _K.ENGINE_ERROR,
    _K.FAIL_STEP,
    _K.OUT_OF_MEMORY,
}  # a step that failed on one rank alone, for all they know
_DEATHS_OF_POISON = 3  # workers that an output has to be lost with before it is called so
_NEEDED: dict[str, set[FaultKind]] = {
    "WORKER_LOST": _TAKES_WORKERS_AWAY,
    "WORKER_STALLED": _TAKES_WORKERS_AWAY,
    "NO_WORKER": _TAKES_WORKERS_AWAY,
    "DRAINING": {_K.DRAIN_GATEWAY, _K.DRAIN_WORKER, _K.LIE, _K.HANG, _K.FREEZE, _K.PARTITION, _K.RANK_STOPS},
    "ENGINE_ERROR": {_K.ENGINE_ERROR, _K.FAIL_STEP},
    "OUT_OF_MEMORY": {_K.OUT_OF_MEMORY},
    "ABORTED": {_K.ABORT, _K.FAIL, _K.CANCEL_OUTPUT},
    "INTERNAL": {_K.LIE, _K.DEFECT},
}


class Excuses:
    """What one scenario excuses."""

    def __init__(self, scenario: Scenario) -> None:
        self._config = scenario.config
        self._kinds = {fault.kind for fault in scenario.faults}
        costly = _TAKES_WORKERS_AWAY | (_ENDS_GROUPS if self._config.num_ranks > 1 else set())
        self._num_losses = sum(fault.kind in costly for fault in scenario.faults)
        if self._config.num_ranks > 1 and self._kinds & _ENDS_GROUPS:
            self._kinds.add(_K.RANK_DIES)
        self._has_poison = any(POISON_TOKEN in spec.prompt for spec in scenario.requests)
        names = Counter(spec.request_id or f"r{spec.index}" for spec in scenario.requests)
        self._shared_names = {name for name, count in names.items() if count > 1}

    def problem(self, spec: RequestSpec, status: Status) -> str | None:
        """What is wrong with this status, or None if the scenario excuses it."""
        reason = str(status.trailers.get("x-error-reason", ""))
        if status.code == "OK" or self._is_excused(spec, status.code, reason):
            return None
        return f"{status.code} {reason} without a cause: {status.message}"

    def _is_excused(self, spec: RequestSpec, code: str, reason: str) -> bool:
        match reason or code:
            case "CANCELLED":
                return spec.cancel_after_s is not None or bool(self._kinds & {_K.HANG_UP, _K.HANG_UP_AND_CRASH})
            case "DEADLINE" | "DEADLINE_EXCEEDED":
                return spec.timeout_s is not None
            case "UNAVAILABLE":
                return bool(self._kinds & {_K.KILL_GATEWAY, _K.DRAIN_GATEWAY})
            case "QUEUE_FULL":
                return True
            case "NUMERICAL":
                return NAN_TOKEN in spec.prompt
            case "TENANT_LIMIT":
                return self._limits(spec) != Tenant(name="")
            case "EXCEEDS_CAPACITY":
                return len(spec.prompt) + max(1, spec.min_tokens) > self._room or self._is_above_quota(spec)
            case "SLOW_CONSUMER":
                is_slow = spec.pace_s or spec.stall_after or _K.STALL in self._kinds
                return bool(is_slow) or self._config.max_pending_tokens < 100
            case "DUPLICATE_REQUEST":
                return bool(spec.retries) or (spec.request_id or f"r{spec.index}") in self._shared_names
            case "POISONED":  # three deaths, by chance, look like it; no two do
                return self._has_poison or self._num_losses >= _DEATHS_OF_POISON
            case "WORKER_LOST" | "WORKER_STALLED" | "NO_WORKER" if self._has_poison:
                return True
        return bool(self._kinds & _NEEDED.get(reason, set()))

    def _limits(self, spec: RequestSpec) -> Tenant:
        """The limits of the request's tenant."""
        return msgspec.structs.replace(tenant_of(self._config, spec.tenant), name="", weight=1)

    def _is_above_quota(self, spec: RequestSpec) -> bool:
        """Whether it exceeds the quota however long it waits."""
        limits = self._limits(spec)
        num_tokens = len(spec.prompt) + spec.num_outputs * spec.max_tokens
        burst = limits.burst_tokens or limits.tokens_per_minute
        places = [limit for limit in (limits.max_requests, limits.max_queued) if limit is not None]
        return spec.num_outputs > min(places, default=spec.num_outputs) or (burst is not None and num_tokens > burst)

    @property
    def _room(self) -> int:
        return min(self._config.max_model_len, self._config.num_blocks * self._config.block_size)
