"""The gateway's meters in Prometheus' exposition format.

One collector, read in the scrape's own thread: it only reads plain numbers and a snapshot of the workers that the event
loop leaves here every second. Names: docs of the metrics; `octavo_` with vLLM's suffixes and meanings where it has one.
Label sets are closed: models and workers that registered, methods, status codes, reasons.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from prometheus_client import GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from octavo.gateway.errors import ERROR_TABLE
from octavo.gateway.observability.meters import GatewayMeters, Histogram, ModelMeters
from octavo.gateway.observability.tracing import SpanCounts
from octavo.gateway.rpc.addresses import BindError, split_host_port
from octavo.gateway.rpc.connections import ConnectionLimiter
from octavo.gateway.version import VERSION
from octavo.gateway.workers.stats import LOSSES, PROTOCOL_ERRORS, REFUSALS, PoolStats, RouteReason
from octavo.gateway.workers.views import WorkerState, WorkerView
from octavo.v1 import inference_pb2 as pb
from octavo.wire.messages import ModelCard
from octavo.wire.scrape_server import ScrapeServer, pages_of

_MODEL_COUNTERS: tuple[tuple[str, str, Callable[[ModelMeters], int]], ...] = (
    ("octavo_gateway_requests_started", "Requests that a worker took", lambda m: m.started),
    ("octavo_gateway_prompt_tokens", "Prompt tokens of requests that a worker took", lambda m: m.prompt_tokens),
    ("octavo_gateway_generation_tokens", "Tokens sent to callers, also without text", lambda m: m.generation_tokens),
    ("octavo_gateway_stream_messages", "Deltas sent to callers", lambda m: m.messages),
)
_MODEL_HISTOGRAMS: tuple[tuple[str, str, Callable[[ModelMeters], Histogram]], ...] = (
    ("octavo_time_to_first_token_seconds", "Arrival to first token", lambda m: m.time_to_first_token),
    ("octavo_inter_token_latency_seconds", "Time per token between Deltas", lambda m: m.inter_token),
    ("octavo_e2e_request_latency_seconds", "Arrival to end", lambda m: m.end_to_end),
    ("octavo_request_prompt_tokens", "Prompt tokens of a request", lambda m: m.request_prompt_tokens),
    ("octavo_request_generation_tokens", "Generated tokens of an output", lambda m: m.request_generation_tokens),
    (
        "octavo_request_max_num_generation_tokens",
        "Generated tokens of the longest output of a request",
        lambda m: m.request_max_generation_tokens,
    ),
    ("octavo_request_params_n", "Outputs that a request asked for", lambda m: m.request_params_n),
    ("octavo_request_params_max_tokens", "max_tokens of a request", lambda m: m.request_params_max_tokens),
)
_STATS_COUNTERS: tuple[tuple[str, str, Callable[[PoolStats], int]], ...] = (
    ("octavo_gateway_zmq_received_messages", "Messages from workers", lambda s: s.received_messages),
    ("octavo_gateway_zmq_received_bytes", "Bytes from workers", lambda s: s.received_bytes),
    ("octavo_gateway_zmq_sent_messages", "Messages to workers", lambda s: s.sent_messages),
    ("octavo_gateway_zmq_sent_bytes", "Bytes to workers", lambda s: s.sent_bytes),
    ("octavo_gateway_zmq_undecodable_frames", "Frames dropped: not ours, too large", lambda s: s.undecodable_frames),
    ("octavo_gateway_stale_messages", "Messages dropped: of an epoch given up", lambda s: s.stale_messages),
    ("octavo_gateway_late_outputs", "Rows dropped: for an output that had ended", lambda s: s.late_outputs),
    ("octavo_gateway_sequence_gaps", "Lost step messages", lambda s: s.sequence_gaps),
    ("octavo_gateway_zmq_busy_sends", "Sends refused: the queue to a worker was full", lambda s: s.busy_sends),
    ("octavo_gateway_worker_registrations", "Registrations accepted", lambda s: s.registrations),
    ("octavo_gateway_kv_events", "Prefix-cache events received", lambda s: s.kv_events),
    ("octavo_requests_migrated", "Outputs that continued after their worker was lost", lambda s: s.moved_outputs),
    ("octavo_gateway_pauses", "Outputs paused: their readers fell behind", lambda s: s.pauses),
    ("octavo_gateway_sink_errors", "Defects in streams", lambda s: s.sink_errors),
)
_WORKER_GAUGES: tuple[tuple[str, str, Callable[[WorkerView], float]], ...] = (
    ("octavo_worker_heartbeat_age_seconds", "Since its last heartbeat", lambda w: w.heartbeat_age_s),
    ("octavo_worker_in_flight_requests", "Requests of this gateway at the worker", lambda w: w.in_flight),
)


_MAX_KNOWN_WORKERS = 64
_FINISH_REASONS = tuple(
    name.removeprefix("FINISH_REASON_").lower() for name, number in pb.FinishReason.items() if number
)
_SERVICE = pb.DESCRIPTOR.services_by_name["InferenceService"]
_METHODS = tuple(f"/{_SERVICE.full_name}/{method.name}" for method in _SERVICE.methods)
_ENDINGS = (
    ("OK", ""),
    ("CANCELLED", "CLIENT"),
    *dict.fromkeys((row.code.name, row.reason) for row in ERROR_TABLE.values()),
)
_Key = TypeVar("_Key")


class MetricsEndpoint:
    """The HTTP endpoint that Prometheus scrapes, in its own thread: a scrape never waits for the event loop."""

    def __init__(self, address: str, registry: CollectorRegistry) -> None:
        """Binds at once. address: host:port. Raises AddressError, BindError."""
        host, port = split_host_port(address)
        try:
            self._server = ScrapeServer(host, port, pages_of(registry))
        except OSError as error:
            raise BindError("--metrics-port", address) from error

    @property
    def port(self) -> int:
        """The bound port."""
        return self._server.port

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._server.close()


class GatewayCollector(Collector):
    """stats: the pool's. reloads: by (file, outcome). expiries: of certificates, by file. workers: as last passed to
    `update_workers`."""

    def __init__(
        self,
        meters: GatewayMeters,
        stats: PoolStats,
        *,
        reloads: Mapping[tuple[str, str], int] | None = None,
        expiries: Mapping[str, float] | None = None,
        connections: ConnectionLimiter | None = None,
        spans: SpanCounts | None = None,
    ) -> None:
        self._connections = connections
        self._spans = spans or SpanCounts()  # zeros without traces
        self._reloads = {} if reloads is None else reloads
        self._expiries = {} if expiries is None else expiries
        self._meters = meters
        self._stats = stats
        self.workers: tuple[WorkerView, ...] = ()
        # (worker, model) -> 1.0 or 0.0; the latest of those that left are shown as down.
        self._is_up: dict[tuple[str, str], float] = {}

    def update_workers(self, workers: tuple[WorkerView, ...]) -> None:
        """The workers now; called on the event loop."""
        up = {(worker.worker_id, worker.card.name): float(worker.state is WorkerState.READY) for worker in workers}
        gone = {key: 0.0 for key in self._is_up if key not in up}
        self._is_up = dict([*gone.items(), *up.items()][-_MAX_KNOWN_WORKERS:])
        for worker in workers:
            self._meters.of_model(worker.card.name)  # its series are there before its first request
        self.workers = workers

    def collect(self) -> Iterator[Metric]:
        """All metrics; called in the scrape's thread."""
        yield from self._of_process()
        yield from self._of_models()
        yield from self._of_workers()
        yield from _of_stats(self._stats)

    def _of_process(self) -> Iterator[Metric]:
        meters = self._meters
        build = GaugeMetricFamily("octavo_build_info", "Version of the server", labels=["version", "process"])
        build.add_metric([VERSION, "gateway"], 1)
        yield build
        rpcs = CounterMetricFamily(
            "octavo_requests", "RPCs by method, status and reason", labels=["method", "code", "reason"]
        )
        for labels, count in _with_zeros(meters.rpcs, _known_endings(meters.called)):
            rpcs.add_metric(list(labels), count)
        yield rpcs
        requests = GaugeMetricFamily("octavo_gateway_requests", "Requests in flight", labels=["state"])
        requests.add_metric(["preparing"], meters.num_preparing)
        requests.add_metric(["waiting"], meters.num_waiting)
        requests.add_metric(["running"], meters.num_running)
        yield requests
        yield GaugeMetricFamily(
            "octavo_gateway_tokenizing", "Texts that wait for the tokenizer or are in it", value=meters.num_tokenizing
        )
        yield GaugeMetricFamily(
            "octavo_gateway_load_watchers",
            "Who are sent snapshots of the load: WatchLoad, the page",
            value=meters.num_watchers,
        )
        yield GaugeMetricFamily(
            "octavo_gateway_token_interval_seconds",
            "Between rounds of messages while the process is busy; 0: tokens go out as they come",
            value=meters.token_interval_s,
        )
        yield GaugeMetricFamily("octavo_gateway_draining", "1 while shutting down", value=int(meters.is_draining))
        yield from _of_peers(meters)
        yield CounterMetricFamily(
            "octavo_gateway_tenant_refusals", "Requests refused: a tenant's limit", value=meters.tenant_refusals
        )
        yield from self._of_files()
        spans = CounterMetricFamily("octavo_gateway_trace_spans", "Spans by what became of them", labels=["outcome"])
        spans.add_metric(["exported"], self._spans.exported)
        spans.add_metric(["dropped"], self._spans.dropped)
        yield spans
        if self._connections is not None:
            yield from _of_connections(self._connections)
        yield _histogram(
            "octavo_gateway_event_loop_lag_seconds", "How late timers fire", [([], meters.loop_lag)], labels=[]
        )

    def _of_files(self) -> Iterator[Metric]:
        """Of the files of keys and certificates."""
        reloads = CounterMetricFamily(
            "octavo_gateway_reloads", "Files of keys and certificates read again", labels=["files", "outcome"]
        )
        for pair, count in list(self._reloads.items()):
            reloads.add_metric(list(pair), count)
        yield reloads
        ends = GaugeMetricFamily(
            "octavo_gateway_certificate_expiry_timestamp_seconds",
            "When the certificates in force end, in seconds since the epoch",
            labels=["file"],
        )
        for file, end_s in list(self._expiries.items()):
            ends.add_metric([file], end_s)
        yield ends

    def _of_models(self) -> Iterator[Metric]:
        models = list(self._meters.models.items())
        for name, text, value in _MODEL_COUNTERS:
            family = CounterMetricFamily(name, text, labels=["model_name"])
            for model, meters in models:
                family.add_metric([model], value(meters))
            yield family
        success = CounterMetricFamily(
            "octavo_request_success", "Complete outputs", labels=["model_name", "finished_reason"]
        )
        for model, meters in models:
            for reason, count in _with_zeros(meters.finished, _FINISH_REASONS):
                success.add_metric([model, reason], count)
        yield success
        for name, text, histogram in _MODEL_HISTOGRAMS:
            yield _histogram(name, text, [([model], histogram(meters)) for model, meters in models])

    def _of_workers(self) -> Iterator[Metric]:
        workers = self.workers
        up = GaugeMetricFamily("octavo_worker_up", "1: takes requests", labels=["worker_id", "model_name"])
        for key, value in self._is_up.items():
            up.add_metric(list(key), value)
        yield up
        for name, text, read in _WORKER_GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=["worker_id", "model_name"])
            for worker in workers:
                gauge.add_metric([worker.worker_id, worker.card.name], read(worker))
            yield gauge
        steps = CounterMetricFamily("octavo_worker_steps", "Engine steps", labels=["worker_id", "model_name"])
        info = GaugeMetricFamily(
            "octavo_model_info",
            "What is served",
            labels=["model_name", "fingerprint", "architecture", "dtype", "max_model_len"],
        )
        for worker in workers:
            steps.add_metric([worker.worker_id, worker.card.name], worker.num_steps)
        # One checkpoint may be served under several names; many workers of a model are one series.
        for labels in dict.fromkeys(_labels_of(worker.card) for worker in workers):
            info.add_metric(list(labels), 1)
        yield steps
        yield info


def _labels_of(card: ModelCard) -> tuple[str, ...]:
    return card.name, card.fingerprint, card.architecture, card.dtype, str(card.max_model_len)


def _of_peers(meters: GatewayMeters) -> Iterator[Metric]:
    for name, text, value in (
        ("octavo_gateway_peers", "Other gateways of the service", meters.num_peers),
        ("octavo_gateway_peers_unreachable", "Those that do not answer", meters.num_unreachable_peers),
        (
            "octavo_gateway_peer_news_age_seconds",
            "Since another gateway told of its use of shared limits; the longest",
            meters.peer_news_age_s,
        ),
    ):
        yield GaugeMetricFamily(name, text, value=value)
    losses = CounterMetricFamily(
        "octavo_gateway_peer_losses",
        "Gateways that fell silent, messages that could not be sent to one, questions without an answer",
        labels=["lost"],
    )
    for lost, number in meters.peer_losses.items():
        losses.add_metric([lost], number)
    yield losses


def _of_connections(connections: ConnectionLimiter) -> Iterator[Metric]:
    yield GaugeMetricFamily("octavo_gateway_connections", "Connections of callers", value=connections.num_open())
    limit = connections.limits.total
    yield GaugeMetricFamily("octavo_gateway_max_connections", "Above it connections are closed at once", value=limit)
    closed = CounterMetricFamily(
        "octavo_gateway_connections_closed", "Connections closed: there were too many", labels=["reason"]
    )
    for reason, count in list(connections.closed.items()):
        closed.add_metric([reason], count)
    yield closed


def _of_stats(stats: PoolStats) -> Iterator[Metric]:
    for name, text, value in _STATS_COUNTERS:
        yield CounterMetricFamily(name, text, value=value(stats))
    for name, text, label, counts, known in (
        ("octavo_gateway_workers_lost", "Workers lost", "reason", stats.workers_lost, LOSSES),
        (
            "octavo_gateway_protocol_errors",
            "What a correct worker never sends",
            "kind",
            stats.protocol_errors,
            PROTOCOL_ERRORS,
        ),
        ("octavo_gateway_refused_registrations", "Registrations refused", "kind", stats.refusals, REFUSALS),
        ("octavo_gateway_routed_requests", "Why a worker was chosen", "reason", stats.routed, tuple(RouteReason)),
    ):
        family = CounterMetricFamily(name, text, labels=[label])
        for key, count in _with_zeros(counts, known):
            family.add_metric([str(key)], count)
        yield family


def _with_zeros(counts: Mapping[_Key, int], known: Iterable[_Key]) -> list[tuple[_Key, int]]:
    """The counts, and 0 for known keys that were not counted: a series that starts at 1 shows no increase to rate()."""
    return list({**dict.fromkeys(known, 0), **counts}.items())


def _known_endings(called: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """(method, status code, reason): for our own methods from the start, for others from their first call."""
    for method in sorted({*_METHODS, *called}):
        for code, reason in _ENDINGS:
            yield method, code, reason


def _histogram(
    name: str, text: str, rows: list[tuple[list[str], Histogram]], labels: list[str] | None = None
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, text, labels=["model_name"] if labels is None else labels)
    for values, histogram in rows:
        family.add_metric(values, buckets=histogram.cumulative(), sum_value=histogram.total)
    return family


def registry_of(collector: GatewayCollector) -> CollectorRegistry:
    """A separate registry, so that one process can have several gateways (in tests); includes process metrics."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry
