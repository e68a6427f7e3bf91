"""CURVE between real sockets: only listed keys get in, only the right server is believed, the default is silence."""

import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import zmq

from octavo.wire.curve import MAX_TOLD, CurveGuard, Seldom, secure_client, secure_server
from octavo.wire.keys import KeyPair, generate_keys
from octavo.wire.options import new_dealer, new_router

WAIT_MS = 30_000  # for what comes: the machine may pause
HANDSHAKE_MS = 1_000
SILENCE_MS = 300


class Server:
    """A CURVE server that lets one key in."""

    def __init__(self, stack: ExitStack) -> None:
        self.keys, self.client_keys = generate_keys(), generate_keys()
        self.context = stack.enter_context(zmq.Context())
        self.refused: list[tuple[str, str]] = []
        self.guard = CurveGuard(
            self.context, [self.client_keys.public], lambda address, key: self.refused.append((address, key))
        )
        stack.callback(self.guard.close)
        self.socket = stack.enter_context(new_router(self.context))
        secure_server(self.socket, self.keys)
        self.socket.bind("tcp://127.0.0.1:*")
        self.address = str(self.socket.get_string(zmq.LAST_ENDPOINT))

    def hears(self, client: "zmq.Socket[bytes]") -> bool:
        """Whether what a client sends arrives; for one that is let in."""
        client.connect(self.address)
        if client.poll(WAIT_MS, zmq.POLLOUT):
            client.send(b"hello", zmq.NOBLOCK)
        return bool(self.socket.poll(WAIT_MS))

    def overhears(self, client: "zmq.Socket[bytes]") -> bool:
        """Whether anything arrives of one that is not."""
        client.connect(self.address)
        if client.poll(HANDSHAKE_MS, zmq.POLLOUT):
            client.send(b"hello", zmq.NOBLOCK)
        return bool(self.socket.poll(SILENCE_MS))

    def refuses(self) -> bool:
        """Whether it turns a key away, soon."""
        until_s = time.monotonic() + WAIT_MS / 1000
        while not self.guard.allow_list.num_refused and time.monotonic() < until_s:
            time.sleep(0.01)
        return self.guard.allow_list.num_refused > 0


@pytest.fixture
def server() -> Iterator[Server]:
    with ExitStack() as stack:
        yield Server(stack)


@pytest.fixture
def client() -> Iterator["zmq.Socket[bytes]"]:
    with zmq.Context() as context, new_dealer(context) as socket:
        yield socket


def test_a_listed_key_gets_in(server: Server, client: "zmq.Socket[bytes]") -> None:
    secure_client(client, server.client_keys, server.keys.public)
    assert server.hears(client)
    assert server.guard.allow_list.num_refused == 0


def test_an_unlisted_key_does_not(server: Server, client: "zmq.Socket[bytes]") -> None:
    """And is told, once, with the host that it came from, however often it tries again."""
    keys = generate_keys()
    secure_client(client, keys, server.keys.public)
    assert not server.overhears(client)
    assert server.refuses()
    server.guard.close()
    assert server.refused == [("127.0.0.1", keys.public.decode())]


def test_refusals_are_told_once_a_minute_for_each_address_and_never_too_many() -> None:
    told: list[str] = []
    tries = [(0.0, "a"), (1.0, "a"), (2.0, "b"), (59.0, "a"), (60.0, "a"), (61.0, "b"), (62.0, "b")]
    times_s = [now_s for now_s, _ in tries] + [63.0] * 3 * MAX_TOLD
    seldom = Seldom(lambda address, key: told.append(address), clock=iter(times_s).__next__)
    for _, address in tries:
        seldom.refused(address, "key")
    assert told == ["a", "b", "a", "b"]
    for number in range(3 * MAX_TOLD):
        seldom.refused(str(number), "key")
    assert len(told) == MAX_TOLD + 2


def test_a_client_that_expects_another_server_does_not(server: Server, client: "zmq.Socket[bytes]") -> None:
    secure_client(client, server.client_keys, generate_keys().public)
    assert not server.overhears(client)


def test_plain_text_does_not(server: Server, client: "zmq.Socket[bytes]") -> None:
    assert not server.overhears(client)


def test_a_stolen_public_key_without_its_secret_does_not(server: Server, client: "zmq.Socket[bytes]") -> None:
    stolen = KeyPair(public=server.client_keys.public, secret=generate_keys().secret)
    secure_client(client, stolen, server.keys.public)
    assert not server.overhears(client)
