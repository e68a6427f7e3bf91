"""The interceptor around every RPC, and the scope that it opens; libraries' services (health, reflection) included.

The interceptor identifies the caller and reads the message; whatever the handler raises becomes exactly one status,
never UNKNOWN. It is the one place where an RPC's end is counted and logged. The scope is a context variable, because
the signatures of libraries' handlers have no room for it. Must not know requests, nor workers.
"""

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
import structlog

from octavo.gateway.auth.authenticator import UNIDENTIFIED, Authenticator, Caller
from octavo.gateway.errors import (
    DeadlinePassed,
    ExceedsCapacity,
    InternalDefect,
    InvalidRequest,
    MalformedMessage,
    as_exception,
)
from octavo.gateway.observability.meters import GatewayMeters
from octavo.gateway.observability.tracing import CallTrace, Tracing
from octavo.gateway.rpc.connections import Context, OpenCalls
from octavo.gateway.rpc.status import is_expected, status_of
from octavo.gateway.validation.fields import REQUEST_ID

log = structlog.get_logger("gateway.request")
_QUIET_PREFIXES = ("/grpc.health.", "/grpc.reflection.")
# Calls whose request has not arrived; beyond it the oldest is ended. Smaller than the server's room besides requests in
# flight, so that callers that only open calls cannot keep others out.
MAX_WAITS = 512
MODEL_HEADER = "x-model"  # for contracts without a field for it; read if the request names no model
_MAX_MODEL = 256  # characters
_EXPIRED, _LEFT = ("DEADLINE_EXCEEDED", "DEADLINE"), ("CANCELLED", "CLIENT")
# A client resets the call at its deadline, which may be earlier than ours: its timer started one network trip before,
# and gRPC rounds `grpc-timeout` up by as much as 1 %.
_EARLY_S, _EARLY_SHARE = 0.05, 0.02


Parse = Callable[[Any], Any]
ReadRequest = Callable[[Any, Context], Awaitable[Any]]  # from the library's request iterator


class Writer(Protocol):
    """Takes a call's messages: its context, or what several requests of one call share."""

    async def write(self, message: Any, /) -> None:
        """Returns when there is room for more."""


@dataclass(slots=True, kw_only=True, eq=False)
class RpcScope:
    """The context of one RPC. Filled in on the way; the interceptor reads it for trailers, metrics and the final log
    line.

    started_s: monotonic.
    wire_timeout_s: the call's own deadline, in seconds from its start; None: none.
    model: from the call's metadata or its listener, for requests that name none.
    tokens_delivered: generated tokens in messages that were sent.
    peer: gRPC's name for the other end of the connection.
    """

    method: str
    caller: Caller = UNIDENTIFIED
    peer: str = ""
    model: str = ""
    wire_timeout_s: float | None = None
    # A lambda, so that `time.monotonic` is looked up at each call: a simulation replaces it.
    started_s: float = field(default_factory=lambda: time.monotonic())
    request_id: str = ""
    tokens_delivered: int = 0
    reason: str = ""  # why the request failed, if the call's contract requires status OK all the same
    log_fields: dict[str, object] = field(default_factory=dict)
    trace: CallTrace | None = None  # None if traces are off
    traceparent: str = ""  # the span's, for the worker

    def adopt_request_id(self, request_id: str) -> None:
        """Use the caller's request id before the request is validated. A malformed id is kept out of trailers, which
        gRPC would refuse to send, and out of the log; validation then rejects it by name."""
        if REQUEST_ID(request_id) is None:
            self.request_id = request_id

    @property
    def key(self) -> str:
        """The request id, made unique across tenants."""
        return self.caller.key_of(self.request_id)


current_rpc: ContextVar[RpcScope] = ContextVar("current_rpc")


class RequestWaits:
    """Bounds the waits for unary requests, by time and by number. They all may take equally long, so the oldest ends
    first, and one timer does for all: nearly every request is there at once, and a timer of its own would be one of the
    dearer parts of its call."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._due_s: dict[asyncio.Task[Any], float] = {}  # by the task that waits and was not ended, oldest first
        self._timer: asyncio.TimerHandle | None = None

    async def read(self, context: Context) -> Any:
        """The call's first message, or EOF. Raises DeadlinePassed if it does not come in time, or too many wait."""
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None, "the library answers each call in a task"
        self._due_s[task] = loop.time() + self.timeout_s
        if self._timer is None:
            self._timer = loop.call_later(self.timeout_s, self._end_overdue)
        if len(self._due_s) > MAX_WAITS:
            self._end(next(iter(self._due_s)))
        try:
            return await context.read()
        except asyncio.CancelledError:
            if task not in self._due_s and not task.uncancel():  # else the call was cancelled, too
                raise DeadlinePassed("the request did not come in time") from None
            raise
        finally:
            self._due_s.pop(task, None)

    def _end_overdue(self) -> None:
        loop = asyncio.get_running_loop()
        for task in [task for task, due_s in self._due_s.items() if due_s <= loop.time()]:
            self._end(task)
        oldest_s = next(iter(self._due_s.values()), None)
        self._timer = None if oldest_s is None else loop.call_at(oldest_s, self._end_overdue)

    def _end(self, task: "asyncio.Task[Any]") -> None:
        del self._due_s[task]
        task.cancel()


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """One per gateway and authenticator. Callers that are refused get no further than this."""

    def __init__(
        self,
        meters: GatewayMeters,
        *,
        pushback_ms: int,
        authenticator: Authenticator | None = None,
        max_metadata_bytes: int = 16 * 1024,
        message_timeout_s: float = 20.0,
        model: str = "",
        tracing: Tracing | None = None,
        open_calls: OpenCalls | None = None,
        on_call: Callable[[], None] = lambda: None,
    ) -> None:
        """authenticator: None lets every caller call everything.
        message_timeout_s: how long a unary request may take to arrive.
        model: for calls that name none.
        tracing: None if traces are off.
        open_calls: holds each call from its beginning until nothing is left to send; None: not tracked.
        on_call: called whenever a call arrives.
        """
        self._on_call = on_call
        self._tracing = tracing
        self._open_calls = open_calls
        self._model = model
        self._waits = RequestWaits(message_timeout_s)
        self._max_metadata_bytes = max_metadata_bytes
        self._wrapped_handlers: dict[str, tuple[Any, Any]] = {}  # by method: the handler, and what wraps it
        self._meters = meters
        self._pushback_ms = pushback_ms
        self._authenticator = authenticator or Authenticator()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handler; an unknown method is answered by the library (UNIMPLEMENTED)."""
        self._on_call()
        handler = await continuation(handler_call_details)
        num_bytes = _metadata_bytes(handler_call_details.invocation_metadata)
        if num_bytes > self._max_metadata_bytes:
            return self._refusal(str(handler_call_details.method), num_bytes)
        if handler is None:
            return None
        method = str(handler_call_details.method)
        if not method.startswith(_QUIET_PREFIXES):
            self._meters.called.add(method)
        known = self._wrapped_handlers.get(method)
        if known is None or known[0] is not handler:
            known = self._wrapped_handlers[method] = handler, self._wrapped(handler, method)
        return known[1]

    def _refusal(self, method: str, num_bytes: int) -> "grpc.RpcMethodHandler[Any, Any]":
        """A handler that refuses oversized metadata: the library enforces the limit only once the client has
        acknowledged it. A streaming handler, so that it answers without waiting for a message."""

        async def refuse(request: Any, context: Context) -> bytes:
            raise ExceedsCapacity(f"{num_bytes} bytes of metadata exceed the {self._max_metadata_bytes} that are taken")

        return grpc.stream_unary_rpc_method_handler(self._coroutine(refuse, method, _whole_stream))

    def _wrapped(self, handler: Any, method: str) -> "grpc.RpcMethodHandler[Any, Any]":
        # A unary request is read here, as a stream of one, so that the caller is identified before its message is read
        # or parsed, and the wait for it is bounded. The library's own unary handlers wait for ever, and send no status
        # to a call that ends without a message.
        parse, serializer = _parser(handler.request_deserializer), handler.response_serializer
        if handler.unary_unary:
            return grpc.stream_unary_rpc_method_handler(
                self._coroutine(handler.unary_unary, method, self._single_message(parse)), None, serializer
            )
        if handler.unary_stream:
            return grpc.stream_stream_rpc_method_handler(
                self._streaming(handler.unary_stream, method, self._single_message(parse)), None, serializer
            )
        if handler.stream_stream:
            return grpc.stream_stream_rpc_method_handler(
                self._streaming(handler.stream_stream, method, _whole_stream), parse, serializer
            )
        return grpc.stream_unary_rpc_method_handler(
            self._coroutine(handler.stream_unary, method, _whole_stream), parse, serializer
        )

    def _single_message(self, parse: Parse) -> ReadRequest:
        async def read(_: Any, context: Context) -> Any:
            data = await self._waits.read(context)
            if data is grpc.aio.EOF:
                raise MalformedMessage("the call has no request")
            return parse(data)

        return read

    def _streaming(self, behaviour: Callable[..., Any], method: str, read: ReadRequest) -> Callable[..., Any]:
        if inspect.isasyncgenfunction(behaviour):
            return self._generator(behaviour, method, read)
        return self._coroutine(behaviour, method, read)

    def _coroutine(self, behaviour: Callable[..., Any], method: str, read: ReadRequest) -> Callable[..., Any]:
        async def wrapped(request: Any, context: Context) -> Any:
            scope = self._begin(method, context)
            try:
                scope.caller = self._authenticator.authenticate(method, context)
                scope.model = _named_model(context) or self._model
                response = await behaviour(await read(request, context), context)
            except BaseException as error:
                await self._end(error, scope, context)
                raise
            self._record(scope, "OK", scope.reason)
            return response

        return wrapped

    def _generator(
        self, behaviour: Callable[..., AsyncIterator[Any]], method: str, read: ReadRequest
    ) -> Callable[..., Any]:
        async def wrapped(request: Any, context: Context) -> AsyncIterator[Any]:
            scope = self._begin(method, context)
            try:
                scope.caller = self._authenticator.authenticate(method, context)
                scope.model = _named_model(context) or self._model
                async for response in behaviour(await read(request, context), context):
                    yield response
            except BaseException as error:
                await self._end(error, scope, context)
                raise
            self._record(scope, "OK", scope.reason)

        return wrapped

    def _begin(self, method: str, context: Context) -> RpcScope:
        if self._open_calls is not None:
            self._open_calls[context] = None
            context.add_done_callback(self._open_calls.pop)  # type: ignore[arg-type]
        scope = RpcScope(method=method, peer=context.peer(), wire_timeout_s=context.time_remaining())
        current_rpc.set(scope)  # each RPC has its own task, and so its own context
        if self._tracing is not None and not method.startswith(_QUIET_PREFIXES):
            scope.trace = self._tracing.begin(method, context.invocation_metadata() or (), scope.started_s)
            scope.traceparent = scope.trace.traceparent
            structlog.contextvars.bind_contextvars(trace_id=scope.trace.trace_id)
        return scope

    async def _end(self, error: BaseException, scope: RpcScope, context: Context) -> None:
        """Turn an exception into a status. Raises AbortError if a status was sent, CancelledError if the call is
        over."""
        if isinstance(error, grpc.aio.AbortError):
            self._record(scope, _code_of(context), "")
        elif isinstance(error, asyncio.CancelledError | GeneratorExit):
            # Nearly always the caller went away. If something else cancelled the task, the RPC is still open and its
            # caller would wait for ever without a status (grpc#29248). Trying to answer tells the two apart.
            if await _is_gone(context):
                self._record(scope, *_code_and_reason(scope, context))
            else:
                await self._abort(InternalDefect("the handler was cancelled"), scope, context)
        elif not isinstance(error, KeyboardInterrupt | SystemExit):
            # A panic in a Rust library is not an Exception; without a status that call would never end either.
            await self._abort(as_exception(error), scope, context)

    async def _abort(self, error: Exception, scope: RpcScope, context: Context) -> None:
        status = status_of(error, scope, pushback_ms=self._pushback_ms)
        set_before = tuple(context.trailing_metadata() or ())  # trailers that the handler set
        try:
            await context.abort(status.code, status.message, (*set_before, *status.trailers))
        except grpc.aio.AbortError:
            if not is_expected(error):
                log.error("defect", method=scope.method, request_id=scope.request_id, exc_info=error)
            self._record(scope, status.code.name, status.reason)
            raise
        except Exception:  # the library raises so where the RPC is over
            is_late = isinstance(error, DeadlinePassed)
            self._record(scope, *(_EXPIRED if is_late else _code_and_reason(scope, context)))
            raise asyncio.CancelledError from None

    def _record(self, scope: RpcScope, code: str, reason: str) -> None:
        """Count the call and log one line. Calls of libraries' services are only counted."""
        self._meters.rpcs[(scope.method, code, reason)] += 1
        if scope.trace is not None:
            scope.trace.end(code, reason)
        if scope.method.startswith(_QUIET_PREFIXES):
            return
        extra = {"reason": reason} if reason else {}
        if scope.caller.name:
            extra["caller"] = scope.caller.name
        log.info(
            "end",
            request_id=scope.request_id,
            method=scope.method.rpartition("/")[2],
            code=code,
            **extra,
            seconds=round(time.monotonic() - scope.started_s, 4),
            **scope.log_fields,
        )


def _code_and_reason(scope: RpcScope, context: Context) -> tuple[str, str]:
    """Code and reason of a call that this gateway did not end: its deadline passed, or its caller left."""
    left_s = context.time_remaining()
    if left_s is None or scope.wire_timeout_s is None:
        return _LEFT
    return _EXPIRED if left_s <= _EARLY_S + _EARLY_SHARE * scope.wire_timeout_s else _LEFT


def _code_of(context: Context) -> str:
    """The name of the code with which a handler ended the call itself; the library only keeps its number."""
    code = context.code()
    return next((each.name for each in grpc.StatusCode if code in (each, each.value[0])), "UNKNOWN")


def _named_model(context: Context) -> str:
    """The model named in the metadata; empty if none is. Raises InvalidRequest."""
    names = {str(value) for name, value in context.invocation_metadata() or () if name == MODEL_HEADER}
    if len(names) > 1:
        raise InvalidRequest.of(MODEL_HEADER, "two models are named")
    model = next(iter(names), "")
    if len(model) > _MAX_MODEL:
        raise InvalidRequest.of(MODEL_HEADER, f"has more than {_MAX_MODEL} characters")
    return model


async def _is_gone(context: Context) -> bool:
    """Whether headers can no longer be sent; False if they were sent before, since then it is unknown. Asking first
    avoids aborting calls whose caller is gone: each such abort leaves its trailers in gRPC's core, and floods of resets
    would fill memory."""
    try:
        await context.send_initial_metadata(())
    except grpc.aio.UsageError:
        return False
    except Exception:  # the library raises so where the RPC is over
        return True
    return False


def _metadata_bytes(metadata: Any) -> int:
    """Size as HTTP/2 counts it: names, values, and 32 bytes for each (RFC 9113, 6.5.2)."""
    return sum(len(name) + len(value) + 32 for name, value in metadata or ())


async def _whole_stream(requests: Any, context: Context) -> Any:
    return requests


def _parser(deserializer: Callable[[bytes], Any] | None) -> Parse:
    if deserializer is None:
        return bytes

    def parse(data: bytes) -> Any:
        try:
            return deserializer(data)
        except Exception:  # whatever the parser raises, it is the caller's bytes
            raise MalformedMessage("the request is no valid message of its type") from None

    return parse
