"""Traces of requests: what a collector gets, when nobody asks for any, and when there is no collector."""

import asyncio
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from octavo.gateway.observability import tracing
from octavo.gateway.observability.tracing import Tracing, TracingError, asks_for_traces, start_tracing
from octavo.v1 import inference_pb2 as pb
from octavo.wire.messages import WireFinishReason
from tests.support.gateway.fake_pool import FakePool, FakeRun, worker_view
from tests.support.gateway.generating import REQUEST, speaking, text_of
from tests.support.services.collector import Collector, Span, collecting
from tests.support.services.service import free_port

CALLER_TRACE, CALLER_SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = (("traceparent", f"00-{CALLER_TRACE}-{CALLER_SPAN}-01"),)
NOT_SAMPLED = (("traceparent", f"00-{CALLER_TRACE}-{CALLER_SPAN}-00"),)


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        yield collector


@pytest.fixture
def tracer(collector: Collector) -> Iterator[Tracing]:
    started = start_tracing()
    assert started is not None
    yield started
    started.close()


def tree(spans: list[Span]) -> dict[str, list[str]]:
    """Names of children by the name of their parent; those whose parent is not here are under the id that they name."""
    names = {span.span_id: span.name for span in spans}
    found: dict[str, list[str]] = {}
    for span in spans:
        found.setdefault(names.get(span.parent_id, span.parent_id), []).append(span.name)
    return found


def only(spans: list[Span], name: str) -> Span:
    (span,) = (each for each in spans if each.name == name)
    return span


async def test_a_call_is_a_child_of_its_callers_span_and_has_its_phases_inside(
    serve: Any, collector: Collector, tracer: Tracing
) -> None:
    pool = speaking([5, 6], [7], reason=WireFinishReason.STOP)
    async with serve(pool, tracing=tracer) as served:
        with capture_logs() as logs:
            await text_of(served.inference.Generate(REQUEST, metadata=SAMPLED))
            await served.until(lambda: any(line["event"] == "end" for line in logs))
    spans = await asyncio.to_thread(collector.trace, CALLER_TRACE)
    name = "octavo.v1.InferenceService/Generate"
    assert tree(spans) == {CALLER_SPAN: [name], name: ["prepare", "queue", "prefill", "decode"]}
    call = only(spans, name)
    told = call.attributes
    assert call.kind == 2  # server
    assert (told["rpc.system.name"], told["rpc.method"], told["rpc.response.status_code"]) == ("grpc", name, "OK")
    assert told["gen_ai.operation.name"] == "text_completion"
    assert (told["gen_ai.request.model"], told["gen_ai.response.id"]) == ("tiny", "r1")
    assert (told["gen_ai.usage.output_tokens"], told["gen_ai.response.finish_reasons"]) == (3, ["stop"])
    assert told["gen_ai.usage.input_tokens"] == len(pool.runs[0].prompt_ids)
    assert told["gen_ai.request.temperature"] == 0.5
    assert 0 < told["gen_ai.server.time_to_first_token"] < (call.end_ns - call.start_ns) / 1e9
    assert call.resource["service.name"] == "octavo"
    seconds = {each.name: round((each.end_ns - each.start_ns) / 1e9, 3) for each in spans}
    assert [seconds["queue"], seconds["prefill"], seconds["decode"]] == [0.25, 0.5, 0.75]  # as the worker told
    assert only(spans, "prefill").attributes["octavo.cached_tokens"] == 3
    assert only(spans, "decode").attributes["octavo.worker.id"] == "w0"
    run = pool.runs[0].request
    assert run.traceparent == f"00-{CALLER_TRACE}-{call.span_id}-01"


async def test_what_was_cached_of_a_prompt_is_what_its_first_output_found(
    serve: Any, collector: Collector, tracer: Tracing
) -> None:
    """The other outputs find all of it, since the first one computed it."""

    def speak(run: FakeRun) -> None:
        run.tokens([5])
        run.finish(cached_tokens=0 if run is pool.runs[0] else len(run.prompt_ids))

    pool = FakePool(on_run=speak)
    async with serve(pool, tracing=tracer) as served:
        await text_of(served.inference.Generate(pb.GenerateRequest(text="Hello", num_outputs=2), metadata=SAMPLED))
    spans = await asyncio.to_thread(collector.trace, CALLER_TRACE)
    told = only(spans, "octavo.v1.InferenceService/Generate").attributes
    assert (told["gen_ai.request.choice.count"], told["gen_ai.usage.cache_read.input_tokens"]) == (2, 0)


async def test_the_lines_of_a_request_have_its_trace(serve: Any, tracer: Tracing) -> None:
    import structlog

    lines: list[dict[str, Any]] = []

    def keep(_: Any, method: str, line: dict[str, Any]) -> Any:
        lines.append(dict(line))
        raise structlog.DropEvent

    structlog.configure(processors=[structlog.contextvars.merge_contextvars, keep])
    try:
        async with serve(speaking([5]), tracing=tracer) as served:
            await text_of(served.inference.Generate(REQUEST, metadata=SAMPLED))
            await served.until(lambda: any(line["event"] == "end" for line in lines))
    finally:
        structlog.reset_defaults()
    (end,) = (line for line in lines if line["event"] == "end")
    assert (end["request_id"], end["trace_id"]) == ("r1", CALLER_TRACE)
    assert all("trace_id" not in line for line in lines if "request_id" not in line)


async def test_preemptions_lie_in_the_phase_that_they_interrupted_and_moves_between_two_workers(
    serve: Any, collector: Collector, tracer: Tracing
) -> None:
    async def speak(run: FakeRun) -> None:
        await asyncio.sleep(0.002)
        run.sink.on_started()
        await asyncio.sleep(0.002)
        run.tokens([5])
        await asyncio.sleep(0.002)
        lost_s = time.monotonic()
        await asyncio.sleep(0.002)
        run.sink.on_moved("w1", lost_s, time.monotonic())
        run.tokens([6])
        run.finish(preempted=((0.3, 0.4), (0.8, 0.9)), preemptions=2)

    tasks: list[asyncio.Task[None]] = []
    pool = FakePool(on_run=lambda run: tasks.append(asyncio.create_task(speak(run))))
    async with serve(pool, tracing=tracer) as served:
        await text_of(served.inference.Generate(REQUEST, metadata=SAMPLED))
    spans = await asyncio.to_thread(collector.trace, CALLER_TRACE)
    name = "octavo.v1.InferenceService/Generate"
    inside = tree(spans)
    assert inside["prefill"] == inside["decode"] == ["preemption"]
    assert inside[name] == ["prepare", *("queue", "prefill", "decode"), "migration", *("queue", "prefill", "decode")]
    move = only(spans, "migration")
    assert (move.attributes["octavo.worker.id"], move.attributes["octavo.worker.next_id"]) == ("w0", "w1")
    lost = [span for span in spans if span.is_error]
    assert [(span.name, span.attributes["octavo.worker.id"]) for span in lost] == [("decode", "w0")]
    assert lost[0].attributes["error.type"] == "WORKER_LOST"
    assert lost[0].end_ns == move.start_ns
    assert only(spans, name).attributes["octavo.migrations"] == 1
    assert only(spans, name).attributes["octavo.preemptions"] == 2


async def test_a_worker_that_is_quicker_than_the_task_that_sent_to_it_ends_within_the_call(
    serve: Any, collector: Collector, tracer: Tracing
) -> None:
    """Its times are counted from before the request was sent: it may have ended before the gateway's task goes on."""

    def speak(run: FakeRun) -> None:
        time.sleep(0.3)
        run.tokens([5])
        run.finish(queue_s=0.1, prefill_s=0.1, decode_s=0.1)

    async with serve(FakePool(on_run=speak), tracing=tracer) as served:
        await text_of(served.inference.Generate(REQUEST, metadata=SAMPLED))
    spans = await asyncio.to_thread(collector.trace, CALLER_TRACE)
    call = only(spans, "octavo.v1.InferenceService/Generate")
    assert max(span.end_ns for span in spans) == call.end_ns


async def test_a_refused_call_is_a_span_with_its_status(serve: Any, collector: Collector, tracer: Tracing) -> None:
    async with serve(FakePool(), tracing=tracer) as served:
        with pytest.raises(grpc.aio.AioRpcError):
            await text_of(served.inference.Generate(pb.GenerateRequest(), metadata=SAMPLED))
    (call,) = await asyncio.to_thread(collector.trace, CALLER_TRACE)
    assert (call.attributes["rpc.response.status_code"], call.is_error) == ("INVALID_ARGUMENT", False)
    assert call.attributes["error.type"] == "INVALID_FIELD"


async def test_embeddings_are_traced_too(serve: Any, collector: Collector, tracer: Tracing) -> None:
    pool = FakePool(on_run=lambda run: asyncio.get_running_loop().call_soon(run.embed, [1.0, 2.0]))
    inputs = [pb.EmbedInput(text="a"), pb.EmbedInput(text="b c")]
    async with serve(pool, tracing=tracer) as served:
        await served.inference.Embed(pb.EmbedRequest(inputs=inputs), metadata=SAMPLED)
    spans = await asyncio.to_thread(collector.trace, CALLER_TRACE)
    (call,) = (each for each in spans if each.kind == 2)
    assert call.attributes["gen_ai.operation.name"] == "embeddings"
    assert sorted(each.name for each in spans if each is not call) == [
        *("prefill", "prefill", "prepare", "queue", "queue")
    ]


@pytest.mark.parametrize("metadata", [NOT_SAMPLED, (("traceparent", "rubbish"),), (("traceparent", "00-0-0-01"),), ()])
async def test_a_caller_decides_whether_its_trace_is_kept_and_rubbish_is_none(
    serve: Any, collector: Collector, tracer: Tracing, metadata: Any
) -> None:
    pool = speaking([5])
    async with serve(pool, tracing=tracer) as served:
        await text_of(served.inference.Generate(REQUEST, metadata=metadata))
    tracer.close()
    trace_id = pool.runs[0].request.traceparent[3:35]
    assert (trace_id == CALLER_TRACE) == (metadata == NOT_SAMPLED)
    assert bool(collector.spans) == (metadata != NOT_SAMPLED)
    assert {span.parent_id for span in collector.spans if span.kind == 2} <= {""}


async def test_the_samplers_variable_is_followed(
    serve: Any, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    tracer = start_tracing()
    assert tracer is not None
    async with serve(speaking([5]), tracing=tracer) as served:
        await text_of(served.inference.Generate(REQUEST, metadata=SAMPLED))
    tracer.close()
    assert collector.spans == []
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
    tracer = start_tracing()
    assert tracer is not None
    async with serve(speaking([5]), tracing=tracer) as served:
        await text_of(served.inference.Generate(REQUEST, metadata=NOT_SAMPLED))
    tracer.close()
    assert {span.resource["service.name"] for span in collector.spans} == {"mine"}


# ---------------------------------------------------------------- off


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"OTEL_SERVICE_NAME": "mine", "OTEL_TRACES_SAMPLER": "always_on"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_nobody_asks(variables: dict[str, str]) -> None:
    assert not asks_for_traces(variables)
    assert start_tracing(variables) is None


def test_without_being_asked_no_process_imports_opentelemetry() -> None:
    code = (
        "import sys; import octavo.cli.app, octavo.gateway.main, octavo.worker.main;"
        "from octavo.gateway.observability.tracing import start_tracing; assert start_tracing({}) is None;"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == "[]"


async def test_without_being_asked_a_request_calls_nothing_of_it(serve: Any) -> None:
    """Not one call into either file but the question at the end whether there is a trace."""
    called: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and Path(frame.f_code.co_filename).name in ("tracing.py", "spans.py"):
            called.append(frame.f_code.co_name)

    async with serve(speaking([5, 6], [7])) as served:
        sys.setprofile(note)
        try:
            await text_of(served.inference.Generate(REQUEST, metadata=SAMPLED))
            await served.until(lambda: not len(served.gateway.tracker))
        finally:
            sys.setprofile(None)
        assert served.pool.runs[0].request.traceparent == ""
    assert called == ["trace_request"]


# ---------------------------------------------------------------- what cannot be had


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_TRACES_EXPORTER", "zipkin"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "many"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "0"),
    ],
)
def test_what_is_not_supported_is_named(name: str, value: str) -> None:
    with pytest.raises(TracingError) as raised:
        asks_for_traces({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317", name: value})
    assert str(raised.value).startswith(f"{name} is {value!r}, ")


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "10s", "could not convert string to float: '10s'"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zip", "Invalid value"),
        ("OTEL_BSP_SCHEDULE_DELAY", "-1", "schedule_delay_millis must be positive"),
        ("OTEL_SPAN_EVENT_COUNT_LIMIT", "many", "must be a non-negative integer"),
    ],
)
def test_what_the_library_refuses_is_said_with_the_variables(
    name: str, value: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    monkeypatch.setenv(name, value)
    with pytest.raises(TracingError, match=why) as raised:
        start_tracing()
    assert {"OTEL_EXPORTER_OTLP_ENDPOINT", name} <= set(re.findall(r"OTEL_\w+", str(raised.value)))


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"])
def test_a_missing_extra_is_one_sentence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(TracingError) as raised:
        start_tracing({name: "http://127.0.0.1:4317"})
    assert str(raised.value) == f"{name} asks for traces, and OpenTelemetry is not installed: pip install '.[otel]'"


# ---------------------------------------------------------------- no collector


async def test_a_collector_that_is_gone_costs_spans_and_no_request(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens, and the queue has room for eight spans: what is beyond that is dropped at once, and counted."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    tracer = start_tracing()
    assert tracer is not None
    async with serve(speaking([5]), tracing=tracer) as served:
        for _ in range(6):
            _, events = await text_of(served.inference.Generate(pb.GenerateRequest(text="Hello")))
            assert events[-1].WhichOneof("event") == "finished"
        await served.until(lambda: not len(served.gateway.tracker))
    assert tracer.counts.waiting <= 8
    started_s = time.monotonic()
    await asyncio.to_thread(tracer.close)
    assert time.monotonic() - started_s < 20
    assert (tracer.counts.exported, tracer.counts.waiting) == (0, 0)
    assert tracer.counts.dropped == 6 * 5  # the call, prepare, queue, prefill, decode


async def test_the_thread_that_sends_may_hang_and_requests_go_on(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collector that takes the connection and never answers."""
    import socket

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        tracer = start_tracing()
        assert tracer is not None
        async with serve(speaking([5]), tracing=tracer) as served:
            for _ in range(5):
                await text_of(served.inference.Generate(pb.GenerateRequest(text="Hello")))
        await asyncio.to_thread(tracer.close)
    assert tracer.counts.exported == 0
    assert tracer.counts.dropped == 5 * 5
    assert not [each for each in threading.enumerate() if each.name == "spans-closing" and not each.daemon]


async def test_what_became_of_spans_is_on_the_metrics_page(serve: Any, tracer: Tracing, collector: Collector) -> None:
    async with serve(speaking([5]), tracing=tracer) as served:
        await text_of(served.inference.Generate(REQUEST, metadata=SAMPLED))
        await asyncio.to_thread(collector.trace, CALLER_TRACE)
        await served.until(lambda: tracer.counts.exported == 5)
        (family,) = (each for each in served.gateway.collector.collect() if each.name == "octavo_gateway_trace_spans")
    assert {sample.labels["outcome"]: sample.value for sample in family.samples} == {"exported": 5, "dropped": 0}


def test_a_drop_is_one_line_a_minute() -> None:
    counts = tracing.SpanCounts()
    with capture_logs() as logs:
        for _ in range(100):
            counts.add(dropped=1)
    assert [line["event"] for line in logs] == ["spans_dropped"]
    assert counts.dropped == 100


async def test_a_worker_that_was_lost_before_it_began_leaves_a_queue(
    serve: Any, collector: Collector, tracer: Tracing
) -> None:
    pool = FakePool(views=[worker_view()], on_run=lambda run: run.lose("WORKER_LOST", "it is gone"))
    async with serve(pool, tracing=tracer) as served:
        with pytest.raises(grpc.aio.AioRpcError):
            await text_of(served.inference.Generate(REQUEST, metadata=SAMPLED))
    spans = await asyncio.to_thread(collector.trace, CALLER_TRACE)
    (call,) = (each for each in spans if each.kind == 2)
    assert (call.is_error, call.attributes["error.type"]) == (True, "WORKER_LOST")
    assert sorted(each.name for each in spans if each is not call) == ["prepare", "queue"]
