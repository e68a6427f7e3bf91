"""The other gateways of the service: asks them, and answers them.

Each gateway binds one ROUTER, which the others dial; it asks them over a DEALER each. Both are apart from the
sockets of workers: a worker must not be able to end what others have. Must not know requests.
"""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

import msgspec
import structlog
import zmq
import zmq.asyncio

from octavo.gateway.config import PeerConfig
from octavo.gateway.workers.config import WorkerPoolConfig
from octavo.gateway.workers.decisions import Peer
from octavo.gateway.workers.link import PeerFull, PeerGone, RouterLink
from octavo.gateway.workers.stats import PoolStats
from octavo.wire.codec import ProtocolError, decode_peer_reply, decode_to_peer, encode
from octavo.wire.curve import secure_client
from octavo.wire.endpoints import Endpoint, EndpointError, Transport, parse_endpoint
from octavo.wire.keys import KeyPair, load_keys
from octavo.wire.options import new_dealer
from octavo.wire.peer_messages import PeerReply, PeerWatch, ToPeer
from octavo.wire.run_dir import RunDirError

log = structlog.get_logger(__name__)
_TRY_AGAIN_S = 0.01  # until a connection is open
_SEND_AGAIN_S = 0.5  # a question may be lost with its connection; a repeated one has no further effect
_TICK_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The answers to a question. replies: by the gateway's name. silent: those that have not answered in time."""

    replies: dict[str, PeerReply] = field(default_factory=dict)
    silent: tuple[str, ...] = ()


def name_of(endpoint: str) -> str:
    """A gateway's name for people: the first word of its socket's file, or host and port."""
    scheme, _, place = endpoint.partition("://")
    return place if scheme == "tcp" else place.rpartition("/")[2].partition(".")[0]


class Peers:
    """One per gateway, every method on its event loop. answer(question): do what is asked, now."""

    def __init__(self, config: PeerConfig, answer: Callable[[ToPeer], PeerReply]) -> None:
        self.gateway_id = secrets.token_hex(16)
        self._config = config
        self._answer = answer
        self._others: list[_Other] = []
        self._watched_silent: set[str] = set()
        self._call_ids = count(1)
        self._context: zmq.asyncio.Context | None = None
        self._link: RouterLink | None = None
        self._ticker: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Bind, and dial the others, which may start later. Raises EndpointError, KeyFileError, RunDirError,
        OSError, ValueError; then all is closed."""
        config = self._config
        if not config.endpoint:
            if config.others:
                raise ValueError("--peer-endpoint needs --control-endpoint, where the others reach this gateway")
            return
        try:
            await self._open()
        except BaseException:
            await self.close()
            raise

    async def _open(self) -> None:
        config = self._config
        others = [parse_endpoint(each) for each in config.others if each != config.endpoint]
        for endpoint in (parse_endpoint(config.endpoint), *others):
            if endpoint.transport is Transport.TCP and config.key_file is None:
                raise EndpointError(
                    f"{endpoint.address}: gateways trust each other by --gateway-key-file, which a tcp address needs"
                )
        keys = load_keys(config.key_file) if config.key_file else None
        listening = WorkerPoolConfig(
            endpoints=(config.endpoint,),
            server_key_file=config.key_file,
            allowed_key_files=(config.key_file,) if config.key_file else (),
        )
        self._link = RouterLink(listening, self._take, PoolStats())
        self._link.open()
        self._context = zmq.asyncio.Context()
        self._others = [_Other(self._context, endpoint, keys) for endpoint in others]
        self._ticker = asyncio.create_task(self._tick_forever(self._link), name="peers")

    async def close(self) -> None:
        """Idempotent."""
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
            self._ticker = None
        await asyncio.gather(*(other.close() for other in self._others))
        self._others.clear()
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    async def ask(self, question: ToPeer, *, timeout_s: float) -> Asked:
        """Ask every other gateway at once, and wait so long for all of them together."""
        question = msgspec.structs.replace(question, call_id=next(self._call_ids))
        others = tuple(self._others)
        replies = await asyncio.gather(*(other.ask(question, timeout_s=timeout_s) for other in others))
        by_id: dict[str, tuple[str, PeerReply]] = {}
        for other, reply in zip(others, replies, strict=True):
            if reply is not None and reply.gateway_id != self.gateway_id:  # that one was ourselves
                by_id.setdefault(reply.gateway_id, (other.name, reply))
        silent = _silent(others, replies)
        told: set[str] = set()
        if isinstance(question, PeerWatch):
            told, self._watched_silent = self._watched_silent, set(silent)
        for name in silent:
            # A watch asks every second: of those it is said once that they are silent.
            if name not in told:
                log.warning("gateway_silent", gateway=name, asked=type(question).__name__, timeout_s=timeout_s)
        return Asked(replies=dict(by_id.values()), silent=silent)

    # ------------------------------------------------------------ parts

    def _take(self, peer: Peer, frame: bytes) -> None:
        try:
            question = decode_to_peer(frame)
        except ProtocolError as error:
            log.warning("peer_message_dropped", error=str(error))
            return
        try:
            reply = self._answer(question)
        except Exception:
            log.exception("peer_question_failed", asked=type(question).__name__)
            return
        if reply.num_ended:
            log.info("ended_for_peer", asked=type(question).__name__, requests=reply.num_ended)
        reply = msgspec.structs.replace(reply, call_id=question.call_id, gateway_id=self.gateway_id)
        try:
            if self._link is not None:
                self._link.send(peer, reply)
        except (PeerFull, PeerGone):
            log.warning("peer_gone", asked=type(question).__name__)

    async def _tick_forever(self, link: RouterLink) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            link.drain_all()
            try:
                link.restore()
            except (RunDirError, OSError) as error:
                log.error("ipc_socket_lost", error=str(error))


class _Other:
    """One other gateway, seen from here."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: Endpoint, keys: KeyPair | None) -> None:
        self.name = name_of(endpoint.address)
        self._waiting: dict[int, asyncio.Future[PeerReply]] = {}
        self._socket: zmq.asyncio.Socket = new_dealer(context)  # type: ignore[arg-type,assignment]
        if keys is not None and endpoint.transport is Transport.TCP:
            secure_client(self._socket, keys, keys.public)  # type: ignore[arg-type]
        self._socket.connect(endpoint.address)
        self._reader = asyncio.create_task(self._read_forever(), name=f"replies of {self.name}")

    async def ask(self, question: ToPeer, *, timeout_s: float) -> PeerReply | None:
        """None: it has not answered in time."""
        future: asyncio.Future[PeerReply] = asyncio.get_running_loop().create_future()
        self._waiting[question.call_id] = future
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    await self._send(encode(question))
                    done, _ = await asyncio.wait([future], timeout=_SEND_AGAIN_S)
                    if done:
                        return future.result()
        except TimeoutError:
            return None
        finally:
            del self._waiting[question.call_id]

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._socket.close(linger=0)

    async def _send(self, frame: bytes) -> None:
        """As soon as there is a connection."""
        while True:
            try:
                await self._socket.send(frame, zmq.NOBLOCK)
                return
            except zmq.Again:
                await asyncio.sleep(_TRY_AGAIN_S)

    async def _read_forever(self) -> None:
        while True:
            frame = (await self._socket.recv_multipart())[-1]
            try:
                reply = decode_peer_reply(frame)
            except ProtocolError as error:
                log.warning("peer_message_dropped", gateway=self.name, error=str(error))
                continue
            future = self._waiting.get(reply.call_id)
            if future is not None and not future.done():
                future.set_result(reply)


def _silent(others: Sequence[_Other], replies: Sequence[PeerReply | None]) -> tuple[str, ...]:
    return tuple(other.name for other, reply in zip(others, replies, strict=True) if reply is None)
