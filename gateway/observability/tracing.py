"""Spans of this gateway's RPCs, handed to OpenTelemetry: what the standard variables (`OTEL_…`) ask for, or nothing.

The only file that imports OpenTelemetry, which is optional (extra `otel`), and only where traces are configured.
Spans are given away when a request has ended, in one go; a collector that is slow or gone costs spans, which are
counted, and no caller's time. Knows no requests (`gateway.requests.spans` records what happened to one).
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import structlog

from octavo.gateway.version import VERSION

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

log = structlog.get_logger(__name__)

Attributes = Mapping[str, "str | int | float | bool | list[str]"]
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_QUEUE, _DEFAULT_QUEUE, _BATCH = "OTEL_BSP_MAX_QUEUE_SIZE", 2048, 512
_CLOSE_S = 2.0  # for spans that are left at the end
_WARN_EVERY_S = 60.0
# Statuses that are the server's fault, as the conventions for gRPC have it; the others are no errors of its span.
_SERVER_ERRORS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})


class TracingError(ValueError):
    """Traces are configured in an unsupported way; the message says what to do."""


def asks_for_traces(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the variables ask for traces: an endpoint, or `OTEL_TRACES_EXPORTER=otlp`. Raises TracingError for what
    is not supported or not installed."""
    exporter = environ.get("OTEL_TRACES_EXPORTER", "").strip()
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or exporter == "none":
        return False
    if exporter not in ("", "otlp"):
        raise TracingError(f"OTEL_TRACES_EXPORTER is {exporter!r}, and only otlp and none are supported")
    asked = next((name for name in _ENDPOINTS if environ.get(name, "").strip()), None)
    asked = asked or ("OTEL_TRACES_EXPORTER" if exporter else None)
    if asked is None:
        return False
    for name in _PROTOCOLS:
        if environ.get(name, "grpc").strip() != "grpc":
            raise TracingError(f"{name} is {environ[name]!r}, and only grpc is supported")
    _queue_size(environ)
    try:
        import opentelemetry.exporter.otlp.proto.grpc.trace_exporter
        import opentelemetry.sdk.trace.export  # noqa: F401
    except ImportError:
        raise TracingError(
            f"{asked} asks for traces, and OpenTelemetry is not installed: pip install '.[otel]'"
        ) from None
    return True


def start_tracing(environ: Mapping[str, str] = os.environ) -> Tracing | None:
    """None if no traces are configured. Raises TracingError."""
    if not asks_for_traces(environ):
        return None
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider

    logging.getLogger("opentelemetry").addHandler(logging.NullHandler())  # else its warnings go to stderr as they are
    defaults = {
        "service.name": "octavo",
        "service.version": VERSION,
        "service.instance.id": f"{socket.gethostname()}-{os.getpid()}",
    }
    given = OTELResourceDetector().detect().attributes
    resource = Resource.create({name: value for name, value in defaults.items() if name not in given})
    counts = SpanCounts()
    try:
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = _exporter(counts)
        provider.add_span_processor(_processor(exporter, counts, _queue_size(environ)))
    except Exception as error:  # the library reads more variables, and does not always say which one is wrong
        names = ", ".join(sorted(name for name in environ if name.startswith("OTEL_")))
        raise TracingError(f"OpenTelemetry refuses one of {names}: {error}") from None
    return Tracing(provider, exporter, counts)


def _queue_size(environ: Mapping[str, str]) -> int:
    text = environ.get(_QUEUE, "").strip() or str(_DEFAULT_QUEUE)
    if not text.isdecimal() or not int(text):
        raise TracingError(f"{_QUEUE} is {text!r}, which is no number of spans above 0")
    return int(text)


class SpanCounts:
    """What became of spans. Written by the event loop and the exporting thread, read by scrapes. waiting: queued, or
    being sent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.exported = self.dropped = self.waiting = 0
        self._warned_s = -_WARN_EVERY_S

    def add(self, *, exported: int = 0, dropped: int = 0, waiting: int = 0) -> None:
        """Count; dropped spans are logged at most once a minute."""
        with self._lock:
            self.exported += exported
            self.dropped += dropped
            self.waiting += waiting
            now_s = time.monotonic()
            is_told = not dropped or now_s - self._warned_s < _WARN_EVERY_S
            self._warned_s = self._warned_s if is_told else now_s
        if not is_told:
            log.warning("spans_dropped", dropped=self.dropped, exported=self.exported)

    def give_up(self) -> None:
        """Spans that are still waiting will not be sent: count them as dropped."""
        self.add(dropped=self.waiting, waiting=-self.waiting)


def _exporter(counts: SpanCounts) -> SpanExporter:
    """The library's exporter, with every span counted."""
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import SpanExportResult

    class Counted(OTLPSpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            result = SpanExportResult.FAILURE
            try:
                result = super().export(spans)
            finally:
                is_good, num_spans = result is SpanExportResult.SUCCESS, min(len(spans), counts.waiting)
                counts.add(
                    exported=num_spans if is_good else 0, dropped=0 if is_good else num_spans, waiting=-num_spans
                )
            return result

    return Counted()


def _processor(exporter: SpanExporter, counts: SpanCounts, queue_size: int) -> SpanProcessor:
    """The library's queue and thread. It would silently drop the oldest span from a full queue; here the newest is
    dropped and counted."""
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    class Bounded(BatchSpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            if span.context is None or not span.context.trace_flags.sampled:
                return
            if counts.waiting >= queue_size:
                counts.add(dropped=1)
            else:
                counts.add(waiting=1)
                super().on_end(span)

    return Bounded(exporter, max_queue_size=queue_size, max_export_batch_size=min(queue_size, _BATCH))


class Tracing:
    """One per gateway. `begin` is called on its event loop."""

    def __init__(self, provider: TracerProvider, exporter: SpanExporter, counts: SpanCounts) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.counts = counts
        self._provider = provider
        self._exporter = exporter
        self._tracer = provider.get_tracer("octavo", VERSION)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, method: str, metadata: Iterable[tuple[str, Any]], started_s: float) -> CallTrace:
        """A call has arrived. method: `/package.Service/Method`. A valid `traceparent` is the parent of its span."""
        from opentelemetry.trace import SpanKind

        carrier = {name: value for name, value in metadata if name in self._propagator.fields and type(value) is str}
        name, behind_ns = method.removeprefix("/"), time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(
            name,
            context=self._propagator.extract(carrier) if carrier else None,
            kind=SpanKind.SERVER,
            attributes={"rpc.system.name": "grpc", "rpc.method": name},
            start_time=round(started_s * 1e9) + behind_ns,
        )
        return CallTrace(span, self._tracer, behind_ns)

    def close(self) -> None:
        """Send what is left, for at most two seconds. Blocks. Idempotent."""
        ending = threading.Thread(target=self._provider.shutdown, name="spans-closing", daemon=True)
        ending.start()
        ending.join(_CLOSE_S)
        if ending.is_alive():
            self.counts.give_up()
            self._exporter.shutdown()  # ends the attempt that the other thread waits for


class CallTrace:
    """The span of one RPC. Times are monotonic; behind_ns converts them to nanoseconds since 1970. trace_id: 32 hex
    digits. traceparent: of the span, for the worker. is_kept: whether the trace is sampled. operation: by the GenAI
    conventions."""

    __slots__ = ("_behind_ns", "_span", "_tracer", "is_kept", "operation", "trace_id", "traceparent")

    def __init__(self, span: Span, tracer: Tracer, behind_ns: int) -> None:
        context = span.get_span_context()
        self._span = span
        self._tracer = tracer
        self._behind_ns = behind_ns
        self.trace_id = f"{context.trace_id:032x}"
        self.traceparent = f"00-{self.trace_id}-{context.span_id:016x}-{int(context.trace_flags):02x}"
        self.is_kept = span.is_recording()
        self.operation = "text_completion"

    def set_attributes(self, attributes: Attributes) -> None:
        """Add attributes to the RPC's span."""
        self._span.set_attributes(dict(attributes))

    def span(
        self,
        name: str,
        start_s: float,
        end_s: float,
        attributes: Attributes,
        *,
        inside: Span | None = None,
        error: str = "",
    ) -> Span:
        """Record something that is over. Times are monotonic seconds. inside: another span of this call; None: the
        RPC's."""
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        span = self._tracer.start_span(
            name,
            context=set_span_in_context(inside or self._span),
            attributes=dict(attributes),
            start_time=self._at(start_s),
        )
        if error:
            span.set_attribute("error.type", error)
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(self._at(max(start_s, end_s)))
        return span

    def end(self, code: str, reason: str) -> None:
        """The RPC has its status. reason: ours; empty if none."""
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attribute("rpc.response.status_code", code)
        if code != "OK":
            self._span.set_attribute("error.type", reason or code)
        if code in _SERVER_ERRORS:
            self._span.set_status(Status(StatusCode.ERROR, reason or code))
        self._span.end(self._at(time.monotonic()))

    def _at(self, monotonic_s: float) -> int:
        return round(monotonic_s * 1e9) + self._behind_ns
