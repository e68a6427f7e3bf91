"""Traces of a whole service, as a collector gets them: several gateways, a preemption, a lost worker."""

import asyncio
import json
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import grpc
import pytest

from octavo.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tests.support.services.collector import Collector, Span, collecting
from tests.support.services.service import REPOSITORY, Service, environment, free_port, serve

ORACLE = ("--runner=oracle", "--model=one=x", "--oracle-eos-every=1000000")
ROUNDED_NS = 1_000  # of seconds since the host's start, as floating-point numbers
CALL = "octavo.v1.InferenceService/Generate"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "octavo-under-test")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        yield collector


def request(max_tokens: int, *, num_prompt_tokens: int = 8) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=range(1, 1 + num_prompt_tokens)),
        sampling=inference_pb2.SamplingParams(temperature=0),
        stop=inference_pb2.StopConditions(max_tokens=max_tokens, ignore_eos=True),
        output=inference_pb2.OutputOptions(format=inference_pb2.OUTPUT_FORMAT_TOKEN_IDS),
    )


async def ask(service: Service, stack: AsyncExitStack, trace_id: str, asked: inference_pb2.GenerateRequest) -> Any:
    """A call on a connection of its own, begun."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    channel = await stack.enter_async_context(grpc.aio.insecure_channel(service.target, options=options))
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    return stub.Generate(asked, metadata=(("traceparent", f"00-{trace_id}-{'b' * 16}-01"),), timeout=120)


async def read(call: Any) -> inference_pb2.GenerateResponse:
    """To its end; the last event."""
    last = event = await call.read()
    while event is not grpc.aio.EOF:
        last, event = event, await call.read()
    return last


def check_times(spans: list[Span]) -> None:
    """Every span lies within its parent. A worker's are sums of durations behind the moment before the request was sent
    to it, so that they end before the call does, whichever process gets on; but for what such sums are rounded by."""
    by_id = {span.span_id: span for span in spans}
    for span in spans:
        parent = by_id.get(span.parent_id)
        assert span.start_ns <= span.end_ns
        if parent is not None:
            assert parent.start_ns <= span.start_ns + ROUNDED_NS, (parent, span)
            assert span.end_ns <= parent.end_ns + ROUNDED_NS, (parent, span)


def children(spans: list[Span], name: str) -> list[str]:
    (parent,) = (each for each in spans if each.name == name)
    return [each.name for each in spans if each.parent_id == parent.span_id]


async def test_two_gateways_put_their_calls_into_one_trace_and_log_its_id(tmp_path: Path, collector: Collector) -> None:
    trace_id, num_calls = secrets.token_hex(16), 0
    with serve(tmp_path, "--gateways=2", *ORACLE) as service:
        service.wait_until_supervised()
        gateways: set[str] = set()
        while len(gateways) < 2:  # the kernel spreads connections over them
            assert num_calls < 60, "connections never reach both gateways"
            async with AsyncExitStack() as stack:
                await read(await ask(service, stack, trace_id, request(4)))
            num_calls += 1
            spans = await asyncio.to_thread(collector.trace, trace_id, num_calls=num_calls)
            gateways = {span.resource["service.instance.id"] for span in spans}
    calls = [span for span in spans if span.name == CALL]
    assert {span.parent_id for span in calls} == {"b" * 16}
    assert {span.resource["service.name"] for span in calls} == {"octavo-under-test"}
    for call in calls:
        inside = [span for span in spans if span.parent_id == call.span_id]
        assert [span.name for span in inside] == ["prepare", "queue", "prefill", "decode"]
        check_times([call, *inside])
    lines = [json.loads(line) for line in service.log.read_text().splitlines() if line.startswith("{")]
    ends = [line for line in lines if line.get("event") == "end" and line["method"] == "Generate"]
    assert len(ends) == num_calls
    assert {line["trace_id"] for line in ends} == {trace_id}


async def test_a_request_that_loses_its_blocks_has_the_wait_as_a_span(tmp_path: Path, collector: Collector) -> None:
    """Two that want 12 blocks of 16 tokens each, and there are 16."""
    traces = [secrets.token_hex(16) for _ in range(2)]
    settings = ("--num-blocks=16", "--max-model-len=256", "--oracle-step-delay-s=0.002")
    with serve(tmp_path, *ORACLE, *settings) as service:
        async with AsyncExitStack() as stack:
            calls = [await ask(service, stack, trace_id, request(180)) for trace_id in traces]
            ends = [await read(call) for call in calls]
        spans = [await asyncio.to_thread(collector.trace, trace_id) for trace_id in traces]
    told = [end.finished.receipt.preemptions for end in ends]
    assert sum(told) >= 1
    for trace, num_preemptions in zip(spans, told, strict=True):
        waits = [span for span in trace if span.name == "preemption"]
        assert len(waits) == num_preemptions
        check_times(trace)
        assert children(trace, "decode") == ["preemption"] * num_preemptions


async def test_a_lost_worker_is_a_migration_between_two_workers(tmp_path: Path, collector: Collector) -> None:
    trace_id = secrets.token_hex(16)
    settings = ("--workers=2", "--oracle-step-delay-s=0.01", "--heartbeat-timeout-s=60")
    with serve(tmp_path, *ORACLE, *settings) as service:
        service.wait_until_supervised()
        async with AsyncExitStack() as stack:
            calls = [await ask(service, stack, trace_id, request(150)) for _ in range(4)]
            for call in calls:
                for _ in range(5):  # started, and some tokens
                    await call.read()
            service.children("worker")[0].kill()
            ends = [await read(call) for call in calls]
        spans = await asyncio.to_thread(collector.trace, trace_id, num_calls=4)
    moved = sum(end.finished.receipt.migrations for end in ends)
    assert moved >= 1
    assert [span.name for span in spans].count("migration") == moved
    for call in (span for span in spans if span.name == CALL):
        inside = [span for span in spans if span.parent_id == call.span_id]
        check_times([call, *inside])
        if not call.attributes["octavo.migrations"]:
            assert [span.name for span in inside] == ["prepare", "queue", "prefill", "decode"]
            continue
        (at,) = (place for place, span in enumerate(inside) if span.name == "migration")
        lost, migration, next_ = inside[at - 1], inside[at], inside[at + 1]
        assert (lost.name, lost.is_error, next_.name) == ("decode", True, "queue")
        assert [span.name for span in inside[at + 1 :]] == ["queue", "prefill", "decode"]
        assert lost.end_ns == migration.start_ns
        ways = migration.attributes
        assert ways["octavo.worker.id"] == lost.attributes["octavo.worker.id"]
        assert ways["octavo.worker.next_id"] == next_.attributes["octavo.worker.id"]
    lines = [json.loads(line) for line in service.log.read_text().splitlines() if line.startswith("{")]
    assert {line["trace_id"] for line in lines if line.get("event") == "output_moved"} == {trace_id}


async def test_a_call_of_openais_interface_is_a_child_of_its_callers_span(tmp_path: Path, collector: Collector) -> None:
    pytest.importorskip("uvicorn")
    trace_id, port = secrets.token_hex(16), free_port()
    with serve(tmp_path, "--runner=oracle", "--num-blocks=64", f"--openai={port}") as service:
        service.wait_until_supervised()
        body = json.dumps({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4})
        headers = {"content-type": "application/json", "traceparent": f"00-{trace_id}-{'b' * 16}-01"}
        request = Request(f"http://127.0.0.1:{port}/v1/chat/completions", body.encode(), headers)
        status = await asyncio.to_thread(lambda: urlopen(request, timeout=60).status)
        spans = await asyncio.to_thread(collector.trace, trace_id)
    assert status == 200
    (call,) = (span for span in spans if span.kind == 2)
    assert (call.name, call.parent_id) == (CALL, "b" * 16)
    assert (call.attributes["gen_ai.operation.name"], call.attributes["gen_ai.usage.output_tokens"]) == ("chat", 4)


def test_serve_says_in_one_sentence_how_to_get_the_extra(tmp_path: Path) -> None:
    hidden = tmp_path / "hidden" / "opentelemetry"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ImportError('not here')\n")
    variables = environment() | {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317",
        "PYTHONPATH": str(hidden.parent),
    }
    done = subprocess.run(
        [sys.executable, "-m", "octavo.cli.main", "serve", *ORACLE],
        cwd=REPOSITORY, env=variables, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "OTEL_EXPORTER_OTLP_ENDPOINT asks for traces, and OpenTelemetry is not installed" in " ".join(
        done.stderr.split()
    )
    assert "Traceback" not in done.stderr
