"""The page's HTTP server: files that are read once, and the calls that the page makes. Starlette on uvicorn, on the
gateway's own event loop.

Bounds: connections, the time until a request is here, the bytes of its head and body. A browser is trusted only where
the request's Host is an address, localhost or a name that was given (a foreign name that leads here is DNS rebinding),
and, for calls, where its Origin is this very page.
"""

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from octavo.gateway.config import PageConfig
from octavo.gateway.page.calls import CallFailed, Method
from octavo.gateway.rpc.addresses import BindError
from octavo.wire.listener import listen

log = structlog.get_logger(__name__)
DEFAULT_PORT = 50080
MAX_CONNECTIONS = 128
MAX_HEAD_BYTES = 16_384
MAX_BODY_BYTES = 256 * 1024
REQUEST_TIMEOUT_S = 5.0  # for a head, and for a body
KEEP_ALIVE_S = 30
STOP_TIMEOUT_S = 1

_FILES = Path(__file__).parent / "static"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Page:
    """Owns the listening socket and, once started, its task. port: as bound."""

    def __init__(self, config: PageConfig, methods: Sequence[Method]) -> None:
        """Binds at once. Raises BindError."""
        self._socket = _bound(config)
        self.port = int(self._socket.getsockname()[1])
        routes = [Route(path, _file(path)) for path in _paths()]
        routes += [Route(method.name, _caller(method), methods=["POST"]) for method in methods]
        app = _Guard(Starlette(routes=routes), frozenset({config.host.lower(), *map(str.lower, config.names)}))
        self._server = _Server(
            uvicorn.Config(
                app,
                http=_Protocol,
                loop="none",
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=STOP_TIMEOUT_S,
            )
        )
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Serve until `close`."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="page")
        self._task.add_done_callback(_log_defect)

    async def close(self) -> None:
        """Streams get STOP_TIMEOUT_S to end by themselves. Idempotent."""
        self._server.should_exit = True
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        self._socket.close()


def _log_defect(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("defect", task=task.get_name(), exc_info=error)


def _bound(config: PageConfig) -> socket.socket:
    ports = (DEFAULT_PORT, 0) if config.port is None else (config.port,)
    for port in ports:
        try:
            return listen(config.host, port, backlog=MAX_CONNECTIONS)
        except OSError as error:
            failure = error
    raise BindError("--page-port", f"{config.host}:{ports[-1]}") from failure


# ---------------------------------------------------------------- who is let in


class _Guard:
    """Refuses requests that a browser would not send from this page, and adds headers that keep other sites out."""

    def __init__(self, app: ASGIApp, names: frozenset[str]) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *_ENCODED]
            await send(message)

        refusal = _refusal(Headers(scope=scope), scope["method"], self._names)
        await (refusal or self._app)(scope, receive, send_guarded)


_ENCODED = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]


def _refusal(headers: Headers, method: str, names: frozenset[str]) -> Response | None:
    hosts = headers.getlist("host")
    if len(hosts) != 1 or not _is_ours(hosts[0], names):
        return _plain(421, "this page is not served under that name: name it with --page-name")
    if method != "POST":
        return None
    origin, site = headers.get("origin"), headers.get("sec-fetch-site", "same-origin")
    if (origin is not None and origin not in (f"http://{hosts[0]}", f"https://{hosts[0]}")) or site != "same-origin":
        return _plain(403, "calls are for the page itself")
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        return _plain(415, "the body has to be application/json")
    return None


def _is_ours(host: str, names: frozenset[str]) -> bool:
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    name = name.removeprefix("[").removesuffix("]").lower()
    if name == "localhost" or name in names:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _plain(status: int, text: str) -> Response:
    return Response(text + "\n", status_code=status, media_type="text/plain")


class _Protocol(H11Protocol):
    """Closes a connection without a request after REQUEST_TIMEOUT_S, and at MAX_CONNECTIONS the oldest for the next."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= MAX_CONNECTIONS:
            oldest: Any = min(self.connections, key=lambda each: each.opened_s)  # type: ignore[union-attr]
            oldest.transport.abort()
            self.connections.discard(oldest)
        self.opened_s = self.loop.time()
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(REQUEST_TIMEOUT_S, self._close_if_nothing_came)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer.cancel()
        super().connection_lost(exc)

    def _close_if_nothing_came(self) -> None:
        if self.cycle is None:
            self.transport.abort()


class _Server(uvicorn.Server):
    """Leaves signals to the gateway."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


# ---------------------------------------------------------------- what is answered


def _paths() -> Mapping[str, Path]:
    files = {f"/{path.name}": path for path in _FILES.iterdir() if path.suffix in _TYPES}
    return files | {"/": _FILES / "index.html"}


def _file(path: str) -> Any:
    file = _paths()[path]
    body, media_type = file.read_bytes(), _TYPES[file.suffix]

    async def answer(request: Request) -> Response:
        return Response(body, media_type=media_type)

    return answer


def _caller(method: Method) -> Any:
    async def answer(request: Request) -> Response:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                body = await _body(request)
        except TimeoutError:
            return _plain(408, "the body did not come in time")
        except ClientDisconnect:
            return _plain(400, "the body broke off")
        if body is None:
            return _plain(413, f"a body has {MAX_BODY_BYTES} bytes at most")
        peer = f"page:{request.client.host}:{request.client.port}" if request.client else "page:"
        headers = [(name.lower(), value) for name, value in request.headers.items()]
        try:
            messages = method.call(method.parse(body), headers, peer)
            first = await anext(messages)
        except CallFailed as failure:
            return Response(failure.as_json(), status_code=failure.http_status, media_type="application/json")
        except StopAsyncIteration:
            return Response(status_code=204)
        return StreamingResponse(_events(first, messages), media_type="text/event-stream")

    return answer


async def _body(request: Request) -> bytes | None:
    """The body, or None if it is too large."""
    parts, num_bytes = [], 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes > MAX_BODY_BYTES:
            return None
        parts.append(part)
    return b"".join(parts)


async def _events(first: str, messages: Any) -> AsyncIterator[str]:
    """Server-sent events. JSON has no line feeds outside strings, and escaped ones inside."""
    async with aclosing(messages):
        yield f"data: {first}\n\n"
        try:
            async for message in messages:
                yield f"data: {message}\n\n"
        except CallFailed as failure:
            yield f"event: failure\ndata: {failure.as_json()}\n\n"
        else:
            yield "event: end\ndata: {}\n\n"
