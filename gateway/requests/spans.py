"""What a trace records of a request once it has ended: spans of its stages, and figures by the GenAI conventions.

    RPC ─┬─ prepare     the gateway: checks, template, tokens, admission, routing
         ├─ queue       at the worker, until the first step that has it
         ├─ prefill     until the first token
         ├─ decode      until the last
         │   └─ preemption   without a slot, inside of prefill or decode
         └─ migration   between a worker that was lost and the next, which has a queue, prefill and decode of its own

If a worker sent its figures (`wire.messages.Finished`), times are its own, counted from when the request was sent to
it: no two clocks are compared. For a worker that was lost, times are what the gateway saw. Called once for a request,
never for a token.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.gateway.observability.tracing import Attributes, CallTrace
from octavo.gateway.rpc.interceptor import RpcScope
from octavo.gateway.streams.stream import Move, OutputStream
from octavo.wire.messages import Finished, ModelCard, SamplingParams

LOST = "WORKER_LOST"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One output, or one embedding input, on its way through workers. worker_id: the first one. scheduled_s,
    first_token_s: when the gateway learned of them; 0.0: not yet. figures: the last worker's, if they came. Times are
    monotonic seconds."""

    worker_id: str
    sent_s: float
    ended_s: float
    moves: Sequence[Move]
    scheduled_s: float = 0.0
    first_token_s: float = 0.0
    figures: Finished | None = None


def trace_request(
    scope: RpcScope,
    card: ModelCard,
    streams: Sequence[OutputStream],
    sampling: SamplingParams,
    *,
    worker_id: str,
    sent_s: float,
    num_prompt_tokens: int,
) -> None:
    """Record a request that a worker had, however it ended. worker_id: its first worker."""
    trace = scope.trace
    if trace is None or not trace.is_kept:
        return
    trace.span("prepare", scope.started_s, sent_s, {})
    now_s = time.monotonic()
    for index, stream in enumerate(streams):
        timeline = Timeline(
            worker_id=worker_id, sent_s=sent_s, ended_s=now_s, moves=stream.moves,
            scheduled_s=stream.scheduled_s, first_token_s=stream.first_token_s, figures=stream.finished,
        )  # fmt: skip
        _trace_timeline(trace, index, timeline)
    first_s = streams[0].first_token_s
    figures = [stream.finished for stream in streams if stream.finished is not None]
    trace.set_attributes(
        _names(scope, trace.operation, card)
        | {
            "gen_ai.request.choice.count": len(streams),
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
            "gen_ai.usage.input_tokens": num_prompt_tokens,
            "gen_ai.usage.output_tokens": sum(stream.processor.num_tokens for stream in streams),
            "gen_ai.usage.cache_read.input_tokens": streams[0].finished.cached_tokens if streams[0].finished else 0,
            "gen_ai.response.finish_reasons": [reason for each in streams if (reason := _reason(each))],
            "octavo.preemptions": sum(each.preemptions for each in figures),
            "octavo.migrations": sum(len(stream.moves) for stream in streams),
        }
        | ({"gen_ai.server.time_to_first_token": first_s - scope.started_s} if first_s else {})
    )


def trace_embeddings(scope: RpcScope, card: ModelCard, timelines: Sequence[Timeline], *, num_tokens: int) -> None:
    """Record a call's embedding inputs. num_tokens: of all inputs."""
    trace = scope.trace
    if trace is None or not trace.is_kept or not timelines:
        return
    trace.span("prepare", scope.started_s, min(each.sent_s for each in timelines), {})
    for index, each in enumerate(timelines):
        _trace_timeline(trace, index, each)
    trace.set_attributes(_names(scope, "embeddings", card) | {"gen_ai.usage.input_tokens": num_tokens})


def _names(scope: RpcScope, operation: str, card: ModelCard) -> dict[str, "str | int | float | bool | list[str]"]:
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "octavo",
        "gen_ai.request.model": card.name,
        "gen_ai.response.model": card.name,
        "gen_ai.response.id": scope.request_id,
    }


def _reason(stream: OutputStream) -> str:
    """Why an output ended; empty if it was cut off."""
    if stream.processor.match is not None:
        return "stop"
    if stream.finished is None or stream.error is not None:
        return ""
    return "tool_calls" if stream.processor.num_tool_calls else stream.finished.reason.name.lower()


def _trace_timeline(trace: CallTrace, index: int, timeline: Timeline) -> None:
    since_s, worker_id = timeline.sent_s, timeline.worker_id
    for move in timeline.moves:
        common: dict[str, str | int] = {"octavo.output.index": index, "octavo.worker.id": worker_id}
        _trace_marks(trace, since_s, move.lost_s, timeline, common, error=LOST)
        trace.span("migration", move.lost_s, move.moved_s, {**common, "octavo.worker.next_id": move.worker_id})
        since_s, worker_id = move.moved_s, move.worker_id
    common = {"octavo.output.index": index, "octavo.worker.id": worker_id}
    if timeline.figures is None:
        _trace_marks(trace, since_s, timeline.ended_s, timeline, common)
    else:
        _trace_figures(trace, since_s, timeline.figures, common)


def _trace_marks(
    trace: CallTrace, since_s: float, until_s: float, timeline: Timeline, common: Attributes, *, error: str = ""
) -> None:
    """Spans for a worker that sent no figures, from what the gateway saw. Marks before since_s belong to an earlier
    worker."""
    marks = (timeline.scheduled_s, timeline.first_token_s)
    begun_s, first_s = (min(max(mark or until_s, since_s), until_s) for mark in marks)
    begun_s = min(begun_s, first_s)
    phases = [("queue", since_s, begun_s), ("prefill", begun_s, first_s), ("decode", first_s, until_s)]
    phases = [phase for phase in phases if phase[2] > phase[1]] or [("queue", since_s, until_s)]
    for name, start_s, end_s in phases:
        trace.span(name, start_s, end_s, common, error=error if end_s == until_s else "")


def _trace_figures(trace: CallTrace, since_s: float, figures: Finished, common: Attributes) -> None:
    begun_s = since_s + figures.queue_s
    first_s = begun_s + figures.prefill_s
    trace.span("queue", since_s, begun_s, common)
    if not figures.prefill_s:
        return  # it was never scheduled
    prefill = trace.span(
        "prefill",
        begun_s,
        first_s,
        {
            **common,
            "gen_ai.usage.input_tokens": figures.prompt_tokens,
            "octavo.cached_tokens": figures.cached_tokens,
            "octavo.computed_tokens": figures.computed_tokens,
        },
    )
    decode = prefill
    if figures.completion_tokens:
        tokens = {**common, "gen_ai.usage.output_tokens": figures.completion_tokens}
        decode = trace.span("decode", first_s, first_s + figures.decode_s, tokens)
    for lost_s, back_s in figures.preempted:
        inside = prefill if since_s + lost_s < first_s else decode
        trace.span("preemption", since_s + lost_s, since_s + back_s, common, inside=inside)
