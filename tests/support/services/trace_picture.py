"""Draws a real trace: `python -m tests.support.services.trace_picture docs/pictures/trace.svg`.

Two workers without a model, four long requests, room for two on each; one worker is killed. Of the four traces that the
collector got, the one with a migration and a preemption is drawn.
"""

import asyncio
import os
import secrets
import sys
import tempfile
from contextlib import AsyncExitStack
from html import escape
from pathlib import Path

import grpc

from octavo.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tests.support.services.collector import Span, collecting
from tests.support.services.service import Service, serve

SETTINGS = (
    *("--runner=oracle", "--model=demo=x", "--oracle-eos-every=1000000", "--oracle-step-delay-s=0.01"),
    *("--workers=2", "--num-blocks=24", "--max-model-len=384", "--heartbeat-timeout-s=60"),
)
NUM_CALLS, NUM_TOKENS, KILL_AFTER = 4, 200, 60
COLOURS = {
    "prepare": "#8c8c8c", "queue": "#d9a441", "prefill": "#4f81bd", "decode": "#5b9a5b", "preemption": "#c0504d",
    "migration": "#8064a2",
}  # fmt: skip
WIDTH, LEFT, ROW, TOP = 1000, 190, 26, 64
TOLD = (
    ("gen_ai.usage.input_tokens", "{} tokens of prompt"), ("gen_ai.usage.output_tokens", "{} tokens"),
    ("octavo.worker.id", "{}"), ("octavo.worker.next_id", "to {}"), ("error.type", "{}"),
)  # fmt: skip


async def ask(stub: inference_pb2_grpc.InferenceServiceStub, trace_id: str, index: int, given: list[int]) -> None:
    """One long request; given[index] counts its tokens."""
    request = inference_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=range(100 * index + 1, 100 * index + 33)),
        stop=inference_pb2.StopConditions(max_tokens=NUM_TOKENS, ignore_eos=True),
        output=inference_pb2.OutputOptions(format=inference_pb2.OUTPUT_FORMAT_TOKEN_IDS),
    )
    async for event in stub.Generate(request, metadata=(("traceparent", f"00-{trace_id}-{'b' * 16}-01"),)):
        given[index] += len(event.delta.token_ids)


async def disturb(service: Service, traces: list[str]) -> None:
    """Send all requests at once; a worker is killed once each has got some tokens."""
    given = [0] * len(traces)
    async with AsyncExitStack() as stack, asyncio.timeout(120):
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(service.target))
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        async with asyncio.TaskGroup() as group:
            for index, trace_id in enumerate(traces):
                group.create_task(ask(stub, trace_id, index, given))
            while min(given) < KILL_AFTER:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            service.children("worker")[0].kill()


def real_trace() -> list[Span]:
    """The spans of one request, in order of time."""
    traces = [secrets.token_hex(16) for _ in range(NUM_CALLS)]
    with collecting() as collector, tempfile.TemporaryDirectory() as folder:
        os.environ |= {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "50"}
        with serve(Path(folder), *SETTINGS) as service:
            service.wait_until_supervised()
            asyncio.run(disturb(service, traces))
            found = [collector.trace(trace_id) for trace_id in traces]
    return max(found, key=lambda spans: len({span.name for span in spans}))


def rows(spans: list[Span]) -> list[tuple[int, Span]]:
    """Each span with its depth; children come after their parent."""
    ids = {span.span_id for span in spans}

    def below(parent: str, depth: int) -> list[tuple[int, Span]]:
        mine = [each for each in spans if (each.parent_id if each.parent_id in ids else "") == parent]
        return [row for each in mine for row in ((depth, each), *below(each.span_id, depth + 1))]

    return below("", 0)


def svg(spans: list[Span]) -> str:
    """The picture of these spans."""
    start_ns, end_ns = min(each.start_ns for each in spans), max(each.end_ns for each in spans)
    per_ns = (WIDTH - LEFT - 20) / (end_ns - start_ns)
    lines = rows(spans)
    height = TOP + ROW * len(lines) + 16
    (call,) = (each for each in spans if each.kind == 2)
    head = f"{call.attributes['gen_ai.request.model']}, {call.attributes['gen_ai.usage.output_tokens']} tokens"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="22" font-size="14">trace {call.trace_id}: {escape(head)}</text>',
    ]
    step_ms = next(step for step in (1, 5, 10, 50, 100, 250, 500, 1000, 5000) if (end_ns - start_ns) / 1e6 / step <= 12)
    for number in range(int((end_ns - start_ns) / 1e6 / step_ms) + 1):
        x = LEFT + number * step_ms * 1e6 * per_ns
        parts.append(f'<line x1="{x:.1f}" y1="{TOP - 12}" x2="{x:.1f}" y2="{height - 12}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{x:.1f}" y="{TOP - 18}" fill="#666" text-anchor="middle">{number * step_ms} ms</text>')
    for number, (depth, span) in enumerate(lines):
        y = TOP + ROW * number
        x, width = LEFT + (span.start_ns - start_ns) * per_ns, max(2.0, (span.end_ns - span.start_ns) * per_ns)
        name = span.name.rpartition(".")[2] if span is call else span.name
        parts.append(f'<text x="{12 + 14 * depth}" y="{y + 14}">{escape(name)}</text>')
        edge = ' stroke="#c00000" stroke-width="2"' if span.is_error else ""
        colour = COLOURS.get(span.name, "#404040")
        parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="18" rx="2" fill="{colour}"{edge}/>')
        told = ", ".join(text.format(span.attributes[key]) for key, text in TOLD if key in span.attributes)
        label = escape(
            f"{(span.end_ns - span.start_ns) / 1e6:.1f} ms" + (f" · {told}" if told and span is not call else "")
        )
        if 6.2 * len(label) < width:
            parts.append(f'<text x="{x + 5:.1f}" y="{y + 13}" fill="#ffffff">{label}</text>')
        elif x + width + 6.2 * len(label) < WIDTH:
            parts.append(f'<text x="{x + width + 5:.1f}" y="{y + 13}" fill="#333">{label}</text>')
        else:
            parts.append(f'<text x="{x - 5:.1f}" y="{y + 13}" fill="#333" text-anchor="end">{label}</text>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(svg(real_trace()))
