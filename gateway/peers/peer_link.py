"""The connection to one other gateway, and the addresses that a host name stands for. Must not know requests."""

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import structlog
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from octavo.wire.codec import ProtocolError, decode_peer_reply, encode
from octavo.wire.curve import secure_client
from octavo.wire.endpoints import Endpoint, Transport, is_wildcard, parse_endpoint
from octavo.wire.keys import KeyPair
from octavo.wire.options import new_dealer
from octavo.wire.peer_messages import PeerReply, ToPeer

log = structlog.get_logger(__name__)
SILENT_S = 2.0  # without an answer, four snapshots long
_RETRY_DELAY_S = 0.01  # where the queue of the connection is full
_FROZEN_GRACE_S = 0.05  # for a connected gateway that seems silent: perhaps this one was frozen
_RESEND_INTERVAL_S = 0.5  # a question may be lost with its connection; repeating it has no further effect
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | _REFUSED

_NOBODY = "nobody listens there, or the network lets nothing through"
_WRONG_KEY = "it refuses this gateway's key or has another: all gateways of a service have one --gateway-key-file"
_MUTE = "it is connected and does not answer: it is frozen, or no gateway of this release"


def name_of(endpoint: str) -> str:
    """A gateway's name for people: the first word of its socket's file name, or host:port (with this host's name if it
    listens on all addresses)."""
    parsed = parse_endpoint(endpoint)
    if parsed.path is not None:
        return parsed.path.name.partition(".")[0]
    return (
        f"{socket.gethostname()}:{parsed.port}" if is_wildcard(parsed.host) else parsed.address.removeprefix("tcp://")
    )


class PeerLink:
    """The connection to one other gateway.

    gateway_id: of whoever answered last; empty before the first answer.
    is_listed: the endpoint is still configured, or is an address of a configured name.
    has_left: the gateway said farewell, and no other has answered at this endpoint since.
    on_open: called when a connection is made.
    losses: counter shared by all links, by PEER_LOSSES.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        endpoint: Endpoint,
        keys: KeyPair | None,
        *,
        on_open: Callable[[], None],
        losses: Counter[str],
    ) -> None:
        self.address, self.name = endpoint.address, name_of(endpoint.address)
        self.gateway_id = ""
        self.is_listed = True
        self.has_left = False
        self.is_logged_silent = False
        self._loop = asyncio.get_running_loop()
        self._last_s = self._loop.time()  # of the last answer, or of the start
        self._opened_s = self._last_s  # when the connection was made
        self._trouble = _NOBODY
        self._is_connected = False
        self._is_open = asyncio.Event()  # set while there is a connection
        self._is_refused = False  # nobody listened at the last attempt to connect, or the key was wrong
        self._on_open = on_open
        self._losses = losses
        self._waiting: dict[int, asyncio.Future[PeerReply]] = {}
        self._socket: zmq.asyncio.Socket = new_dealer(context)  # type: ignore[arg-type,assignment]
        if keys is not None and endpoint.transport is Transport.TCP:
            secure_client(self._socket, keys, keys.public)  # type: ignore[arg-type]
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._socket.connect(endpoint.address)
        self._tasks = [
            asyncio.create_task(self._read_forever(), name=f"replies of {self.name}"),
            asyncio.create_task(self._watch_forever(), name=f"connection to {self.name}"),
        ]

    @property
    def is_silent(self) -> bool:
        """Whether no answer has come for SILENT_S."""
        return self._loop.time() - self._last_s > SILENT_S

    @property
    def is_down(self) -> bool:
        """Whether waiting for an answer is pointless: the gateway was silent for SILENT_S although there was a
        connection, or time to make one; or it answered once and now refuses connections."""
        is_silent = self._loop.time() - max(self._last_s, self._opened_s) > SILENT_S
        return is_silent or (self._is_refused and bool(self.gateway_id))

    def may_answer(self, asked_s: float) -> bool:
        """Whether an answer to a question asked at this time of the loop is worth waiting for."""
        return not self.is_down or (self._is_connected and self._loop.time() - asked_s < _FROZEN_GRACE_S)

    def why_silent(self) -> str:
        """For the log, in one sentence."""
        return f"{self.address} has not answered for {self._loop.time() - self._last_s:.0f} s: {self._trouble}"

    def send_if_open(self, message: ToPeer) -> None:
        """Send without waiting. Without a connection, or room in its queue, the message is dropped and counted."""
        sent = asyncio.ensure_future(self._socket.send(encode(message), zmq.NOBLOCK))
        sent.add_done_callback(self._on_sent)

    async def ask(self, question: ToPeer, *, timeout_s: float) -> PeerReply | None:
        """The reply, or None if it does not come in time."""
        future: asyncio.Future[PeerReply] = self._loop.create_future()
        self._waiting[question.call_id] = future
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    await self._send(encode(question))
                    done, _ = await asyncio.wait([future], timeout=_RESEND_INTERVAL_S)
                    if done:
                        return future.result()
        except TimeoutError:
            return None
        finally:
            del self._waiting[question.call_id]

    async def close(self) -> None:
        """Close the connection; questions still waiting get no answer."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    def _on_sent(self, sent: "asyncio.Future[Any]") -> None:
        if sent.cancelled() or sent.exception() is not None:  # zmq.Again; retrieved so that asyncio does not warn
            self._losses["message"] += 1

    async def _send(self, frame: bytes) -> None:
        """Wait for a connection, then send. Returns without sending once the socket is closed."""
        while not self._socket.closed:
            await self._is_open.wait()
            try:
                await self._socket.send(frame, zmq.NOBLOCK)
                return
            except zmq.Again:
                await asyncio.sleep(_RETRY_DELAY_S)

    async def _read_forever(self) -> None:
        while True:
            frame = (await self._socket.recv_multipart())[-1]
            try:
                reply = decode_peer_reply(frame)
            except ProtocolError as error:
                self._trouble = f"its answers are of another release ({error})"
                continue
            self.has_left = self.has_left and reply.gateway_id == self.gateway_id
            self.gateway_id, self._last_s = reply.gateway_id, self._loop.time()
            future = self._waiting.get(reply.call_id)
            if future is not None and not future.done():
                future.set_result(reply)

    async def _watch_forever(self) -> None:
        while True:
            event = int((await recv_monitor_message(self._monitor))["event"])
            if event == zmq.EVENT_CONNECTED:
                self._is_connected = True
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._trouble, self.has_left, self._is_refused = _MUTE, False, False
                self._opened_s = self._loop.time()
                self._is_open.set()
                self._on_open()
            elif event & _REFUSED:
                self._trouble, self._is_refused = _WRONG_KEY, True
            else:
                # Connected, then closed before the handshake was over: all that CURVE tells a client it does not trust.
                broke_early = self._is_connected and self._trouble != _MUTE
                self._trouble = _WRONG_KEY if broke_early else _NOBODY
                self._is_connected = False
                self._is_open.clear()
                # A connection that broke may be back at once; only a failed attempt to connect counts as refused.
                self._is_refused = self._is_refused or event == zmq.EVENT_CLOSED


async def addresses_of(host: str) -> tuple[str, ...]:
    """All IPv4 addresses of a host name, or its IPv6 ones if it has no others. Raises OSError. Resolved in a daemon
    thread: a resolver may take half a minute, which must not delay shutdown."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[tuple[str, ...]] = loop.create_future()

    def finish(found: tuple[str, ...], error: OSError | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(found)

    def look_up() -> None:
        found: tuple[str, ...] = ()
        problem: OSError | None = None
        try:
            rows = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            families = {row[0] for row in rows}
            family = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
            found = tuple(sorted({str(row[4][0]) for row in rows if row[0] == family}))
        except (OSError, UnicodeError) as error:
            problem = error if isinstance(error, OSError) else OSError(f"{host!r} is no name: {error}")
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(finish, found, problem)

    threading.Thread(target=look_up, name=f"look up {host}", daemon=True).start()
    return await future
