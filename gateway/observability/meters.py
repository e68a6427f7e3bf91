"""What the gateway counts: plain objects, touched only by the event loop, cheap enough for every message.

Knows nothing of how it is exported (`gateway.observability.metrics`).
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


def _bounds(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.replace("_", "").split()))


LATENCY_BUCKETS_S = _bounds(
    "0.001 0.0025 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0"
)
E2E_BUCKETS_S = _bounds(
    "0.01 0.025 0.05 0.1 0.3 0.5 0.8 1.0 1.5 2.0 2.5 5.0 10.0 15.0 20.0 30.0 40.0 50.0 60.0 120.0 240.0 480.0 960.0"
)
TOKEN_GAP_BUCKETS_S = _bounds(
    "0.0005 0.001 0.0015 0.002 0.003 0.005 0.0075 0.01 0.015 0.02 0.03 0.05 0.075 0.1 0.15 0.2 0.3 0.5 0.75 1.0 2.5"
)
TOKEN_COUNT_BUCKETS = _bounds("1 2 5 10 20 50 100 200 500 1_000 2_000 5_000 10_000 20_000 50_000 100_000")
OUTPUT_COUNT_BUCKETS = _bounds("1 2 5 10 20")
LAG_BUCKETS_S = _bounds("0.0005 0.001 0.0025 0.005 0.01 0.02 0.05 0.1 0.25 0.5 1.0 5.0")
PEER_LOSSES = ("gateway", "message", "answer")
"""Other gateways that fell silent; messages without a connection or room for them; questions without an answer."""


class Histogram:
    """Counts by bucket; `observe` costs well under a microsecond."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> list[tuple[str, int]]:
        """(upper bound, number of values up to it), as in the exposition format."""
        rows, seen = [], 0
        for bound, count in zip((*map(str, map(float, self.bounds)), "+Inf"), self.counts, strict=True):
            seen += count
            rows.append((bound, seen))
        return rows


def _latency() -> Histogram:
    return Histogram(LATENCY_BUCKETS_S)


@dataclass(slots=True, eq=False)
class ModelMeters:
    """Meters of one model."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    messages: int = 0  # Deltas sent
    started: int = 0
    finished: Counter[str] = field(default_factory=Counter)  # by finish reason: stop, length, tool_calls, deadline
    time_to_first_token: Histogram = field(default_factory=_latency)
    inter_token: Histogram = field(default_factory=lambda: Histogram(TOKEN_GAP_BUCKETS_S))
    queue: Histogram = field(default_factory=_latency)  # of a worker, as it says
    end_to_end: Histogram = field(default_factory=lambda: Histogram(E2E_BUCKETS_S))
    request_prompt_tokens: Histogram = field(default_factory=lambda: Histogram(TOKEN_COUNT_BUCKETS))
    request_generation_tokens: Histogram = field(default_factory=lambda: Histogram(TOKEN_COUNT_BUCKETS))
    request_max_generation_tokens: Histogram = field(default_factory=lambda: Histogram(TOKEN_COUNT_BUCKETS))
    request_params_n: Histogram = field(default_factory=lambda: Histogram(OUTPUT_COUNT_BUCKETS))
    request_params_max_tokens: Histogram = field(default_factory=lambda: Histogram(TOKEN_COUNT_BUCKETS))


@dataclass(slots=True, eq=False)
class TenantMeters:
    """Meters of one tenant."""

    prompt_tokens: int = 0
    generation_tokens: int = 0


MAX_TENANTS = 1000  # of which figures are kept; beyond it those that were seen first are forgotten


@dataclass(slots=True, eq=False)
class GatewayMeters:
    """Meters of one gateway process. rpcs: by (method, status code, reason), for methods that were called."""

    rpcs: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    called: set[str] = field(default_factory=set)  # methods; a call that has not ended counts already
    models: dict[str, ModelMeters] = field(default_factory=dict)
    tenants: dict[str, TenantMeters] = field(default_factory=dict)
    loop_lag: Histogram = field(default_factory=lambda: Histogram(LAG_BUCKETS_S))
    num_preparing: int = 0  # validated, not with a worker yet
    num_waiting: int = 0  # with a worker, not scheduled yet
    num_running: int = 0
    num_tokenizing: int = 0
    num_watchers: int = 0  # calls of WatchLoad and pages that are open
    token_interval_s: float = 0.0  # between rounds of messages; 0.0: tokens go out as they come
    is_draining: bool = False
    num_peers: int = 0  # other gateways of the service
    num_unreachable_peers: int = 0
    peer_news_age_s: float = 0.0  # age of the oldest report of use that counts
    peer_losses: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(PEER_LOSSES, 0))
    tenant_refusals: int = 0  # a tenant had reached its own limit

    def num_generated(self) -> int:
        """Tokens sent to callers, of all models."""
        return sum(meters.generation_tokens for meters in self.models.values())

    def of_model(self, name: str) -> ModelMeters:
        """name: a model that a worker serves, never a caller's text."""
        meters = self.models.get(name)
        if meters is None:
            meters = self.models[name] = ModelMeters()
        return meters

    def of_tenant(self, name: str) -> TenantMeters:
        """name: an authenticated tenant."""
        meters = self.tenants.get(name)
        if meters is None:
            while len(self.tenants) >= MAX_TENANTS:
                del self.tenants[next(iter(self.tenants))]
            meters = self.tenants[name] = TenantMeters()
        return meters
