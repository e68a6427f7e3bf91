"""Calls of a browser as the gateway's own calls: a POST with JSON becomes an RPC, its messages server-sent events.

The RPC passes the same interceptor as one over gRPC: keys, scopes, checks of fields, statuses, the line in the log.
Must not know pages.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import structlog
from google.protobuf import json_format
from google.protobuf.message import Message

from octavo.gateway.rpc.interceptor import StatusInterceptor
from octavo.gateway.rpc.status import REASON_TRAILER

log = structlog.get_logger(__name__)
_CREDENTIALS = ("authorization", "x-api-key")  # what of a request's headers a call gets to see
_C = grpc.StatusCode
_HTTP: dict[grpc.StatusCode, int] = {
    _C.INVALID_ARGUMENT: 400,
    _C.UNAUTHENTICATED: 401,
    _C.PERMISSION_DENIED: 403,
    _C.NOT_FOUND: 404,
    _C.ALREADY_EXISTS: 409,
    _C.RESOURCE_EXHAUSTED: 429,
    _C.UNIMPLEMENTED: 501,
    _C.UNAVAILABLE: 503,
    _C.DEADLINE_EXCEEDED: 504,
}


@dataclass(frozen=True, slots=True)
class CallFailed(Exception):
    """The RPC ended with a status. reason: of octavo.v1.ErrorReason, without its prefix."""

    code: grpc.StatusCode
    message: str
    reason: str = ""

    @property
    def http_status(self) -> int:
        """The nearest HTTP status."""
        return _HTTP.get(self.code, 500)

    def as_json(self) -> str:
        """The error for the browser."""
        return json.dumps({"code": self.code.name, "reason": self.reason, "message": self.message})


class Method:
    """A streaming RPC. behaviour(request, context): a servicer's method, which writes its messages."""

    def __init__(
        self, name: str, request_type: type[Message], behaviour: Callable[..., Any], interceptor: StatusInterceptor
    ) -> None:
        self.name = name
        self._request_type = request_type
        self._handler: Any = grpc.unary_stream_rpc_method_handler(behaviour, request_type.FromString)
        self._interceptor = interceptor

    def parse(self, body: bytes) -> bytes:
        """The serialized request of a JSON body. Raises CallFailed."""
        request = self._request_type()
        try:
            json_format.Parse(body, request, max_recursion_depth=20)
        except (json_format.ParseError, ValueError, RecursionError) as error:
            raise CallFailed(_C.INVALID_ARGUMENT, f"the body is no {request.DESCRIPTOR.name}: {error}") from None
        return request.SerializeToString()

    async def call(self, request: bytes, headers: Sequence[tuple[str, str]], peer: str) -> AsyncIterator[str]:
        """The response messages in JSON, one line each, as they come; leaving early ends the call. Raises
        CallFailed."""
        metadata = tuple(pair for pair in headers if pair[0] in _CREDENTIALS)
        context = _Context(request, metadata, peer)
        details: Any = type("Details", (), {"method": self.name, "invocation_metadata": metadata})()

        async def continuation(_: Any) -> Any:
            return self._handler

        handler: Any = await self._interceptor.intercept_service(continuation, details)
        task = asyncio.create_task(_run(handler.stream_stream, context), name=f"page: {self.name}")
        try:
            while (message := await context.messages.get()) is not None:
                yield json.dumps(plain(message), separators=(",", ":"))
            if context.failure is not None:
                raise context.failure
        finally:
            context.is_gone = not task.done()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def plain(message: Message) -> dict[str, Any]:
    """The set fields of a message without maps and bytes; enums and 64-bit integers as numbers. json_format, which
    calls Python for each element, takes more than twice the time."""
    row: dict[str, Any] = {}
    for field, value in message.ListFields():
        if field.message_type is None:
            row[field.name] = list(value) if field.is_repeated else value
        else:
            row[field.name] = [plain(each) for each in value] if field.is_repeated else plain(value)
    return row


async def _run(behaviour: Callable[..., Any], context: "_Context") -> None:
    """Run the RPC. It is only cancelled if the browser has left, so nobody waits for a status then."""
    try:
        with contextlib.suppress(grpc.aio.AbortError):  # the context has its status
            await behaviour(None, context)
    except Exception as error:  # of what stands around the handler, whose own have a status
        log.error("defect", exc_info=error)
        context.failure = CallFailed(_C.INTERNAL, "internal error; the server's log has it")
    await context.messages.put(None)


class _Context:
    """A call's context, shaped like grpc.aio.ServicerContext. A write waits until the previous message was taken, so
    that a slow browser only slows its own stream, as over gRPC."""

    def __init__(self, request: bytes, metadata: Sequence[tuple[str, str]], peer: str) -> None:
        self.messages: asyncio.Queue[Message | None] = asyncio.Queue(maxsize=1)
        self.failure: CallFailed | None = None
        self.is_gone = False
        self._request = request
        self._metadata = metadata
        self._peer = peer

    def peer(self) -> str:
        return self._peer

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        return self._metadata

    def trailing_metadata(self) -> tuple[()]:
        return ()

    def peer_identities(self) -> None:
        return None

    def time_remaining(self) -> None:
        return None

    async def read(self) -> bytes:
        return self._request

    async def write(self, message: Message) -> None:
        await self.messages.put(message)

    async def send_initial_metadata(self, metadata: Any) -> None:
        if self.is_gone:
            raise ConnectionError("the browser has left")

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        await self.send_initial_metadata(())
        trailers: Mapping[str, Any] = dict(trailing_metadata)
        self.failure = CallFailed(code, details, str(trailers.get(REASON_TRAILER, "")))
        raise grpc.aio.AbortError
