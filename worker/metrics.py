"""The worker's /metrics: names and meanings as the field knows them, under ``octavo_``.

Gauges and counters are read from the engine's snapshot at a scrape; a step costs four histogram updates and
an output that ends at most five, whatever the batch. Labels come from closed sets.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from octavo.wire.messages import Capacity, Finished, ModelCard, WireFinishReason
from octavo.wire.scrape_server import ScrapeServer, pages_of
from octavo.worker.engine.interfaces import EngineStats, LinkStats, Observer, StepReport
from octavo.worker.runners.rank_figures import RankFigures

STEP_BUCKETS_S = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0,
)  # fmt: skip
HOST_BUCKETS_S = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
REQUEST_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 600.0,
)  # fmt: skip
SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

# What a worker says of its own requests; anything else is counted as internal.
ERROR_REASONS = frozenset(
    (
        "INVALID_FIELD",
        "EXCEEDS_CAPACITY",
        "QUEUE_FULL",
        "DRAINING",
        "NUMERICAL",
        "ENGINE_ERROR",
        "OUT_OF_MEMORY",
        "DEADLINE",
        "CONSTRAINT",
        "INTERNAL",
    )
)


log = structlog.get_logger(__name__)

INTERVAL_S = 10.0


class BusyLog:
    """An Observer that wraps another: while there is work, it logs a line every INTERVAL_S with rates and current
    counts."""

    def __init__(
        self, inner: Observer, snapshot: Callable[[], EngineStats], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._inner = inner
        self._snapshot = snapshot
        self._clock = clock
        self._since_s = clock()
        self._former = EngineStats()

    def on_step(self, report: StepReport) -> None:
        """Pass it on; log a line if one is due."""
        self._inner.on_step(report)
        now_s = self._clock()
        if now_s - self._since_s >= INTERVAL_S:
            self._write(now_s)

    def on_finished(self, finished: Finished) -> None:
        """Pass it on."""
        self._inner.on_finished(finished)

    def _write(self, now_s: float) -> None:
        stats, former, elapsed_s = self._snapshot(), self._former, now_s - self._since_s
        queried = stats.num_queried_tokens - former.num_queried_tokens
        hits = stats.num_hit_tokens - former.num_hit_tokens
        log.info(
            "busy",
            prompt_tokens_per_s=round((stats.num_prefill_tokens - former.num_prefill_tokens) / elapsed_s, 1),
            generation_tokens_per_s=round((stats.num_generated_tokens - former.num_generated_tokens) / elapsed_s, 1),
            running=stats.num_running,
            waiting=stats.num_waiting,
            paused=stats.num_paused,
            kv_percent=round(100 * stats.num_active_blocks / max(stats.num_blocks, 1), 1),
            hit_percent=round(100 * hits / max(queried, 1), 1),
        )
        self._since_s, self._former = now_s, stats


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheInfo:
    """Further facts about the KV cache. dtype: as asked for, "auto" for the model's own. host_bytes: size of the second
    tier."""

    dtype: str = "auto"
    has_prefix_cache: bool = True
    host_bytes: int = 0
    is_host_pinned: bool = False


class StepMetrics:
    """Implements `worker.engine.interfaces.Observer` with histograms."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, buckets=buckets, registry=registry)

        self._step_s = histogram("octavo_step_time_seconds", "Launch to collected, per engine step", STEP_BUCKETS_S)
        self._host_s = histogram("octavo_step_host_time_seconds", "Host work after a step's result", HOST_BUCKETS_S)
        self._tokens = histogram("octavo_iteration_tokens", "Tokens through the model per step", SIZE_BUCKETS)
        self._sampled = histogram("octavo_iteration_requests", "Requests that got a token, per step", SIZE_BUCKETS)
        self._queue_s = histogram("octavo_request_queue_time_seconds", "In the worker's queue", REQUEST_BUCKETS_S)
        self._prefill_s = histogram(
            "octavo_request_prefill_time_seconds", "First scheduled step to first token", REQUEST_BUCKETS_S
        )
        self._decode_s = histogram("octavo_request_decode_time_seconds", "First to last token", REQUEST_BUCKETS_S)
        self._inference_s = histogram(
            "octavo_request_inference_time_seconds", "First scheduled step to last token", REQUEST_BUCKETS_S
        )
        self._token_s = histogram(
            "octavo_request_time_per_output_token_seconds",
            "Mean time of the tokens behind the first, per output that has several",
            STEP_BUCKETS_S,
        )
        self._failed = Counter("octavo_step_failures", "Engine steps that ended with an error", registry=registry)
        self._finished = Counter(
            "octavo_request_finished", "Outputs ended, by reason", ["finished_reason"], registry=registry
        )
        self._errors = Counter("octavo_request_errors", "Outputs ended by an error", ["reason"], registry=registry)
        self._prompt_tokens = Counter("octavo_prompt_tokens", "Prompt tokens of ended outputs", registry=registry)
        for reason in WireFinishReason:
            self._finished.labels(reason.name.lower())
        for error in sorted(ERROR_REASONS):
            self._errors.labels(error.lower())

    def on_step(self, report: StepReport) -> None:
        """A step ended."""
        self._step_s.observe(report.step_s)
        self._host_s.observe(report.host_s)
        self._tokens.observe(report.num_prefill_tokens + report.num_decode_tokens)
        self._sampled.observe(report.num_sampled)
        if report.failed:
            self._failed.inc()

    def on_finished(self, finished: Finished) -> None:
        """An output ended."""
        self._finished.labels(finished.reason.name.lower()).inc()
        if finished.reason is WireFinishReason.ERROR:
            error = finished.error if finished.error in ERROR_REASONS else "INTERNAL"
            self._errors.labels(error.lower()).inc()
            return
        self._prompt_tokens.inc(finished.prompt_tokens)
        self._queue_s.observe(finished.queue_s)
        self._prefill_s.observe(finished.prefill_s)
        self._decode_s.observe(finished.decode_s)
        self._inference_s.observe(finished.prefill_s + finished.decode_s)
        if finished.completion_tokens > 1:
            self._token_s.observe(finished.decode_s / (finished.completion_tokens - 1))


class SnapshotCollector(Collector):
    """At a scrape, reads the engine's last snapshot and the link's counters, in the scraping thread."""

    def __init__(
        self,
        snapshot: Callable[[], EngineStats],
        link: LinkStats,
        welcomed: Callable[[], tuple[bool, ...]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """clock: the engine's."""
        self._clock = clock
        self._snapshot = snapshot
        self._link = link
        self._welcomed = welcomed

    def describe(self) -> Iterator[Metric]:
        """The same families as `collect`."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        """All families."""
        stats = self._snapshot()
        yield from _engine_gauges(stats, self._clock())
        yield from _engine_counters(stats)
        yield from _link_metrics(self._link, sum(self._welcomed()))


def info_metrics(card: ModelCard, capacity: Capacity, *, version: str, cache: CacheInfo) -> Iterator[Metric]:
    """Build, model and cache, as labels of a constant 1. The cache's metrics have vLLM's names, which the endpoint
    pickers of Kubernetes' inference gateways look for; its blocks are called a GPU's on every device."""
    yield InfoMetricFamily("octavo_build", "This build", value={"version": version, "role": "worker"})
    labels = {"model_name": card.name, "fingerprint": card.fingerprint, "dtype": card.dtype}
    yield InfoMetricFamily("octavo_model", "The model that is served", value=labels)
    blocks = {"block_size": str(capacity.block_size), "num_gpu_blocks": str(capacity.num_blocks)}
    settings = {"cache_dtype": cache.dtype, "enable_prefix_caching": str(cache.has_prefix_cache)}
    yield InfoMetricFamily("octavo_cache_config", "The KV cache", value={**blocks, **settings})
    text = "Host memory taken for KV blocks, pinned for a GPU's copies or not"
    host = GaugeMetricFamily("octavo_kv_host_memory_bytes", text, labels=["kind"])
    for kind, is_pinned in (("pinned", True), ("pageable", False)):
        host.add_metric([kind], cache.host_bytes if cache.is_host_pinned is is_pinned else 0)
    yield host


class InfoCollector(Collector):
    """Constant metrics."""

    def __init__(self, card: ModelCard, capacity: Capacity, *, version: str, cache: CacheInfo) -> None:
        self._families = tuple(info_metrics(card, capacity, version=version, cache=cache))

    def collect(self) -> Iterator[Metric]:
        """The same at each scrape."""
        return iter(self._families)


class RankCollector(Collector):
    """The ranks of a tensor-parallel group. read: what they measured; None for a worker with one rank."""

    def __init__(self, size: int, read: Callable[[], list[RankFigures]] | None) -> None:
        self._size, self._read = size, read

    def collect(self) -> Iterator[Metric]:
        """Their number and, if there are several, figures of each."""
        text = "Ranks that have a part of the model each and compute each step together"
        yield _gauge("octavo_tensor_parallel_size", text, self._size)
        steps = CounterMetricFamily("octavo_rank_steps", "Engine steps that the rank has launched", labels=["rank"])
        text = "In engine steps, as the rank's own thread sees it"
        busy = CounterMetricFamily("octavo_rank_step_seconds", text, labels=["rank"])
        text = "Of the rank's step seconds, those in exchanges with other ranks; the slowest rank waits least"
        exchanges = CounterMetricFamily("octavo_rank_exchange_seconds", text, labels=["rank"])
        memory = GaugeMetricFamily("octavo_rank_memory_bytes", "Memory that the rank holds", labels=["rank"])
        for rank, figures in enumerate(self._read() if self._read else ()):
            steps.add_metric([str(rank)], figures.num_steps)
            busy.add_metric([str(rank)], figures.step_s)
            exchanges.add_metric([str(rank)], figures.exchange_s)
            memory.add_metric([str(rank)], figures.memory_bytes)
        yield from (steps, busy, exchanges, memory)


class MetricsServer:
    """HTTP in its own thread: /metrics, and /ready, which answers 503 with the reason until the worker is ready."""

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        host: str,
        port: int,
        why_not_ready: Callable[[], str | None] | None = None,
    ) -> None:
        """Raises OSError naming the address if it is taken."""
        try:
            self._server = ScrapeServer(host, port, pages_of(registry), why_not_ready=why_not_ready)
        except OSError as error:
            raise OSError(error.errno, f"cannot serve metrics on {host}:{port}: {error.strerror}") from None
        self.port = self._server.port

    def close(self) -> None:
        """Stop listening."""
        self._server.close()


def _engine_gauges(stats: EngineStats, now_s: float) -> Iterator[Metric]:
    yield _gauge("octavo_num_requests_running", "Requests that hold blocks and are in the steps", stats.num_running)
    yield _gauge("octavo_num_requests_waiting", "Requests queued, preempted ones among them", stats.num_waiting)
    longest_s = 0.0 if stats.waiting_since_s is None else max(0.0, now_s - stats.waiting_since_s)
    yield _gauge("octavo_longest_wait_seconds", "In the queue so far, of who has waited longest", longest_s)
    yield _gauge("octavo_num_requests_paused", "Requests in no step: their readers are behind", stats.num_paused)
    usage = stats.num_active_blocks / max(stats.num_blocks, 1)
    yield _gauge("octavo_kv_cache_usage_ratio", "Blocks in use by requests, 0 to 1", usage)
    blocks = GaugeMetricFamily("octavo_kv_blocks", "KV blocks by state", labels=["state"])
    states = {
        "free": stats.num_free_blocks,
        "cached": stats.num_cached_blocks,
        "active": stats.num_active_blocks,
    }
    for state, count in states.items():
        blocks.add_metric([state], count)
    yield blocks
    host_blocks = GaugeMetricFamily("octavo_kv_host_blocks", "KV blocks in host memory by state", labels=["state"])
    free, cached = stats.num_free_host_blocks, stats.num_cached_host_blocks
    for state, count in {"free": free, "cached": cached, "active": stats.num_host_blocks - free - cached}.items():
        host_blocks.add_metric([state], count)
    yield host_blocks
    text = "Blocks that are neither free, cached nor held, by recount: 0, or a defect"
    yield _gauge("octavo_kv_blocks_leaked", text, stats.num_leaked_blocks)
    yield _gauge("octavo_kv_audit_violations", "Violations that the last audit found", stats.num_violations)
    yield _gauge("octavo_worker_draining", "1 while no new requests are taken", stats.is_draining)


def _engine_counters(stats: EngineStats) -> Iterator[Metric]:
    yield _counter("octavo_engine_steps", "Steps executed", stats.num_steps)
    yield _counter("octavo_generation_tokens", "Tokens generated", stats.num_generated_tokens)
    yield _counter("octavo_prefill_tokens", "Prompt tokens computed, recomputation included", stats.num_prefill_tokens)
    yield _counter("octavo_prefix_cache_queries", "Prompt tokens looked up in the cache", stats.num_queried_tokens)
    yield _counter("octavo_prefix_cache_hits", "Prompt tokens found in the cache", stats.num_hit_tokens)
    yield _counter("octavo_request_pauses", "Times that a request was paused for its reader", stats.num_pauses)
    preemptions = CounterMetricFamily("octavo_num_preemptions", "Requests that lost their blocks", labels=["kind"])
    preemptions.add_metric(["recompute"], stats.num_preemptions - stats.num_swaps)
    preemptions.add_metric(["swap"], stats.num_swaps)
    yield preemptions
    text = "KV blocks copied between device and host, by direction"
    copied = CounterMetricFamily("octavo_kv_copied_blocks", text, labels=["direction"])
    copied.add_metric(["out"], stats.num_copied_out_blocks)
    copied.add_metric(["in"], stats.num_copied_in_blocks)
    yield copied


def _link_metrics(link: LinkStats, num_gateways: int) -> Iterator[Metric]:
    yield _gauge("octavo_worker_gateways", "Gateways that have accepted this worker", num_gateways)
    messages = CounterMetricFamily("octavo_zmq_messages", "Messages between the processes", labels=["direction"])
    messages.add_metric(["received"], link.received_messages)
    messages.add_metric(["sent"], link.sent_messages)
    yield messages
    num_bytes = CounterMetricFamily("octavo_zmq_bytes", "Bytes between the processes", labels=["direction"])
    num_bytes.add_metric(["received"], link.received_bytes)
    num_bytes.add_metric(["sent"], link.sent_bytes)
    yield num_bytes
    yield _counter("octavo_zmq_undecodable_frames", "Frames dropped", link.undecodable_frames)
    yield _counter("octavo_zmq_dropped_messages", "Messages for gateways that were gone", link.dropped_messages)
    yield _counter("octavo_gateways_lost", "Connections to gateways that ended", link.gateways_lost)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, value=value)
