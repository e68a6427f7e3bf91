"""What grammars cost, for /metrics. Labels come from closed sets."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from grammar.errors import Refusal
from worker.grammar_cache import GrammarCache

COMPILE_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
MASK_BUCKETS_S = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)


class GrammarMetrics:
    """Implements `worker.grammar_desk.GrammarObserver`."""

    def __init__(self, registry: CollectorRegistry, cache: GrammarCache) -> None:
        self._compile_s = Histogram(
            "octavo_grammar_compile_seconds", "Compiling one grammar", buckets=COMPILE_BUCKETS_S, registry=registry
        )
        self._mask_s = Histogram(
            "octavo_grammar_mask_seconds", "Filling the masks of one step", buckets=MASK_BUCKETS_S, registry=registry
        )
        self._masks = Counter("octavo_grammar_masks", "Masks filled, one per token", registry=registry)
        self._refused = Counter(
            "octavo_grammar_failures", "Grammars that could not be compiled", ["reason"], registry=registry
        )
        for refusal in Refusal:
            self._refused.labels(refusal.value)
        registry.register(CacheCollector(cache))

    def on_compiled(self, seconds: float) -> None:
        """From a compiling thread."""
        self._compile_s.observe(seconds)

    def on_masks(self, *, seconds: float, num_rows: int) -> None:
        """The masks of one step were filled."""
        self._mask_s.observe(seconds)
        self._masks.inc(num_rows)

    def on_refused(self, refusal: Refusal) -> None:
        """A request's grammar could not be compiled."""
        self._refused.labels(refusal.value).inc()


class CacheCollector(Collector):
    """Reads the cache when it is scraped."""

    def __init__(self, cache: GrammarCache) -> None:
        self._cache = cache

    def collect(self) -> Iterator[Metric]:
        """Size, hits and misses."""
        cache = self._cache
        yield GaugeMetricFamily("octavo_grammar_cache_entries", "Compiled grammars kept", value=len(cache))
        yield GaugeMetricFamily("octavo_grammar_cache_bytes", "What they take, estimated", value=cache.num_bytes)
        yield CounterMetricFamily("octavo_grammar_cache_hits", "Grammars found compiled", value=cache.num_hits)
        yield CounterMetricFamily(
            "octavo_grammar_cache_misses", "Grammars that had to be compiled", value=cache.num_misses
        )
