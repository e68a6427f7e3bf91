"""CURVE on sockets: the clients that a server accepts, the server that a client trusts. Both sides prove their keys."""

from collections.abc import Iterable
from dataclasses import dataclass

import zmq
from zmq.auth.thread import ThreadAuthenticator

from octavo.wire.endpoints import Transport, parse_endpoint
from octavo.wire.keys import KeyPair
from octavo.wire.options import ZAP_DOMAIN, new_dealer


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


class CurveGuard:
    """Answers ZeroMQ's authentication requests for one context, in its own thread, until closed."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", allowed_keys: Iterable[bytes]) -> None:
        self.allow_list = AllowList(allowed_keys)
        self._authenticator = ThreadAuthenticator(context)
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
