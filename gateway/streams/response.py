"""What every dialect does with a live request: pump its pieces out, count them, and close it.

Must not know how a dialect's messages look.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc

from octavo.gateway.errors import RequestError
from octavo.gateway.observability.meters import ModelMeters
from octavo.gateway.requests.tracker import Desk, LiveRequest
from octavo.gateway.rpc.scope import RpcScope
from octavo.gateway.streams.output_processor import Piece
from octavo.gateway.streams.stream import OutputStreams
from octavo.wire.fault_points import fault_point

Context = grpc.aio.ServicerContext


async def pump(
    live: LiveRequest,
    scope: RpcScope,
    context: Context,
    meters: ModelMeters,
    to_message: Callable[[Piece], Any],
) -> None:
    """The hot path: one turn a message, however many tokens came while the last one was written. Raises the
    RequestError that ended the output, after what came before it."""
    stream = live.stream
    while (piece := await stream.next()) is not None:
        stream.write_since_s = now_s = time.monotonic()
        await context.write(to_message(piece))
        stream.write_since_s = 0.0
        fault_point("delivery.written")
        scope.tokens_delivered += piece.num_tokens
        count_piece(meters, live, piece, now_s)


async def pump_all(
    live: LiveRequest,
    scope: RpcScope,
    context: Context,
    meters: ModelMeters,
    to_message: Callable[[int, Piece], Any],
    to_end: Callable[[int], Any],
) -> None:
    """`pump` for several outputs, each with its end as soon as that is known. Both callables get the output's index.
    Raises the RequestError that ended one of them."""
    streams = OutputStreams(live.streams)
    while (news := await streams.next()) is not None:
        index, piece = news
        if piece is None:
            await write(live, context, to_end(index))
            continue
        now_s = time.monotonic()
        await write(live, context, to_message(index, piece))
        fault_point("delivery.written")
        scope.tokens_delivered += piece.num_tokens
        count_piece(meters, live, piece, now_s)


async def write(live: LiveRequest, context: Context, message: Any) -> None:
    """Outside the hot path: with the mark that lets a stuck write be found."""
    live.stream.write_since_s = time.monotonic()
    await context.write(message)
    live.stream.write_since_s = 0.0


def count_piece(meters: ModelMeters, live: LiveRequest, piece: Piece, now_s: float) -> None:
    """A piece went out, or was collected. now_s: monotonic."""
    meters.messages += 1
    num_tokens = piece.num_tokens
    meters.generation_tokens += num_tokens
    if live.last_message_s:
        if num_tokens:
            meters.inter_token.observe((now_s - live.last_message_s) / num_tokens, num_tokens)
    else:
        meters.time_to_first_token.observe(now_s - live.arrived_s)
    live.last_message_s = now_s


def count_finished(meters: ModelMeters, live: LiveRequest, reason: str, index: int = 0) -> None:
    """An output is complete and was sent. reason: of octavo.v1.FinishReason, in lower case."""
    meters.finished[reason] += 1
    meters.end_to_end.observe(time.monotonic() - live.arrived_s)
    meters.request_prompt_tokens.observe(live.num_prompt_tokens)
    meters.request_generation_tokens.observe(live.streams[index].assembler.num_tokens)
    live.num_complete += 1
    if live.num_complete == len(live.streams):
        meters.request_max_generation_tokens.observe(max(stream.assembler.num_tokens for stream in live.streams))


def close(desk: Desk, live: LiveRequest, scope: RpcScope) -> None:
    """The RPC is over, however: what its log line says, and nothing held any more."""
    first_s = live.stream.first_token_s
    scope.log_fields |= {
        "model": live.card.name,
        "worker": live.worker_id(),
        "prompt_tokens": live.num_prompt_tokens,
        "completion_tokens": live.num_tokens,
        "first_token_s": round(first_s - live.arrived_s, 4) if first_s else None,
    }
    desk.close(live)


def error_behind(live: LiveRequest) -> BaseException:
    """Why the task was cancelled: an error that we put into the stream, or the caller is gone."""
    error: RequestError | None = next((stream.error for stream in live.streams if stream.error), None)
    task = asyncio.current_task()
    if error is None:
        return asyncio.CancelledError()
    if task is not None:
        task.uncancel()
    return error
