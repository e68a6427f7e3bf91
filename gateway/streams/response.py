"""A request that a worker has, and the way of its pieces to the caller.

Every dialect writes its own messages; the loop that writes them, the counting and the marks are here.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc

from octavo.gateway.errors import RequestError
from octavo.gateway.observability.meters import ModelMeters
from octavo.gateway.rpc.scope import RpcScope
from octavo.gateway.streams.output_processor import Piece
from octavo.gateway.streams.stream import OutputStream, OutputStreams
from octavo.gateway.workers.views import WorkerView
from octavo.wire.messages import ModelCard, SamplingParams

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


@dataclass(slots=True, kw_only=True, eq=False)
class TrackedRequest:
    """One request that a worker has. Times are monotonic seconds.

    worker: its first, as it was chosen. sent_s: when it was sent there. task: the one that answers the RPC. outputs:
    the pool's handle and the stream of each. sampling: of output 0; the outputs after it draw with the seeds after
    its. prompt_text, prompt_ids: empty where the caller did not ask for them. meters: of its model.
    """

    scope: RpcScope
    worker: WorkerView
    outputs: tuple[tuple[int, OutputStream], ...]
    sampling: SamplingParams
    num_prompt_tokens: int
    sent_s: float
    task: "asyncio.Task[object]"
    meters: ModelMeters
    prompt_text: str = ""
    prompt_ids: Sequence[int] = ()
    last_message_s: float = 0.0
    num_complete: int = 0  # outputs that are complete and were sent
    backstop: asyncio.TimerHandle | None = None  # ends the outputs where the worker is late at the deadline

    @property
    def request_id(self) -> str:
        """The caller's, or the one that was drawn for it."""
        return self.scope.request_id

    @property
    def key(self) -> str:
        """Its id as no other tenant can have it."""
        return self.scope.key

    @property
    def arrived_s(self) -> float:
        """When the call began."""
        return self.scope.started_s

    @property
    def card(self) -> ModelCard:
        """Of its model."""
        return self.worker.card

    @property
    def stream(self) -> OutputStream:
        """Of output 0."""
        return self.outputs[0][1]

    @property
    def streams(self) -> list[OutputStream]:
        """Of each output."""
        return [stream for _, stream in self.outputs]

    def worker_id(self, index: int = 0) -> str:
        """The worker that has the output, or had it last."""
        return self.streams[index].worker_id or self.worker.worker_id

    @property
    def num_tokens(self) -> int:
        """Generated, in all outputs."""
        return sum(stream.processor.num_tokens for stream in self.streams)

    # ------------------------------------------------------------ ends that come from the gateway

    def end_at_deadline(self, figures_s: float) -> None:
        """The time is over and the worker has not said so. A partial answer waits figures_s for the worker's
        figures."""
        for stream in self.streams:
            stream.end_at_deadline()
        self.backstop = asyncio.get_running_loop().call_later(figures_s, self._stop_waiting)

    def _stop_waiting(self) -> None:
        for stream in self.streams:
            stream.stop_waiting_for_figures()

    def fail(self, error: RequestError) -> None:
        """End all outputs. A task that is in a write is cancelled and finds the error in the stream: a caller that does
        not read would keep even a complete output open."""
        for stream in self.streams:
            stream.fail(error)
        if self.stream.write_since_s:
            self.interrupt(error)

    def interrupt(self, error: RequestError) -> None:
        """Cancel the task though its output may be complete: the caller does not read it."""
        self.stream.error = self.stream.error or error
        self.task.cancel()

    def error_behind(self) -> BaseException:
        """Why the task was cancelled: an error that the gateway put into a stream, or the caller is gone."""
        error = next((stream.error for stream in self.streams if stream.error), None)
        task = asyncio.current_task()
        if error is None:
            return asyncio.CancelledError()
        if task is not None:
            task.uncancel()
        return error

    # ------------------------------------------------------------ what the caller gets

    async def write(self, context: Context, message: Any) -> None:
        """A message outside of the loop below, with the mark that lets a stuck write be found."""
        self.stream.write_since_s = time.monotonic()
        await context.write(message)
        self.stream.write_since_s = 0.0

    def count_piece(self, piece: Piece, now_s: float) -> None:
        """A piece went out, or was collected. now_s: monotonic."""
        meters, num_tokens = self.meters, piece.num_tokens
        meters.messages += 1
        meters.generation_tokens += num_tokens
        if self.last_message_s:
            if num_tokens:
                meters.inter_token.observe((now_s - self.last_message_s) / num_tokens, num_tokens)
        else:
            meters.time_to_first_token.observe(now_s - self.arrived_s)
        self.last_message_s = now_s

    def count_finished(self, reason: str, index: int = 0) -> None:
        """An output is complete and was sent. reason: of octavo.v1.FinishReason, in lower case."""
        meters = self.meters
        meters.finished[reason] += 1
        meters.end_to_end.observe(time.monotonic() - self.arrived_s)
        meters.request_prompt_tokens.observe(self.num_prompt_tokens)
        meters.request_generation_tokens.observe(self.streams[index].processor.num_tokens)
        self.num_complete += 1
        if self.num_complete == len(self.outputs):
            meters.request_max_generation_tokens.observe(max(stream.processor.num_tokens for stream in self.streams))


async def stream_response(tracked: TrackedRequest, context: Context, to_message: Callable[[Piece], Any]) -> None:
    """Write the one output of a request: one turn a message, however many tokens came while the last one was written.
    Raises the RequestError that ended the output, after what came before it."""
    scope, stream = tracked.scope, tracked.stream
    while (piece := await stream.next()) is not None:
        stream.write_since_s = now_s = time.monotonic()
        await context.write(to_message(piece))
        stream.write_since_s = 0.0
        scope.tokens_delivered += piece.num_tokens
        tracked.count_piece(piece, now_s)


async def stream_responses(
    tracked: TrackedRequest,
    context: Context,
    to_message: Callable[[int, Piece], Any],
    to_end: Callable[[int], Any],
) -> None:
    """The same for several outputs, each with its end as soon as that is known. Both callables get the output's index.
    Raises the RequestError that ended one of them."""
    streams = OutputStreams(tracked.streams)
    while (news := await streams.next()) is not None:
        index, piece = news
        if piece is None:
            await tracked.write(context, to_end(index))
            continue
        now_s = time.monotonic()
        await tracked.write(context, to_message(index, piece))
        tracked.scope.tokens_delivered += piece.num_tokens
        tracked.count_piece(piece, now_s)
