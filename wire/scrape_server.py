"""The HTTP end of a process's metrics: one thread, with a bound on what scrapers may cost the process.

A page is rendered after the scrape that asked for it, and answers all scrapes that came meanwhile. After a page the
thread rests nine times as long as it worked, a tenth of a second at most: a flood of scrapes waits for its own pages
and takes neither the interpreter lock nor a core from requests. At the limit of connections, the one that has waited
longest for its scraper (to ask or to read) is closed for the next; if all have asked, the next gets a 503. Must not
know what is on a page, nor how it is made.
"""

import asyncio
import contextlib
import gzip
import logging
import re
import resource
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum

import h11
from prometheus_client.exposition import generate_latest, gzip_accepted
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import CollectorRegistry

from octavo.wire.listener import listen

_log = logging.getLogger(__name__)

MAX_CONNECTIONS = 128
MAX_HEAD_BYTES = 16_384
CONNECTION_TIMEOUT_S = 5.0  # from the connection to its last byte
REST_PER_WORK = 9.0
MAX_REST_S = 0.1
REFUSED_READ_S = 0.1  # a request that is not read would reset the connection before its answer is


class PageFormat(Enum):
    """The value is its Content-Type."""

    TEXT = "text/plain; version=0.0.4; charset=utf-8"
    OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


_PAGES = (b"/metrics", b"/metrics/", b"/", b"")

_MAKERS: dict[PageFormat, Callable[[CollectorRegistry], bytes]] = {
    PageFormat.TEXT: generate_latest,
    PageFormat.OPENMETRICS: generate_openmetrics,
}


def pages_of(registry: CollectorRegistry) -> Callable[[PageFormat], bytes]:
    """A `render` for `ScrapeServer` that exposes a registry."""
    return lambda page_format: _MAKERS[page_format](registry)


@dataclass(frozen=True, slots=True)
class _Accepted:
    """What a scraper accepts, as far as pages differ by it."""

    format: PageFormat
    is_gzipped: bool


@dataclass(frozen=True, slots=True)
class _Answer:
    """headers: besides Content-Length and Connection. is_head_only: the body is counted but not sent."""

    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    is_head_only: bool = False

    def to(self, request: h11.Request) -> "_Answer":
        """This answer to that request: to HEAD without its body."""
        return replace(self, is_head_only=request.method == b"HEAD")


class _NoPage(Exception):
    """The page could not be rendered."""


class _Left(Exception):
    """The scraper left before it sent a request."""


class ScrapeServer:
    """Owns the listening socket and its thread.

    render: called in that thread, one at a time.
    why_not_ready: called there for GET /ready; None: ready, else what the process waits for.
    max_connections: half as many again may be open for a moment; None: at most an eighth of the descriptor limit.
    """

    def __init__(
        self,
        host: str,
        port: int,
        render: Callable[[PageFormat], bytes],
        *,
        why_not_ready: Callable[[], str | None] | None = None,
        max_connections: int | None = None,
    ) -> None:
        """Listens at once; port 0 picks a free one. Raises OSError if the address is taken."""
        self._render = render
        self._why_not_ready = why_not_ready
        self._socket = listen(host, port, backlog=MAX_CONNECTIONS)
        self.port = int(self._socket.getsockname()[1])
        self.num_pages = 0
        self._max_connections = max_connections or _default_connections()
        self._num_open = 0
        self._idle: dict[asyncio.Timeout, None] = {}  # connections that wait for their scrapers, the longest first
        self._pending: dict[_Accepted, asyncio.Future[bytes]] = {}
        self._next_page_s = 0.0
        self._worked_s = 0.0  # CPU time of the thread, at the last page
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; answers in progress are cut off. Idempotent."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it ended just now
                self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join(timeout=2.0)

    # ------------------------------------------------------------ in the thread

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(
            self._on_connection, sock=self._socket, limit=MAX_HEAD_BYTES, backlog=max(1, self._max_connections // 2)
        )  # its backlog is how many are accepted before the others have their turn …
        self._socket.listen(MAX_CONNECTIONS)  # … the kernel's how many may wait to be
        await self._over.wait()
        server.close()

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_open += 1
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        try:
            async with asyncio.timeout(CONNECTION_TIMEOUT_S) as limit:
                answer = await self._answer(connection, reader, limit)
                with self._idling(limit):
                    writer.write(_packed(connection, answer))
                    await writer.drain()
                    writer.close()
                    await writer.wait_closed()
        except (OSError, TimeoutError, _Left):
            pass  # the scraper is gone
        finally:
            self._num_open -= 1
            writer.transport.abort()

    async def _answer(
        self, connection: h11.Connection, reader: asyncio.StreamReader, limit: asyncio.Timeout
    ) -> _Answer:
        try:
            if self._num_open > self._max_connections and not self._make_room():
                refusal = _Answer(503, b"too many scrapes\n", (("Retry-After", "1"),))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(REFUSED_READ_S):
                        return refusal.to(await _request(connection, reader))
                return refusal
            with self._idling(limit):
                request = await _request(connection, reader)
            return (await self._answer_to(request)).to(request)
        except h11.RemoteProtocolError as error:
            return _Answer(error.error_status_hint, b"this is no HTTP\n")

    @contextlib.contextmanager
    def _idling(self, limit: asyncio.Timeout) -> Iterator[None]:
        """Mark the connection as waiting for its scraper during the block."""
        self._idle[limit] = None
        try:
            yield
        finally:
            self._idle.pop(limit, None)

    def _make_room(self) -> bool:
        """End the connection that has waited longest for its scraper. Returns whether there was one."""
        longest = next((limit for limit in self._idle if not limit.expired()), None)
        if longest is None:
            return False
        del self._idle[longest]
        longest.reschedule(self._loop.time())
        return True

    async def _answer_to(self, request: h11.Request) -> _Answer:
        if request.method not in (b"GET", b"HEAD"):
            return _Answer(405, b"use GET\n", (("Allow", "GET, HEAD"),))
        path = _path(request)
        if path == b"/ready" and self._why_not_ready is not None:
            why_not = self._why_not_ready()
            return _Answer(200, b"ready\n") if why_not is None else _Answer(503, f"{why_not}\n".encode())
        if path not in _PAGES:
            return _Answer(404, b"not here: /metrics is\n")
        accepted = _accepted(request)
        packing = (("Content-Encoding", "gzip"),) if accepted.is_gzipped else ()
        headers = (("Content-Type", accepted.format.value), *packing)
        try:
            return _Answer(200, await self._page(accepted), headers)
        except _NoPage:
            return _Answer(500, b"no page; see the log\n")

    async def _page(self, accepted: _Accepted) -> bytes:
        """A page rendered after this call; all calls made before it is rendered share it."""
        page = self._pending.get(accepted)
        if page is None:
            page = self._pending[accepted] = self._loop.create_future()
            self._loop.call_at(max(self._loop.time(), self._next_page_s), self._make, accepted)
        return await asyncio.shield(page)

    def _make(self, accepted: _Accepted) -> None:
        page = self._pending.pop(accepted)
        try:
            text = self._render(accepted.format)
            page.set_result(gzip.compress(text, compresslevel=1) if accepted.is_gzipped else text)
        except Exception as error:
            page.set_exception(_NoPage())
            page.exception()  # its scrapers may have left
            _log.exception("metrics_page_failed", exc_info=error)
        finally:
            self.num_pages += 1
            worked_s, self._worked_s = time.thread_time() - self._worked_s, time.thread_time()
            self._next_page_s = self._loop.time() + min(MAX_REST_S, REST_PER_WORK * worked_s)


def _default_connections() -> int:
    """At most an eighth of the descriptors, because other things need them."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else max(1, min(MAX_CONNECTIONS, soft // 8))


async def _request(connection: h11.Connection, reader: asyncio.StreamReader) -> h11.Request:
    """The request, without its body. Raises h11.RemoteProtocolError, _Left."""
    while not isinstance(event := connection.next_event(), h11.Request):
        if event is not h11.NEED_DATA:
            raise _Left
        connection.receive_data(await reader.read(MAX_HEAD_BYTES))
    return event


def _path(request: h11.Request) -> bytes:
    """The path that it asks for, without a query, and without the host that proxies write in front."""
    return re.sub(rb"^http://[^/?]*|\?.*", b"", request.target)


def _accepted(request: h11.Request) -> _Accepted:
    accepted = {name: value.decode("latin-1") for name, value in request.headers}
    is_open = "application/openmetrics-text" in accepted.get(b"accept", "").lower()
    return _Accepted(
        format=PageFormat.OPENMETRICS if is_open else PageFormat.TEXT,
        is_gzipped=gzip_accepted(accepted.get(b"accept-encoding", "")),
    )


def _packed(connection: h11.Connection, answer: _Answer) -> bytes:
    """The bytes of an answer that closes the connection."""
    headers = [*answer.headers, ("Content-Length", str(len(answer.body))), ("Connection", "close")]
    head = connection.send(h11.Response(status_code=answer.status, headers=headers)) or b""
    return head if answer.is_head_only else head + (connection.send(h11.Data(data=answer.body)) or b"")
