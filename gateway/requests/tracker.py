"""Which requests are in flight: they enter, may be failed or aborted in any state, and leave exactly once.

A `PreparingRequest` has no worker yet, a `TrackedRequest` has one. Each dialect makes its own messages; the loop that
writes and counts them (`stream_response`) is here. Must not know what is sent to workers (`gateway.requests.submit`,
`gateway.requests.embedding`), nor text (`gateway.requests.input_processor`).
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from octavo.gateway.auth.authenticator import id_in, is_of_tenant
from octavo.gateway.config import RequestLimits
from octavo.gateway.errors import Draining, RequestAborted, RequestError, SlowConsumer, TenantLimit
from octavo.gateway.observability.meters import GatewayMeters, ModelMeters, TenantMeters
from octavo.gateway.requests.admission import Admission, ConnectionsInUse, TenantQuotas
from octavo.gateway.requests.spans import trace_request
from octavo.gateway.rpc.interceptor import RpcScope, Writer
from octavo.gateway.streams.output_processor import Piece
from octavo.gateway.streams.stream import OutputStream, OutputStreams
from octavo.gateway.workers.pool import WorkerPool
from octavo.gateway.workers.views import WorkerView
from octavo.wire.messages import ModelCard, SamplingParams


@dataclass(slots=True, eq=False)
class PreparingRequest:
    """A request that no worker has yet, or an embedding. error: why the gateway cancelled the task. num_used_tokens:
    charged to the tenant if it ends here. model: set once a worker has a part of it. is_begun: a worker computes it."""

    task: "asyncio.Task[object]"
    scope: RpcScope
    num_outputs: int = 1
    error: RequestError | None = None
    num_used_tokens: int = 0
    model: str = ""
    is_begun: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class TrackedRequest:
    """A request that a worker has. Times are monotonic seconds.

    worker: the first one chosen. sent_s: when it was sent there. task: answers the RPC. outputs: pool handle and stream
    of each. sampling: of output 0; later outputs draw with the seeds that follow. prompt_text, prompt_ids: empty unless
    the caller asked for them. meters: the model's. tenant_meters: None if callers are not identified.
    """

    scope: RpcScope
    worker: WorkerView
    outputs: tuple[tuple[int, OutputStream], ...]
    sampling: SamplingParams
    num_prompt_tokens: int
    sent_s: float
    task: "asyncio.Task[object]"
    meters: ModelMeters
    tenant_meters: TenantMeters | None = None
    prompt_text: str = ""
    prompt_ids: Sequence[int] = ()
    last_message_s: dict[int, float] = field(default_factory=dict)  # by output, once it has had one
    num_complete: int = 0  # outputs completely sent
    backstop: asyncio.TimerHandle | None = None  # ends the outputs if the worker misses the deadline

    @property
    def request_id(self) -> str:
        """The caller's id, or the one drawn for it."""
        return self.scope.request_id

    @property
    def card(self) -> ModelCard:
        """The model's card."""
        return self.worker.card

    @property
    def stream(self) -> OutputStream:
        """The stream of output 0."""
        return self.outputs[0][1]

    @property
    def streams(self) -> list[OutputStream]:
        """The stream of each output."""
        return [stream for _, stream in self.outputs]

    def worker_id(self, index: int = 0) -> str:
        """The worker that has the output, or had it last."""
        return self.streams[index].worker_id or self.worker.worker_id

    @property
    def num_tokens(self) -> int:
        """Tokens generated in all outputs."""
        return sum(stream.processor.num_tokens for stream in self.streams)

    # ------------------------------------------------------------ ends that come from the gateway

    def end_at_deadline(self, figures_s: float) -> None:
        """The deadline has passed and the worker has not ended it. A partial answer waits figures_s for its figures."""
        for stream in self.streams:
            stream.end_at_deadline()
        self.backstop = asyncio.get_running_loop().call_later(figures_s, self._stop_waiting)

    def _stop_waiting(self) -> None:
        for stream in self.streams:
            stream.stop_waiting_for_figures()

    def fail(self, error: RequestError) -> None:
        """End all outputs. A task blocked in a write is cancelled and finds the error in the stream: a caller that does
        not read would otherwise keep even a complete output open."""
        for stream in self.streams:
            stream.fail(error)
        if self.stream.write_since_s:
            self.interrupt(error)

    def interrupt(self, error: RequestError) -> None:
        """Cancel the task even if its output is complete, because the caller does not read it."""
        self.stream.error = self.stream.error or error
        self.task.cancel()

    def error_behind(self) -> BaseException:
        """Why the task was cancelled: the error in a stream, or CancelledError if the caller is gone."""
        error = next((stream.error for stream in self.streams if stream.error), None)
        if error is None:
            return asyncio.CancelledError()
        current_task().uncancel()
        return error

    # ------------------------------------------------------------ what the caller gets

    async def write(self, writer: Writer, message: Any) -> None:
        """Write a message, marked as pending so that stalled writes can be found."""
        self.stream.write_since_s = time.monotonic()
        await writer.write(message)
        self.stream.write_since_s = 0.0

    async def write_piece(self, writer: Writer, message: Any, piece: Piece, index: int = 0) -> None:
        """Write the message made of an output's piece, and count the piece."""
        now_s = time.monotonic()
        await self.write(writer, message)
        self.scope.tokens_delivered += piece.num_tokens
        self.count_piece(piece, now_s, index)

    def count_piece(self, piece: Piece, now_s: float, index: int = 0) -> None:
        """Count a piece that was sent or collected. now_s: monotonic."""
        meters, num_tokens, last_s = self.meters, piece.num_tokens, self.last_message_s.get(index)
        meters.messages += 1
        self._count_generated(num_tokens)
        if not self.last_message_s:
            meters.time_to_first_token.observe(now_s - self.scope.started_s)
        elif last_s is not None and num_tokens:
            meters.inter_token.observe((now_s - last_s) / num_tokens, num_tokens)
        self.last_message_s[index] = now_s

    def _count_generated(self, num_tokens: int) -> None:
        self.meters.generation_tokens += num_tokens
        if self.tenant_meters is not None:
            self.tenant_meters.generation_tokens += num_tokens

    def count_finished(self, reason: str, index: int = 0) -> None:
        """Count an output that is complete and was sent. reason: an octavo.v1.FinishReason, in lower case."""
        meters = self.meters
        meters.finished[reason] += 1
        self._count_generated(self.streams[index].processor.num_undelivered)  # no text: in no piece
        meters.end_to_end.observe(time.monotonic() - self.scope.started_s)
        if (figures := self.streams[index].finished) is not None:
            meters.queue.observe(figures.queue_s)
        meters.request_prompt_tokens.observe(self.num_prompt_tokens)
        meters.request_generation_tokens.observe(self.streams[index].processor.num_tokens)
        self.num_complete += 1
        if self.num_complete == len(self.outputs):
            meters.request_max_generation_tokens.observe(max(stream.processor.num_tokens for stream in self.streams))


async def stream_response(tracked: TrackedRequest, writer: Writer, to_message: Callable[[Piece], Any]) -> None:
    """Write the single output of a request. Each message has all tokens that came while the previous one was written.
    Raises the RequestError that ended the output, after what came before it."""
    stream = tracked.stream
    while (piece := await stream.next()) is not None:
        await tracked.write_piece(writer, to_message(piece), piece)


async def stream_responses(
    tracked: TrackedRequest,
    writer: Writer,
    to_message: Callable[[int, Piece], Any],
    to_end: Callable[[int], Any],
) -> None:
    """Write several outputs, each followed by its end. Both callables get the output's index. Raises the RequestError
    that ended one of them."""
    streams = OutputStreams(tracked.streams)
    while (news := await streams.next()) is not None:
        index, piece = news
        if piece is None:
            await tracked.write(writer, to_end(index))
        else:
            await tracked.write_piece(writer, to_message(index, piece), piece, index)


class RequestTracker:
    """One per gateway process; every method on its event loop. Iterating gives the requests that workers have.

    Requests are identified by key (`RpcScope.key`): several tenants may have the same id in flight without learning of
    each other. write_stall_s: how long a message may wait to be read.
    """

    def __init__(self, *, pool: WorkerPool, limits: RequestLimits, meters: GatewayMeters) -> None:
        self.admission = Admission(max_requests=limits.max_requests, max_service_requests=limits.max_service_requests)
        self.quotas = TenantQuotas()
        self.connections = ConnectionsInUse()
        self.is_draining = False
        self.write_stall_s = limits.write_stall_s
        self._pool = pool
        self._meters = meters
        self._by_key: dict[str, TrackedRequest] = {}
        self._preparing: dict[str, PreparingRequest] = {}
        self._peer_of: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[TrackedRequest]:
        return iter(tuple(self._by_key.values()))

    def get(self, key: str) -> TrackedRequest | None:
        """The request, or None if no worker has it."""
        return self._by_key.get(key)

    @property
    def preparing(self) -> list[PreparingRequest]:
        """Requests that no worker has yet, and those answered by their own tasks (embeddings); oldest first."""
        return list(self._preparing.values())

    def at_workers(self) -> tuple[int, int]:
        """(number of requests that workers have, embeddings included; how many of those are begun)."""
        begun = [bool(each.stream.scheduled_s or each.stream.first_token_s) for each in self]
        begun += [each.is_begun for each in self.preparing if each.model]
        return len(begun), sum(begun)

    # ------------------------------------------------------------ in

    def check_open(self) -> None:
        """Raises Draining once shutdown has begun."""
        if self.is_draining:
            raise Draining("this gateway is shutting down")

    @contextmanager
    def enter(self, scope: RpcScope, *, num_outputs: int = 1) -> Iterator[PreparingRequest]:
        """A place for a request: kept until `close` if the block succeeds, given back if it raises. During the block
        `fail` cancels its task, and the block raises the error instead."""
        key, preparing = scope.key, PreparingRequest(current_task(), scope, num_outputs)
        self.admission.enter(key, num_outputs=num_outputs)
        self._peer_of[key] = scope.peer
        self.connections.begin(scope.peer)
        self._preparing[key] = preparing
        try:
            self.quotas.enter(key, scope.caller, _now_ns(), num_outputs=num_outputs)
            yield preparing
        except BaseException as error:
            self._leave(key, num_used=preparing.num_used_tokens)
            if isinstance(error, TenantLimit):
                self._meters.tenant_refusals += 1
            if isinstance(error, asyncio.CancelledError) and preparing.error is not None:
                preparing.task.uncancel()
                raise preparing.error from None
            raise
        finally:
            del self._preparing[key]

    @contextmanager
    def hold(self, scope: RpcScope) -> Iterator[PreparingRequest]:
        """`enter` for a request that ends with the block: the place is always given back."""
        with self.enter(scope) as preparing:
            yield preparing
        self._leave(scope.key, num_used=preparing.num_used_tokens)

    def place(self, scope: RpcScope, worker: WorkerView) -> None:
        """Count a request's outputs at a worker, or at another one if the first left. Raises QueueFull."""
        capacity = worker.capacity
        max_on_worker = capacity.max_num_seqs + capacity.max_waiting
        self.admission.place(scope.key, worker.worker_id, max_on_worker=max_on_worker)

    def reserve(self, scope: RpcScope, num_tokens: int) -> None:
        """Charge the prompt and max_tokens of every output to the tenant's quota. Charging again, for another worker,
        costs nothing. Raises TenantLimit, ExceedsCapacity."""
        self.quotas.reserve(scope.key, num_tokens, _now_ns())

    def add(self, tracked: TrackedRequest) -> None:
        """A worker has the request. Its key is unique: admission checks that."""
        self._by_key[tracked.scope.key] = tracked

    # ------------------------------------------------------------ out

    def fail(self, request_id: str, error: RequestError) -> int:
        """End all requests with this id, of every tenant, whatever their state. Returns how many."""
        keys = [key for key in self.admission.request_ids() if id_in(key) == request_id]
        return sum(self._fail(key, error) for key in keys)

    def fail_all(self, error: RequestError) -> int:
        """End every request. Returns how many."""
        return sum(self._fail(key, error) for key in self.admission.request_ids())

    def fail_stalled_writes(self, *, max_wait_s: float) -> int:
        """End requests whose caller has not taken a message for max_wait_s. Returns how many."""
        limit_s = time.monotonic() - max_wait_s
        stalled = [each for each in self if 0.0 < each.stream.write_since_s < limit_s]
        for each in stalled:
            each.interrupt(SlowConsumer(f"a message waited for more than {max_wait_s:g} s to be read"))
        return len(stalled)

    def _fail(self, key: str, error: RequestError) -> bool:
        tracked, preparing = self._by_key.get(key), self._preparing.get(key)
        if tracked is not None:
            tracked.fail(error)
        elif preparing is not None:
            preparing.error = error
            preparing.task.cancel()
        return tracked is not None or preparing is not None

    def abort(self, key: str) -> bool:
        """End a request at its caller's wish: it is cancelled at the worker at once, and the caller gets what came
        before and an end. False if it is not in flight."""
        error, tracked = RequestAborted("the request was aborted"), self._by_key.get(key)
        if tracked is None:
            return self._fail(key, error)
        for handle, stream in tracked.outputs:
            stream.fail(error)  # does not interrupt a message that is being written
            self._pool.cancel(handle)
        return True

    def abort_all(self, tenant: str | None) -> int:
        """Abort every request of a tenant (None: of all). Returns how many."""
        return sum(map(self.abort, [key for key in (*self._by_key, *self._preparing) if is_of_tenant(key, tenant)]))

    @contextmanager
    def closing(self, tracked: TrackedRequest) -> Iterator[None]:
        """Answer the request in the block; it is closed afterwards. If the task was cancelled for an error, raises that
        error in place of CancelledError."""
        try:
            yield
        except asyncio.CancelledError:
            raise tracked.error_behind() from None
        finally:
            self.close(tracked)

    def close(self, tracked: TrackedRequest) -> None:
        """The RPC is over: note its figures for the log, cancel running outputs, forget the request. Idempotent."""
        first_s = tracked.stream.first_token_s
        tracked.scope.log_fields |= {
            "model": tracked.card.name,
            "worker": tracked.worker_id(),
            "prompt_tokens": tracked.num_prompt_tokens,
            "completion_tokens": tracked.num_tokens,
            "first_token_s": round(first_s - tracked.scope.started_s, 4) if first_s else None,
        }
        if tracked.backstop is not None:
            tracked.backstop.cancel()
        trace_request(
            tracked.scope,
            tracked.card,
            tracked.streams,
            tracked.sampling,
            worker_id=tracked.worker.worker_id,
            sent_s=tracked.sent_s,
            num_prompt_tokens=tracked.num_prompt_tokens,
        )
        for handle, stream in tracked.outputs:
            if stream.finished is None:
                self._pool.cancel(handle)
            stream.fail(Draining("closed"))  # a no-op on a stream that has ended
        self._by_key.pop(tracked.scope.key, None)
        self._leave(tracked.scope.key, num_used=tracked.num_prompt_tokens + tracked.num_tokens)

    async def write(self, writer: Writer, message: Any) -> None:
        """Write a message of a stream that belongs to no request. Raises SlowConsumer if it waits too long."""
        try:
            async with asyncio.timeout(self.write_stall_s):
                await writer.write(message)
        except TimeoutError:
            raise SlowConsumer(f"a message waited for more than {self.write_stall_s:g} s to be read") from None

    def _leave(self, key: str, *, num_used: int) -> None:
        self.admission.leave(key)
        if (peer := self._peer_of.pop(key, None)) is not None:
            self.connections.end(peer)
        self.quotas.leave(key, num_used=num_used, now_ns=_now_ns())


def current_task() -> "asyncio.Task[object]":
    """The task that answers the current RPC."""
    task = asyncio.current_task()
    assert task is not None, "requests are submitted by tasks"
    return task


def _now_ns() -> int:
    """Monotonic time, as quotas count it."""
    return round(time.monotonic() * 1e9)
