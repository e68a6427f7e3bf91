"""The gateway's ROUTER sockets on the event loop.

Plain sockets read by ``add_reader`` on their descriptor, drained without blocking: several times cheaper per message
than zmq.asyncio's futures (bench/worker/wire.py). A ROUTER's descriptor is edge-triggered (zmq_getsockopt(3), ZMQ_FD):
after every send, and when a drain stops early, what is readable must be looked at again.
Must not know what frames mean.
"""

import asyncio
import errno
from collections import defaultdict
from collections.abc import Callable

import structlog
import zmq

from octavo.gateway.workers.config import WorkerPoolConfig
from octavo.gateway.workers.decisions import Decision, Peer
from octavo.gateway.workers.errors import WorkerBusy, WorkerGone
from octavo.gateway.workers.registry import Registry, WorkerRecord
from octavo.gateway.workers.stats import PoolStats
from octavo.wire.codec import MessageTooLarge, encode
from octavo.wire.curve import CurveGuard, secure_server
from octavo.wire.endpoints import Endpoint, Transport, parse_endpoint, require_proof
from octavo.wire.keys import KeyPair, load_keys, load_public_key
from octavo.wire.messages import Cancel, Message, Pause, Resume
from octavo.wire.options import new_router
from octavo.wire.run_dir import clear_stale_socket, ensure_run_dir

log = structlog.get_logger(__name__)
# Plain numbers: pyzmq's enumerations take longer to combine than a frame takes to send.
_NOW, _NOW_AND_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS, _READABLE = int(zmq.EVENTS), int(zmq.POLLIN)
OnFrame = Callable[[Peer, bytes], None]


class PeerFull(Exception):
    """The queue towards the peer is full; nothing was sent."""


class PeerGone(Exception):
    """No such connection; nothing was sent."""


class RouterLink:
    """All endpoints of one gateway, one socket each."""

    def __init__(self, config: WorkerPoolConfig, on_frame: OnFrame, stats: PoolStats) -> None:
        self._config = config
        self._on_frame = on_frame
        self._stats = stats
        self._sockets: list[_RouterSocket] = []
        self._guard: CurveGuard | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None

    @property
    def bound(self) -> tuple[str, ...]:
        """Addresses to dial, with the ports that were chosen."""
        return tuple(socket.bound for socket in self._sockets)

    def open(self) -> None:
        """Bind every endpoint. Raises EndpointError, KeyFileError, RunDirError, OSError; then nothing stays bound."""
        endpoints = [parse_endpoint(address) for address in self._config.endpoints]
        keys = load_keys(self._config.server_key_file) if self._config.server_key_file else None
        for endpoint in endpoints:
            require_proof(endpoint, has_key=keys is not None, has_token=bool(self._config.registration_token))
        self._context = zmq.Context()
        try:
            if keys is not None:
                allowed = [load_public_key(path) for path in self._config.allowed_key_files]
                self._guard = CurveGuard(self._context, allowed, _log_refusal)
            for endpoint in endpoints:
                self._sockets.append(self._bind(endpoint, keys))
        except BaseException:
            self.close()
            raise

    def send(self, peer: Peer, message: Message) -> None:
        """Send without blocking. Raises PeerFull, PeerGone, wire.codec.MessageTooLarge."""
        frame = encode(message)
        if not self._sockets:
            raise PeerGone  # closed
        self._sockets[peer.socket].send(peer.routing_id, frame)
        self._stats.sent_messages += 1
        self._stats.sent_bytes += len(frame)

    def drain_all(self) -> None:
        """Take all messages that have arrived, up to each socket's budget."""
        for socket in self._sockets:
            socket.drain()

    def restore(self) -> int:
        """Bind ipc sockets again whose file vanished from the run directory. Returns how many."""
        return sum(socket.restore() for socket in self._sockets)

    def close(self) -> None:
        """Unbind, close, unlink. Idempotent."""
        for socket in self._sockets:
            socket.close()
        self._sockets.clear()
        if self._guard is not None:
            self._guard.close()
            self._guard = None
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    def _bind(self, endpoint: Endpoint, keys: KeyPair | None) -> "_RouterSocket":
        assert self._context is not None
        socket = new_router(self._context)
        try:
            if endpoint.transport is Transport.TCP and keys is not None:
                secure_server(socket, keys)
            return _RouterSocket(socket, endpoint, len(self._sockets), self)
        except BaseException:
            socket.close(linger=0)
            raise

    def _take(self, peer: Peer, frame: bytes) -> None:
        self._stats.received_messages += 1
        self._stats.received_bytes += len(frame)
        self._on_frame(peer, frame)


def _log_refusal(address: str, key: str) -> None:
    log.warning("unknown_key_refused", address=address, public_key=key)


class _RouterSocket:
    """One bound socket with its reader."""

    def __init__(self, socket: "zmq.Socket[bytes]", endpoint: Endpoint, index: int, link: RouterLink) -> None:
        self._socket = socket
        self._endpoint = endpoint
        self._index = index
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._is_scheduled = False
        self._inode: int | None = None
        self._listen()
        self.bound = str(socket.get_string(zmq.LAST_ENDPOINT)).rstrip("\0")
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self.drain)

    def send(self, routing_id: bytes, frame: bytes) -> None:
        try:
            self._socket.send(routing_id, _NOW_AND_MORE)  # raises if the whole cannot be sent
            self._socket.send(frame, _NOW)
        except zmq.Again:
            self._link._stats.busy_sends += 1
            raise PeerFull from None
        except zmq.ZMQError as error:
            if error.errno in (errno.EHOSTUNREACH, errno.ENOTSOCK):
                raise PeerGone from None
            raise
        finally:
            self._look_again()

    def drain(self) -> None:
        """Hand over the messages that have arrived, up to the budget, then return to the loop."""
        self._is_scheduled = False
        if self._socket.closed:
            return
        for _ in range(self._link._config.drain_budget):
            if not self._is_readable():
                return
            self._receive()
        self._schedule()

    def restore(self) -> int:
        """Bind again if the socket's file is missing or another's. Open connections stay open."""
        path = self._endpoint.path
        if path is None or self._inode_now() == self._inode:
            return 0
        # A second listener on the same socket: unbinding the first would cut open connections.
        self._listen()
        return 1

    def close(self) -> None:
        if self._socket.closed:
            return
        self._loop.remove_reader(self._descriptor)
        is_ours = self._inode is not None and self._inode_now() == self._inode
        self._socket.close(linger=0)
        if is_ours and self._endpoint.path is not None:
            self._endpoint.path.unlink(missing_ok=True)

    def _listen(self) -> None:
        path = self._endpoint.path
        if path is not None:
            ensure_run_dir(path.parent)
            clear_stale_socket(path)
        try:
            # libzmq listens at `*` by IPv4 where the system has no IPv6; at `::` it would fail.
            is_any = self._endpoint.host == "::"
            self._socket.bind(f"tcp://*:{self._endpoint.port}" if is_any else self._endpoint.address)
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"cannot bind {self._endpoint.address}: {error.strerror}") from None
        self._inode = self._inode_now()

    def _inode_now(self) -> int | None:
        if self._endpoint.path is None:
            return None
        try:
            return self._endpoint.path.stat().st_ino
        except OSError:
            return None

    def _receive(self) -> None:
        """(the peer's id, the frame) of a message that has arrived."""
        socket = self._socket
        routing_id = socket.recv(zmq.NOBLOCK)
        if not socket.getsockopt(zmq.RCVMORE):
            self._link._stats.undecodable_frames += 1
            return
        frame = socket.recv(zmq.NOBLOCK)
        if socket.getsockopt(zmq.RCVMORE):
            self._link._stats.undecodable_frames += 1
            while socket.getsockopt(zmq.RCVMORE):
                socket.recv(zmq.NOBLOCK)
            return
        self._link._take(Peer(self._index, routing_id), frame)

    def _is_readable(self) -> bool:
        # Half of what it costs to ask for a message that is not there: pyzmq's error looks up the system's text.
        return bool(int(self._socket.getsockopt(_EVENTS)) & _READABLE)

    def _look_again(self) -> None:
        if not self._socket.closed and self._is_readable():
            self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self.drain)


class Outbox:
    """Sends to workers, and handles each outcome of a send.

    Cancels, pauses and resumes are gathered: one message of each kind per turn of the loop. carry_out: for the
    registry's decisions when a connection turns out to be gone.
    """

    def __init__(self, link: RouterLink, registry: Registry, carry_out: Callable[[list[Decision]], None]) -> None:
        self._link = link
        self._registry = registry
        self._carry_out = carry_out
        # Not yet sent, by incarnation. Only an output's last pause or resume matters.
        self._cancels: defaultdict[int, list[int]] = defaultdict(list)
        self._paces: defaultdict[int, dict[int, type[Pause] | type[Resume]]] = defaultdict(dict)
        self._is_due = False

    def send(self, record: WorkerRecord, message: Message) -> None:
        """Send. Raises WorkerBusy, WorkerGone (its outputs have ended by then), MessageTooLarge; then nothing was
        sent."""
        try:
            self._link.send(record.peer, message)
        except PeerFull:
            raise WorkerBusy(record.worker_id, "the queue towards it is full") from None
        except PeerGone:
            self._carry_out(self._registry.on_unreachable(record))
            raise WorkerGone(record.worker_id) from None

    def try_send(self, record: WorkerRecord, message: Message) -> bool:
        """Send if possible. Returns whether it was sent."""
        try:
            self.send(record, message)
        except (WorkerBusy, WorkerGone):
            return False
        return True

    def send_unconfirmed(self, peer: Peer, message: Message) -> None:
        """Send, ignoring failure: the peer repeats its request until it gets an answer."""
        try:
            self._link.send(peer, message)
        except (PeerFull, PeerGone, MessageTooLarge):
            log.debug("not_told", message=type(message).__name__)

    def cancel(self, incarnation: int, handle: int) -> None:
        """Send a Cancel soon, together with all others of this turn of the loop."""
        self._flush_soon()
        self._cancels[incarnation].append(handle)

    def pace(self, incarnation: int, handle: int, pace: type[Pause] | type[Resume]) -> None:
        """Send a Pause or a Resume soon, likewise."""
        self._flush_soon()
        self._paces[incarnation][handle] = pace

    def _flush_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Send what was gathered; if a queue is full, it stays for the next call."""
        self._is_due = False
        self._flush_cancels()
        for incarnation in tuple(self._paces):
            record = self._registry.get(incarnation)
            if record is None or self._sent_paces(record, self._paces.get(incarnation, {})):
                self._paces.pop(incarnation, None)

    def _sent_paces(self, record: WorkerRecord, paces: dict[int, type[Pause] | type[Resume]]) -> bool:
        for kind in (Pause, Resume):
            handles = tuple(handle for handle, pace in paces.items() if pace is kind)
            if handles and not self.try_send(record, kind(handles=handles)):
                return False
        return True

    def _flush_cancels(self) -> None:
        for incarnation in tuple(self._cancels):
            record = self._registry.get(incarnation)
            handles = tuple(self._cancels.get(incarnation, ()))
            # A worker that is gone has nothing to cancel.
            if record is None or self.try_send(record, Cancel(handles=handles)):
                self._cancels.pop(incarnation, None)
