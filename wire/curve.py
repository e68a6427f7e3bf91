"""CURVE on sockets: the clients that a server accepts, the server that a client trusts. Both sides prove their keys."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from octavo.wire.endpoints import Transport, parse_endpoint
from octavo.wire.keys import KeyPair
from octavo.wire.options import ZAP_DOMAIN, new_dealer

TELL_AGAIN_S = 60.0
MAX_TOLD = 1_000
OnRefused = Callable[[str, str], None]
"""on_refused(address, key): the host that a client called from, and its public key (Z85)."""


class AllowList:
    """Client keys that may connect; pyzmq calls back for each handshake."""

    def __init__(self, public_keys: Iterable[bytes]) -> None:
        self._keys = frozenset(public_keys)
        self.num_refused = 0

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client with this public key (Z85) may connect."""
        is_allowed = key in self._keys
        self.num_refused += not is_allowed
        return is_allowed


class Seldom:
    """Passes a refusal on, once a minute for each address: a client that is refused tries again every second."""

    def __init__(self, on_refused: OnRefused, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._on_refused = on_refused
        self._clock = clock
        self._told_s: dict[str, float] = {}  # by address, the oldest first

    def refused(self, address: str, key: str) -> None:
        """Of more than MAX_TOLD addresses in a minute the others are passed over."""
        now_s = self._clock()
        while self._told_s and now_s - next(iter(self._told_s.values())) >= TELL_AGAIN_S:
            del self._told_s[next(iter(self._told_s))]
        if address not in self._told_s and len(self._told_s) < MAX_TOLD:
            self._told_s[address] = now_s
            self._on_refused(address, key)


class _Authenticator(ThreadAuthenticator):
    """Knows also from where a client that is refused has called, which a provider of credentials is not told."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", allow_list: AllowList, on_refused: OnRefused) -> None:
        super().__init__(context)
        self._allow_list = allow_list
        self._on_refused = on_refused

    async def handle_zap_message(self, msg: list[bytes]) -> None:
        """Answer one request: version, its id, domain, address, identity, mechanism, credentials."""
        num_refused = self._allow_list.num_refused
        await super().handle_zap_message(msg)
        if self._allow_list.num_refused > num_refused:
            address = msg[3].decode("ascii", "replace").removeprefix("::ffff:")  # IPv4, at a socket for both
            self._on_refused(address, z85.encode(msg[6]).decode())


class CurveGuard:
    """Answers ZeroMQ's authentication requests for one context, in its own thread, until closed."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        allowed_keys: Iterable[bytes],
        on_refused: OnRefused = lambda address, key: None,
    ) -> None:
        """on_refused: called in that thread, see `Seldom`."""
        self.allow_list = AllowList(allowed_keys)
        self._authenticator = _Authenticator(context, self.allow_list, Seldom(on_refused).refused)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain=ZAP_DOMAIN.decode(), credentials_provider=self.allow_list)

    def close(self) -> None:
        """Stop the thread. Idempotent."""
        if self._authenticator.is_alive():
            self._authenticator.stop()


def secure_server(socket: "zmq.Socket[bytes]", keys: KeyPair) -> None:
    """Make a socket a CURVE server, before bind; needs a CurveGuard on its context."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def secure_client(socket: "zmq.Socket[bytes]", keys: KeyPair, server_public: bytes) -> None:
    """Make a socket a CURVE client of one server, before connect."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, server_public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveKeys:
    """Our own pair, and the gateways' public key."""

    own: KeyPair
    gateway_public: bytes


def new_gateway_dealer(
    context: "zmq.Context[zmq.Socket[bytes]]", address: str, curve: CurveKeys | None
) -> "zmq.Socket[bytes]":
    """A DEALER for one address. CURVE is only used on tcp; ipc is protected by the run directory's permissions."""
    socket = new_dealer(context)
    if curve is not None and parse_endpoint(address).transport is Transport.TCP:
        secure_client(socket, curve.own, curve.gateway_public)
    return socket
