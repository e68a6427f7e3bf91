"""One ModelStreamInfer: many requests on one RPC, side by side, each with a scope and an end of its own."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import structlog
from octavo.kserve import inference_pb2 as oip

from gateway.dialects.kserve_messages import failed
from gateway.live import LiveRequest
from gateway.meters import GatewayMeters
from gateway.rpc.scope import RpcScope, current_rpc
from gateway.rpc.status import is_expected, status_of

log = structlog.get_logger("gateway.request")
MAX_SIDE_BY_SIDE = 256  # requests of one stream; the next is read when one of them has ended
_STATUS_HEADER = ("triton_grpc_error", "true")  # Triton's callers who want a status instead of a message


class StreamWriter:
    """Lets the answers of several requests onto one stream, one message at a time."""

    def __init__(self, context: grpc.aio.ServicerContext) -> None:
        self.context = context
        self._turn = asyncio.Lock()

    async def write(self, message: oip.ModelStreamInferResponse) -> None:
        """Returns when the reader has room for more."""
        async with self._turn:
            await self.context.write(message)

    async def write_of(self, live: LiveRequest, message: oip.ModelStreamInferResponse) -> None:
        """The same for an output, with the mark that lets a stuck write be found."""
        live.stream.write_since_s = time.monotonic()
        await self.write(message)
        live.stream.write_since_s = 0.0


Answer = Callable[[oip.ModelInferRequest, RpcScope, StreamWriter], Awaitable[None]]


class StreamOfRequests:
    """Owns the tasks of its requests; they end with it."""

    def __init__(self, scope: RpcScope, context: grpc.aio.ServicerContext, meters: GatewayMeters) -> None:
        self._scope = scope
        self._meters = meters
        self._writer = StreamWriter(context)
        self._wants_status = _STATUS_HEADER in tuple(context.invocation_metadata() or ())

    async def answer(self, requests: AsyncIterator[oip.ModelInferRequest], answer: Answer) -> None:
        """Until the caller has said everything and everything is answered. Raises what went wrong with a request only
        where the caller asked for statuses."""
        room = asyncio.Semaphore(MAX_SIDE_BY_SIDE)
        try:
            async with asyncio.TaskGroup() as tasks:
                async for request in requests:
                    await room.acquire()
                    task = tasks.create_task(self._answer_one(request, answer))
                    task.add_done_callback(lambda _: room.release())
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _answer_one(self, request: oip.ModelInferRequest, answer: Answer) -> None:
        scope = RpcScope(method=self._scope.method, caller=self._scope.caller, peer=self._scope.peer)
        current_rpc.set(scope)
        try:
            await answer(request, scope, self._writer)
        except Exception as error:
            if self._wants_status:
                raise
            await self._tell(error, request, scope)
        finally:
            self._scope.tokens_delivered += scope.tokens_delivered

    async def _tell(self, error: Exception, request: oip.ModelInferRequest, scope: RpcScope) -> None:
        status = status_of(error, scope, pushback_ms=0)
        if not is_expected(error):
            log.error("defect", method=scope.method, request_id=scope.request_id, exc_info=error)
        self._meters.rpcs[(scope.method, status.code.name, status.reason)] += 1
        log.info("request_failed", request_id=scope.request_id, code=status.code.name, reason=status.reason)
        await self._writer.write(failed(request, f"[{status.code.name}] {status.reason}: {status.message}"))
