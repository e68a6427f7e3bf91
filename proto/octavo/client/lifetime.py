"""Checks whether a client can make calls: it must not be closed, and must be on the event loop it was created in."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from octavo.client.errors import Cancelled, ClientUnusable, OctavoError, error_from


class Lifetime:
    """The lifetime of a blocking client, which threads may share. is_closed: set before the channel is closed."""

    def __init__(self) -> None:
        self.is_closed = False

    def check(self) -> None:
        """Raises ClientUnusable if the client cannot make calls."""
        if self.is_closed:
            raise _unusable("the client is closed")

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Wraps the start of a call, or all of it: raises ClientUnusable, and gRPC's errors as OctavoError."""
        self.check()
        try:
            with self.reading():
                yield
        except ValueError:  # from gRPC, if another thread has closed the channel since
            self.check()
            raise

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Wraps reading from a call that has begun: raises gRPC's errors as OctavoError."""
        try:
            yield
        except grpc.RpcError as error:
            raise self._told(error_from(error)) from None

    def _told(self, error: OctavoError) -> OctavoError:
        is_end = self.is_closed and error.code is grpc.StatusCode.CANCELLED and not error.reason
        return _closed() if is_end else error


class LoopLifetime(Lifetime):
    """The lifetime of an asyncio client, which belongs to the event loop that runs when it is created."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = _running_loop()

    def check(self) -> None:
        """Raises ClientUnusable if the client cannot make calls."""
        super().check()
        self._check_loop()

    def _check_loop(self) -> None:
        if self._loop is None:
            return
        if self._loop.is_closed():
            raise _unusable("the event loop that the client was made in has ended: make one in each")
        if _running_loop() not in (None, self._loop):
            raise _unusable("the client belongs to another event loop: make one in each")

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Wraps reading from a call that has begun. A call ended locally by `cancel()` or `close()` raises asyncio's
        CancelledError, just as a cancelled task does. Only the task's own cancellation is passed on as it is; the
        other becomes our Cancelled."""
        self._check_loop()
        try:
            with super().reading():
                yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise (_closed() if self.is_closed else _cancelled("the call was cancelled here")) from None


def needs_loop() -> ClientUnusable:
    """The error for a client that is created outside an event loop."""
    return _unusable("an AsyncClient is made inside the event loop that uses it")


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _closed() -> Cancelled:
    return _cancelled("the client was closed before the call had ended")


def _cancelled(message: str) -> Cancelled:
    return Cancelled(message, code=grpc.StatusCode.CANCELLED)


def _unusable(message: str) -> ClientUnusable:
    return ClientUnusable(message, code=grpc.StatusCode.FAILED_PRECONDITION)
