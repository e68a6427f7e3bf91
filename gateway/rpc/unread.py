"""Calls that have their status and are not over, because their callers do not take what was sent before it.

HTTP/2 sends a status behind the messages of its stream, and these wait for the caller's window. Until then the library
keeps the call, and its place among those that the server lets in at once; it has no way to end one call from here, and
pings do not tell, for the caller's library answers them. Callers that take nothing could so keep everybody out. When
there are too many such calls, the connections with the most of them are hung up: their sockets are shut down, as if
their callers had gone.

Knows no requests. A connection on a unix socket has no name by which it could be told from others: it is left alone.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import structlog

from octavo.gateway.rpc.connections import Address, address_of, hang_up

log = structlog.get_logger(__name__)
MAX_UNREAD = 512  # below what the server lets in besides requests in flight
PATIENCE_S = 2.0  # how long a status may be on its way before it counts
INTERVAL_S = 0.5

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class UnreadEndings(grpc.aio.ServerInterceptor):
    """One per gateway, on all servers of callers, outside of all other interceptors. Times are monotonic seconds."""

    def __init__(self, *, max_unread: int = MAX_UNREAD, patience_s: float = PATIENCE_S) -> None:
        self.num_hung_up = 0  # connections
        self._max_unread = max_unread
        self._patience_s = patience_s
        self._open: dict[Context, None] = {}
        self._unread_since_s: dict[Context, float] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Follow the call from its handler's beginning until nothing of it is left to send."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming is False:
            return handler  # the guard makes all of them streams of requests
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(
                self._followed(handler.stream_stream), handler.request_deserializer, handler.response_serializer
            )
        return grpc.stream_unary_rpc_method_handler(
            self._followed(handler.stream_unary), handler.request_deserializer, handler.response_serializer
        )

    async def run(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            await self.look()

    async def look(self) -> None:
        """Hang up where too many calls wait for their callers."""
        worst = self.choose(time.monotonic())
        if not worst:
            return
        num_hung_up = await asyncio.to_thread(hang_up, worst)
        self.num_hung_up += num_hung_up
        log.warning("unread_endings", unread=len(self._unread_since_s), connections=num_hung_up)

    def choose(self, now_s: float) -> set[Address]:
        """Connections to hang up: those with the most calls that waited too long, until few enough are left."""
        for context in self._open:
            if context.done():  # its status was handed to the library
                self._unread_since_s.setdefault(context, now_s)
        late = [context for context, since_s in self._unread_since_s.items() if now_s - since_s >= self._patience_s]
        num_left, worst = len(late), set[Address]()
        if num_left <= self._max_unread:
            return worst
        counts = Counter(address for context in late if (address := address_of(context.peer())) is not None)
        for address, count in counts.most_common():
            if num_left <= self._max_unread:
                break
            worst.add(address)
            num_left -= count
        return worst

    def _followed(self, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        if asyncio.iscoroutinefunction(behaviour):

            async def answer(request: Any, context: Context) -> Any:
                self._follow(context)
                return await behaviour(request, context)

            return answer

        async def stream(request: Any, context: Context) -> Any:
            self._follow(context)
            async for response in behaviour(request, context):
                yield response

        return stream

    def _follow(self, context: Context) -> None:
        self._open[context] = None
        context.add_done_callback(self._forget)  # type: ignore[arg-type]

    def _forget(self, context: Any) -> None:
        self._open.pop(context, None)
        self._unread_since_s.pop(context, None)
