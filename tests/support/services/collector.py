"""A trace collector on loopback: OTLP's TraceService, which keeps the spans that it is sent."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

WAIT_S = 60.0  # generous: a busy machine is not an error


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A span as received; ids in hex, times in nanoseconds since 1970. resource: of the process that sent it."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start_ns: int
    end_ns: int
    is_error: bool
    attributes: dict[str, Any]
    resource: dict[str, Any]


@dataclass(eq=False)
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """endpoint: value for OTEL_EXPORTER_OTLP_ENDPOINT."""

    endpoint: str = ""
    spans: list[Span] = field(default_factory=list)
    _news: threading.Condition = field(default_factory=threading.Condition)

    def Export(self, request: Any, context: Any) -> Any:
        """Receive one batch."""
        with self._news:
            for group in request.resource_spans:
                resource = _attributes(group.resource.attributes)
                for scope in group.scope_spans:
                    self.spans += [_span(each, resource) for each in scope.spans]
            self._news.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def trace(self, trace_id: str, *, num_calls: int = 1) -> list[Span]:
        """All spans of a trace in order of time, once the spans of its calls have arrived, which end last."""
        deadline = time.monotonic() + WAIT_S
        with self._news:
            while sum(each.kind == 2 for each in self._of(trace_id)) < num_calls:
                left_s = deadline - time.monotonic()
                assert left_s > 0, f"the trace never came; there are {[each.name for each in self.spans]}"
                self._news.wait(left_s)
            return sorted(self._of(trace_id), key=lambda each: (each.start_ns, -each.end_ns))

    def _of(self, trace_id: str) -> list[Span]:
        return [each for each in self.spans if each.trace_id == trace_id]


def _span(span: Any, resource: dict[str, Any]) -> Span:
    return Span(
        name=span.name, trace_id=span.trace_id.hex(), span_id=span.span_id.hex(), parent_id=span.parent_span_id.hex(),
        kind=span.kind, start_ns=span.start_time_unix_nano, end_ns=span.end_time_unix_nano,
        is_error=span.status.code == 2, attributes=_attributes(span.attributes), resource=resource,
    )  # fmt: skip


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@contextmanager
def collecting() -> Iterator[Collector]:
    """A running collector."""
    server = grpc.server(ThreadPoolExecutor(2))
    collector = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(grace=None).wait()
