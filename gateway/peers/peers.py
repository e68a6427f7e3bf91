"""The other gateways of the service: asks them, reports to them, and answers them.

Each gateway binds one ROUTER, which the others dial; it asks them over a DEALER each. Both are apart from the
sockets of workers: a worker must not be able to end what others have. Where a name stands for several addresses, each
of them is a gateway, and it is looked up again and again. Must not know requests.
"""

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import msgspec
import structlog
import zmq
import zmq.asyncio

from octavo.gateway.config import PeerConfig
from octavo.gateway.observability.meters import PEER_LOSSES
from octavo.gateway.peers.peer_link import PeerLink, addresses_of
from octavo.gateway.restarting import restarting_task
from octavo.gateway.workers.config import WorkerPoolConfig
from octavo.gateway.workers.decisions import Peer
from octavo.gateway.workers.link import PeerFull, PeerGone, RouterLink
from octavo.gateway.workers.stats import PoolStats
from octavo.wire.codec import ProtocolError, decode_to_peer
from octavo.wire.endpoints import (
    Endpoint,
    EndpointError,
    EndpointsFile,
    Transport,
    is_address,
    is_wildcard,
    parse_endpoint,
)
from octavo.wire.keys import KeyPair, load_keys
from octavo.wire.peer_messages import PeerAbort, PeerDrain, PeerReply, PeerUse, ToPeer
from octavo.wire.run_dir import RunDirError

log = structlog.get_logger(__name__)
LOOK_UP_S = 5.0  # between two lookups of a name
_TICK_S = 0.5
_LOOK_S = 0.05  # how often to check whether a gateway whose answer is awaited has gone down
_MAX_LOGGED_ERRORS = 64  # distinct errors of received messages, each logged once


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAnswers:
    """The answers to a question. replies: by the gateway's name. silent: those that are down, or too slow."""

    replies: dict[str, PeerReply] = field(default_factory=dict)
    silent: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class _Name:
    """A configured name. addresses None: it has not been looked up yet. task: looks it up again and again."""

    endpoint: Endpoint
    task: "asyncio.Task[None] | None" = None
    addresses: tuple[str, ...] | None = None
    trouble: str = ""


class Peers:
    """One per gateway, every method on its event loop. answer(question): do what is asked, now."""

    def __init__(
        self, config: PeerConfig, answer: Callable[[ToPeer], PeerReply], on_open: Callable[[], None] = lambda: None
    ) -> None:
        """on_open: is called when a connection to another gateway is made."""
        self.gateway_id = secrets.token_hex(16)
        self.losses: Counter[str] = Counter(dict.fromkeys(PEER_LOSSES, 0))
        self._config = config
        self._answer = answer
        self._on_open = on_open
        self._links: dict[str, PeerLink] = {}  # by address
        self._names: list[_Name] = []
        self._file = None if config.others_file is None else EndpointsFile(config.others_file)
        self._listed: tuple[str, ...] = ()
        self._is_dialling = False
        self._keys: KeyPair | None = None
        self._logged_silent: set[str] = set()
        self._logged_own_addresses: set[str] = set()
        self._logged_errors: set[str] = set()
        self._call_ids = count(1)
        self._context: zmq.asyncio.Context | None = None
        self._router: RouterLink | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._asking: set[asyncio.Task[PeerReply | None]] = set()

    @property
    def has_others(self) -> bool:
        """Whether there can be any."""
        return bool(self._links or self._names or self._file)

    async def start(self) -> None:
        """Bind, and dial the others, which may start later. Raises EndpointError, KeyFileError, RunDirError,
        OSError, ValueError; then all is closed."""
        config = self._config
        if not config.endpoint:
            if config.others or self._file:
                raise EndpointError("--peer-endpoint needs --control-endpoint, where the others reach this gateway")
            return
        try:
            await self._open()
        except BaseException:
            await self.close()
            raise

    async def _open(self) -> None:
        config = self._config
        self._check_key(parse_endpoint(config.endpoint))
        others = self._parsed(config.others + ((self._file.changed() or ()) if self._file else ()))
        self._keys = load_keys(config.key_file) if config.key_file else None
        listening = WorkerPoolConfig(
            endpoints=(config.endpoint,),
            server_key_file=config.key_file,
            allowed_key_files=(config.key_file,) if config.key_file else (),
        )
        self._router = RouterLink(listening, self._take, PoolStats())
        self._router.open()
        self._context = zmq.asyncio.Context()
        self._on_listed(others)
        self._tasks = [restarting_task(partial(self._tick_forever, self._router), name="peers")]

    async def close(self) -> None:
        """Idempotent."""
        tasks = (*self._tasks, *self._asking, *(each.task for each in self._names if each.task is not None))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()
        await asyncio.gather(*(link.close() for link in self._links.values()))
        self._links.clear()
        self._names.clear()
        if self._router is not None:
            self._router.close()
            self._router = None
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    async def ask(self, question: ToPeer, *, timeout_s: float) -> PeerAnswers:
        """Ask every other gateway at once. Waits at most timeout_s, and only for gateways not known to be down; those
        are asked all the same, in case they come back in time."""
        question = msgspec.structs.replace(question, call_id=next(self._call_ids))
        asked_s = asyncio.get_running_loop().time()
        asked = {asyncio.create_task(each.ask(question, timeout_s=timeout_s)): each for each in self._peer_links()}
        for task in asked:
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)
        while waited := [task for task, each in asked.items() if not task.done() and each.may_answer(asked_s)]:
            await asyncio.wait(waited, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        replies = {each: task.result() if task.done() else None for task, each in asked.items()}
        by_id: dict[str, tuple[str, PeerReply]] = {}
        for link, reply in replies.items():
            if reply is not None and reply.gateway_id != self.gateway_id:  # this gateway itself
                by_id.setdefault(reply.gateway_id, (link.name, reply))
        # A gateway that answered at another of its addresses is not silent.
        missing = [each.name for each, reply in replies.items() if reply is None and each.gateway_id not in by_id]
        silent = (*missing, *(each.endpoint.address for each in self._names if not each.addresses))
        waited_s = round(asyncio.get_running_loop().time() - asked_s, 3)
        self.losses["answer"] += len(missing)
        logged, self._logged_silent = self._logged_silent, set(silent)
        for name in silent:
            # Watches and callers ask over and over: log once until the gateway answers again.
            if name not in logged or isinstance(question, PeerAbort | PeerDrain):
                log.warning("gateway_silent", gateway=name, asked=type(question).__name__, waited_s=waited_s)
        return PeerAnswers(replies=dict(by_id.values()), silent=silent)

    def send_to_all(self, message: PeerUse) -> None:
        """Send to every other gateway that is connected; no reply is awaited. A snapshot asks for an acknowledgement,
        which shows who can be reached."""
        if message.is_snapshot:
            message = msgspec.structs.replace(message, call_id=next(self._call_ids))
        for link in self._links.values():
            if message.is_snapshot or link.gateway_id != self.gateway_id:
                link.send_if_open(message)

    async def leave(self, farewell: PeerUse, *, timeout_s: float) -> None:
        """Send the farewell to every reachable gateway. Waits for acknowledgements, at most timeout_s."""
        farewell = msgspec.structs.replace(farewell, call_id=next(self._call_ids))
        reached = [each for each in self._peer_links() if not each.is_down]
        await asyncio.gather(*(each.ask(farewell, timeout_s=timeout_s) for each in reached))

    def counts(self) -> tuple[int, int]:
        """(number of other gateways, number of those that have not answered for long). A name without an address counts
        as one that has not."""
        known, silent = set[str](), set[str]()
        for link in self._peer_links():
            known.add(link.gateway_id or link.address)
            if link.is_silent:
                silent.add(link.gateway_id or link.address)
        reached = {each.gateway_id for each in self._links.values() if not each.is_silent}
        nameless = [each for each in self._names if not each.addresses]
        return len(known) + len(nameless), len(silent - reached) + len(nameless)

    def on_leaving(self, gateway_id: str) -> None:
        """A gateway said farewell: do not ask or miss it until a new run of it answers."""
        for link in self._links.values():
            link.has_left = link.has_left or link.gateway_id == gateway_id

    def _peer_links(self) -> list[PeerLink]:
        return [each for each in self._links.values() if each.gateway_id != self.gateway_id and not each.has_left]

    def ids_sent_to(self) -> set[str]:
        """Ids of the gateways that reports are sent to."""
        return {each.gateway_id for each in self._links.values()}

    # ------------------------------------------------------------ parts

    def _take(self, peer: Peer, frame: bytes) -> None:
        try:
            question = decode_to_peer(frame)
        except ProtocolError as error:
            if str(error) not in self._logged_errors and len(self._logged_errors) < _MAX_LOGGED_ERRORS:
                self._logged_errors.add(str(error))
                detail = f"a gateway of another release, or no gateway, sends what this one does not know: {error}"
                log.warning("peer_message_dropped", error=detail)
            return
        try:
            reply = self._answer(question)
        except Exception:
            log.exception("peer_question_failed", asked=type(question).__name__)
            return
        if reply.num_ended:
            log.info("ended_for_peer", asked=type(question).__name__, requests=reply.num_ended)
        if isinstance(question, PeerUse) and not question.call_id:
            return
        reply = msgspec.structs.replace(reply, call_id=question.call_id, gateway_id=self.gateway_id)
        try:
            if self._router is not None:
                self._router.send(peer, reply)
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
            self._reread_file()
            if self._is_dialling:  # the last attempt failed halfway
                self._dial_listed()
            await self._log_changes_and_drop_gone()

    async def _log_changes_and_drop_gone(self) -> None:
        """Log which gateways fell silent, answer again, or are this one; close connections to unlisted ones that are
        silent."""
        for address, link in tuple(self._links.items()):
            if link.gateway_id == self.gateway_id:
                if address not in self._logged_own_addresses:
                    self._logged_own_addresses.add(address)
                    log.info("peer_is_this_gateway", detail=f"{address} is this gateway itself: it is left out")
            elif link.is_silent and not link.is_listed:
                del self._links[address]
                log.info("gateway_gone", gateway=link.name)
                await link.close()
            elif link.is_silent != link.is_logged_silent and not link.has_left:
                link.is_logged_silent = link.is_silent
                if link.is_silent:
                    self.losses["gateway"] += 1
                    log.warning("gateway_unreachable", gateway=link.name, error=link.why_silent())
                else:
                    log.info("gateway_reached", gateway=link.name)

    # ------------------------------------------------------------ who they are

    def _reread_file(self) -> None:
        if self._file is None:
            return
        try:
            if (listed := self._file.changed()) is not None:
                self._on_listed(self._parsed(self._config.others + listed))
                log.info("peers_listed", gateways=list(listed))
        except EndpointError as error:
            log.error("peers_not_listed", error=str(error))

    def _parsed(self, addresses: tuple[str, ...]) -> list[Endpoint]:
        """The endpoints, without this gateway's own. Raises EndpointError."""
        endpoints = [parse_endpoint(each) for each in dict.fromkeys(addresses) if each != self._config.endpoint]
        for endpoint in endpoints:
            self._check_key(endpoint)
            if endpoint.transport is Transport.TCP and (is_wildcard(endpoint.host) or not endpoint.port):
                raise EndpointError(f"--peer-endpoint {endpoint.address}: nobody can be reached at this address")
        return endpoints

    def _check_key(self, endpoint: Endpoint) -> None:
        if endpoint.transport is Transport.TCP and self._config.key_file is None:
            raise EndpointError(
                f"{endpoint.address}: gateways trust each other by --gateway-key-file, which a tcp address needs"
            )

    def _on_listed(self, endpoints: Sequence[Endpoint]) -> None:
        """Dial newly listed endpoints. Those no longer listed are dropped once they are silent."""
        names = {
            each.address: each for each in endpoints if each.transport is Transport.TCP and not is_address(each.host)
        }
        self._listed = tuple(each.address for each in endpoints if each.address not in names)
        for name in [each for each in self._names if each.endpoint.address not in names]:
            self._names.remove(name)
            if name.task is not None:
                name.task.cancel()
        known = {each.endpoint.address for each in self._names}
        for name in [_Name(each) for each in names.values() if each.address not in known]:
            self._names.append(name)
            name.task = restarting_task(partial(self._look_up_forever, name), name="names of peers")
        self._dial_listed()

    def _dial_listed(self) -> None:
        listed = dict.fromkeys((*self._listed, *(address for each in self._names for address in each.addresses or ())))
        for address, link in self._links.items():
            link.is_listed = address in listed
        self._is_dialling = True
        for address in listed:
            if address not in self._links:
                self._dial(parse_endpoint(address))
        self._is_dialling = False

    def _dial(self, endpoint: Endpoint) -> None:
        assert self._context is not None
        self._links[endpoint.address] = PeerLink(
            self._context, endpoint, self._keys, on_open=self._on_open, losses=self.losses
        )

    async def _look_up_forever(self, name: _Name) -> None:
        while True:
            try:
                found = await addresses_of(name.endpoint.host)
                self._on_addresses(name, found)
            except OSError as error:  # keep the known addresses: a resolver that is down must not end connections
                self._complain(name, f"--peer-endpoint {name.endpoint.address} cannot be looked up: {error}")
            await asyncio.sleep(LOOK_UP_S)

    def _on_addresses(self, name: _Name, found: tuple[str, ...]) -> None:
        host, port = name.endpoint.host, name.endpoint.port
        self._complain(name, "" if found else f"--peer-endpoint {name.endpoint.address}: {host} has no address")
        name.addresses = tuple(f"tcp://[{each}]:{port}" if ":" in each else f"tcp://{each}:{port}" for each in found)
        self._dial_listed()

    def _complain(self, name: _Name, trouble: str) -> None:
        if trouble and trouble != name.trouble:
            log.warning("peer_not_found", error=trouble)
        name.trouble = trouble
