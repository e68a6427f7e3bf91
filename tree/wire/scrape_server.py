"""The HTTP end of a process's metrics: one thread, with a bound on what scrapers may cost the process.

A page is made after the scrape that it answers came, and answers all that came meanwhile. The thread rests nine times
as long as it worked since the last page, a tenth of a second at most: so a flood of scrapes waits for its own pages,
and takes neither the interpreter nor the core from those who serve. Connections above a bound are told 503.
Must not know what a page says, nor how it is made.
"""

import asyncio
import contextlib
import gzip
import logging
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

_log = logging.getLogger(__name__)

MAX_CONNECTIONS = 128
MAX_HEAD_BYTES = 16_384
CONNECTION_TIMEOUT_S = 5.0  # from the connection to its last byte
REST_PER_WORK = 9.0
MAX_REST_S = 0.1
REFUSED_READ_S = 0.1  # a request that is not read would reset the connection before its answer is


class PageFormat(Enum):
    """Value: its Content-Type."""

    TEXT = "text/plain; version=0.0.4; charset=utf-8"
    OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


@dataclass(frozen=True, slots=True)
class _Wish:
    """What a scraper accepts: the pages that differ."""

    format: PageFormat
    is_gzipped: bool


class _NoPage(Exception):
    """The page could not be made."""


class ScrapeServer:
    """Owns the listening socket and its thread. render: called in that thread, one at a time."""

    def __init__(self, host: str, port: int, render: Callable[[PageFormat], bytes]) -> None:
        """Listens at once; port 0 draws one. Raises OSError where the address is taken."""
        self._render = render
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
        self.port = int(self._socket.getsockname()[1])
        self.num_pages = 0
        self._num_open = 0
        self._pending: dict[_Wish, asyncio.Future[bytes]] = {}
        self._next_page_s = 0.0
        self._worked_s = 0.0  # CPU time of the thread, at the last page
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; what is being answered is cut off. Idempotent."""
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
            self._on_connection, sock=self._socket, limit=MAX_HEAD_BYTES, backlog=MAX_CONNECTIONS
        )
        await self._over.wait()
        server.close()

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_open += 1
        try:
            async with asyncio.timeout(CONNECTION_TIMEOUT_S):
                writer.write(await self._answer(reader))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # its scraper's loss
        finally:
            self._num_open -= 1
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        if self._num_open > MAX_CONNECTIONS:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REFUSED_READ_S):
                    await reader.readuntil(b"\r\n\r\n")
            return _response("503 Service Unavailable", b"too many scrapes\n", ("Retry-After: 1",))
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        method, path = (*head.split("\r\n", 1)[0].split(" "), "", "")[:2]
        if method not in ("GET", "HEAD"):
            return _response("405 Method Not Allowed", b"use GET\n", ("Allow: GET, HEAD",))
        if path == "/favicon.ico":
            return _response("200 OK", b"")
        wish = _wish_of(head)
        headers = (f"Content-Type: {wish.format.value}", *(["Content-Encoding: gzip"] if wish.is_gzipped else []))
        try:
            answer = _response("200 OK", await self._page(wish), headers)
        except _NoPage:
            return _response("500 Internal Server Error", b"no page; see the log\n")
        return answer if method == "GET" else answer[: answer.index(b"\r\n\r\n") + 4]

    async def _page(self, wish: _Wish) -> bytes:
        """One that is not made yet; whoever asks before it is shares it."""
        page = self._pending.get(wish)
        if page is None:
            page = self._pending[wish] = self._loop.create_future()
            self._loop.call_at(max(self._loop.time(), self._next_page_s), self._make, wish)
        return await asyncio.shield(page)

    def _make(self, wish: _Wish) -> None:
        page = self._pending.pop(wish)
        try:
            text = self._render(wish.format)
            page.set_result(gzip.compress(text, compresslevel=1) if wish.is_gzipped else text)
        except Exception as error:
            page.set_exception(_NoPage())
            page.exception()  # its scrapers may have left
            _log.exception("no page of metrics", exc_info=error)
        finally:
            self.num_pages += 1
            worked_s, self._worked_s = time.thread_time() - self._worked_s, time.thread_time()
            self._next_page_s = self._loop.time() + min(MAX_REST_S, REST_PER_WORK * worked_s)


def _wish_of(head: str) -> _Wish:
    """head: of a request, its names in any case."""
    values = dict(re.findall(r"^(accept|accept-encoding):[ \t]*(.*?)\r?$", head.lower(), re.MULTILINE))
    is_open = "application/openmetrics-text" in values.get("accept", "")
    codings = [part.replace(" ", "") for part in values.get("accept-encoding", "").split(",")]
    is_gzipped = any(
        part == "gzip" or (part.startswith("gzip;q=") and part[7:] not in ("0", "0.0")) for part in codings
    )
    return _Wish(PageFormat.OPENMETRICS if is_open else PageFormat.TEXT, is_gzipped)


def _response(status: str, body: bytes, headers: tuple[str, ...] = ()) -> bytes:
    lines = (f"HTTP/1.1 {status}", *headers, f"Content-Length: {len(body)}", "Connection: close", "", "")
    return "\r\n".join(lines).encode() + body
