"""One call: what HTTP/2 and grpc.aio do between a caller and the guarded handler, with a flow-control window.

Statuses that the library makes itself (CANCELLED, DEADLINE_EXCEEDED, UNKNOWN, a lost connection) are made here, as
grpc.aio makes them: a handler that raises ends in UNKNOWN, and one that lets CancelledError escape leaves its caller
waiting (grpc#29248).
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from octavo.v1 import inference_pb2 as pb
from sim.edges.fault_points import fault_point
from sim.edges.loop import SimLoop
from sim.journal import Journal

Handler = Callable[[Any, Any], Awaitable[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How a call ended. trailers: empty if the library made the status."""

    code: str
    message: str = ""
    trailers: dict[str, Any] = field(default_factory=dict)


class SimCall:
    """Both ends of a call. Unread messages can still be read after the status has arrived. on_closed: called when the
    handler is done."""

    def __init__(
        self,
        loop: SimLoop,
        journal: Journal,
        handler: Handler,
        request: Any,
        *,
        name: str,
        request_id: str,
        timeout_s: float | None,
        window_bytes: int,
        metadata: tuple[tuple[str, str], ...] = (),
        on_closed: Callable[["SimCall"], None] = lambda call: None,
    ) -> None:
        self.status: Status | None = None
        self.name = name
        self.request_id = request_id
        self._loop = loop
        self._journal = journal
        self._window_bytes = window_bytes
        self._metadata = metadata
        self._unread: deque[tuple[int, Any]] = deque()
        self._unread_bytes = 0
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._expires_s = None if timeout_s is None else loop.time() + timeout_s
        self._timer = None if timeout_s is None else loop.call_later(timeout_s, self._expire)
        self._no_room_before_s = 0.0
        self._task = asyncio.create_task(self._serve(handler, request), name=f"rpc {name}")
        self._task.add_done_callback(lambda _: on_closed(self))

    @property
    def is_closed(self) -> bool:
        """Whether the handler is done."""
        return self._task.done()

    # ------------------------------------------------------------ the caller's end

    async def read(self) -> Any | None:
        """The next message; None after the last one."""
        while not self._unread:
            if self.status is not None:
                return None
            self._news.clear()
            await self._news.wait()
        num_bytes, message = self._unread.popleft()
        self._unread_bytes -= num_bytes
        self._room.set()
        return message

    def cancel(self) -> None:
        """The caller goes away."""
        self._end_from_outside(Status(code="CANCELLED"))

    def stall(self, duration_s: float) -> None:
        """The caller reads nothing for this long."""
        self._no_room_before_s = self._loop.time() + duration_s
        self._loop.call_later(duration_s, self._room.set)

    @property
    def is_stalled(self) -> bool:
        """Whether the caller was ever told to stop reading for a while."""
        return self._no_room_before_s > 0

    def lose(self) -> None:
        """The gateway's process dies."""
        self._end_from_outside(Status(code="UNAVAILABLE", message="connection lost"))

    # ------------------------------------------------------------ grpc.aio.ServicerContext

    def time_remaining(self) -> float | None:
        """Seconds; None without a deadline."""
        return None if self._expires_s is None else max(0.0, self._expires_s - self._loop.time())

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """The caller's metadata."""
        return self._metadata

    def peer_identities(self) -> None:
        """There are no certificates."""

    def peer(self) -> str:
        """A name without an address, so that no connection is closed."""
        return "sim:"

    def trailing_metadata(self) -> tuple[()]:
        """Handlers set none here."""
        return ()

    async def send_initial_metadata(self, metadata: Any) -> None:
        """Ignored."""
        self._check_open()

    async def write(self, message: Any) -> None:
        """Waits for the reader while the window is full."""
        self._check_open()
        data = message.SerializeToString()
        while self._unread_bytes > self._window_bytes or self._loop.time() < self._no_room_before_s:
            self._room.clear()
            await self._room.wait()
            self._check_open()
        self._journal.note_bytes(f"message to {self.name}", data)
        self._unread.append((len(data), message))
        self._unread_bytes += len(data)
        self._news.set()
        await asyncio.sleep(0)
        if isinstance(message, pb.GenerateResponse) and message.HasField("delta"):
            fault_point("delivery.written")

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: Any = ()) -> None:
        """Always raises."""
        self._check_open()
        self._end(Status(code=code.name, message=details, trailers=dict(trailing_metadata)))
        raise grpc.aio.AbortError("Locally aborted.")

    # ------------------------------------------------------------ the library

    def _check_open(self) -> None:
        if self.status is not None:
            raise grpc.aio.UsageError("RPC already finished.")

    async def _serve(self, handler: Handler, request: Any) -> None:
        try:
            response = await handler(request, self)
        except grpc.aio.AbortError:
            return
        except asyncio.CancelledError:
            return  # where nobody ended the call, its caller waits for ever
        except Exception as error:
            if self.status is None:
                self._end(Status(code="UNKNOWN", message=repr(error)))
            return
        if self.status is None:
            if response is not None:
                self._unread.append((0, response))
            self._end(Status(code="OK"))

    def _expire(self) -> None:
        self._end_from_outside(Status(code="DEADLINE_EXCEEDED"))

    def _end_from_outside(self, status: Status) -> None:
        if self.status is None:
            self._end(status)
            self._task.cancel()

    def _end(self, status: Status) -> None:
        self._journal.check(self.status is None, lambda: f"{self.name} ended twice: {self.status}, {status}")
        self._journal.note(f"{self.name} ends {status.code} {status.trailers.get('x-error-reason', '')}")
        self.status = status
        if self._timer is not None:
            self._timer.cancel()
        self._news.set()
        self._room.set()
