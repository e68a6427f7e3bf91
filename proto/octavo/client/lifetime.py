"""Whether a client can make calls: until it is closed, and on the event loop that it was made in."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from octavo.client.errors import Cancelled, ClientUnusable, OctavoError, error_from


class Lifetime:
    """Of a blocking client, which threads share. is_closed: set before the channel is closed."""

    def __init__(self) -> None:
        self.is_closed = False

    def check(self) -> None:
        """Raises ClientUnusable."""
        if self.is_closed:
            raise _unusable("the client is closed")

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Around the beginning of a call, or all of it: what it raises as an OctavoError."""
        self.check()
        try:
            with self.reading():
                yield
        except ValueError:  # of gRPC, where another thread has closed the channel since
            self.check()
            raise

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around what a call that has begun gives."""
        try:
            yield
        except grpc.RpcError as error:
            raise self._told(error_from(error)) from None

    def _told(self, error: OctavoError) -> OctavoError:
        is_end = self.is_closed and error.code is grpc.StatusCode.CANCELLED and not error.reason
        return _closed() if is_end else error


class LoopLifetime(Lifetime):
    """Of an asyncio client, which belongs to one event loop: the one that runs when it is made."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = _running_loop()

    def check(self) -> None:
        """Raises ClientUnusable."""
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
        """Around what a call that has begun gives. One that `cancel()` or `close()` ended here raises asyncio's own
        CancelledError, as the task does that somebody cancels: the end of the task alone passes as it is."""
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
    """For a client that is made where no event loop is."""
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
