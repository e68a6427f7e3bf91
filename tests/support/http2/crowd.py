"""Connections, kept by a thread, that cost a server only descriptors: they answer pings, or not even that."""

import select
import threading
import time
from collections.abc import Callable
from enum import Enum
from types import TracebackType
from typing import Self

from hyperframe.frame import DataFrame

from tests.support.http2.raw import PREFACE, RawHttp2, grpc_headers

WATCH = "/grpc.health.v1.Health/Watch"
WATCH_EVERYTHING = b"\x00\x00\x00\x00\x00"  # a HealthCheckRequest without a service


class Manner(Enum):
    """What each connection does."""

    PINGS = "answers pings"
    SILENT = "half a handshake"
    HALF_CALL = "a call whose request never comes"
    WATCH = "watches the health, which is no request"


class Crowd:
    """Keeps this many connections open. returns: closed ones are opened again, at most this many per second."""

    def __init__(self, port: int, count: int, manner: Manner, *, returns_per_s: int = 0) -> None:
        self.num_opened = self.num_hung_up = 0
        self.most_open = 0
        self._port, self._count, self._manner, self._returns_per_s = port, count, manner, returns_per_s
        self._open: dict[int, RawHttp2] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._over.set()
        self._thread.join(30)
        for each in self._open.values():
            each.close()

    @property
    def num_open(self) -> int:
        """Connections open now, as far as the crowd has noticed."""
        return len(self._open)

    def until(self, condition: Callable[[Self], bool], timeout_s: float = 60.0) -> None:
        """Block until the condition holds. Raises AssertionError at the timeout."""
        until_s = time.monotonic() + timeout_s
        while not condition(self):
            assert time.monotonic() < until_s, (self.num_opened, self.num_open, self.num_hung_up)
            time.sleep(0.01)

    def _run(self) -> None:
        next_s = 0.0
        while not self._over.is_set():
            if self.num_opened < self._count:
                for _ in range(min(50, self._count - self.num_opened)):
                    self._connect()
            elif self._returns_per_s and len(self._open) < self._count and time.monotonic() >= next_s:
                next_s = time.monotonic() + 1 / self._returns_per_s
                self._connect()
            self._read()

    def _connect(self) -> None:
        begins = self._manner is not Manner.SILENT
        try:
            each = RawHttp2(self._port, preface=PREFACE if begins else b"", connect_timeout_s=5.0)
        except OSError:
            return
        self.num_opened += 1
        if not begins:
            each.send(PREFACE[:3])
        if self._manner in (Manner.HALF_CALL, Manner.WATCH):
            headers = each.headers(each.new_id(), grpc_headers(WATCH) if self._manner is Manner.WATCH else None)
            each.send(headers)
        if self._manner is Manner.WATCH:
            each.send(DataFrame(1, WATCH_EVERYTHING, flags=["END_STREAM"]))
        self._open[each.socket.fileno()] = each
        self.most_open = max(self.most_open, len(self._open))

    def _read(self) -> None:
        poll = select.poll()
        for number in self._open:
            poll.register(number, select.POLLIN)
        for number, _ in poll.poll(5):
            each = self._open[number]
            if self._manner is Manner.SILENT:
                each.is_closed = not _receives(each)  # answering would complete the handshake
            else:
                each.read(0.001)
            if each.is_closed:
                del self._open[number]
                each.close()
                self.num_hung_up += 1


def _receives(connection: RawHttp2) -> bool:
    try:
        return bool(connection.socket.recv(1 << 16))
    except OSError:
        return False
