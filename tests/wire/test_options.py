"""Sockets: every limit that ZeroMQ leaves open by default is set, and does what it says."""

import errno
from collections.abc import Iterator
from typing import TypeAlias

import pytest
import zmq

from octavo.wire.codec import MAX_FRAME_BYTES, MAX_TO_WORKER_BYTES
from octavo.wire.options import new_dealer, new_router

WAIT_MS = 30_000  # for what comes: the machine may pause
Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"


@pytest.fixture
def context() -> Iterator[Context]:
    with zmq.Context() as opened:
        yield opened


COMMON = {
    zmq.LINGER: 0,
    zmq.SNDHWM: 2_000,
    zmq.RCVHWM: 2_000,
    zmq.HANDSHAKE_IVL: 2_000,
    zmq.HEARTBEAT_IVL: 2_000,
    zmq.HEARTBEAT_TIMEOUT: 10_000,
    zmq.IMMEDIATE: 1,
}


def test_every_limit_is_set(context: Context) -> None:
    with new_router(context) as router, new_dealer(context) as dealer:
        for socket, largest in ((router, MAX_FRAME_BYTES), (dealer, MAX_TO_WORKER_BYTES)):
            expected = COMMON | {zmq.MAXMSGSIZE: largest}
            assert {option: socket.getsockopt(option) for option in expected} == expected


def test_a_router_says_so_when_a_peer_is_not_there(context: Context) -> None:
    with new_router(context) as router:
        with pytest.raises(zmq.ZMQError) as raised:
            router.send_multipart((b"nobody", b"x"), zmq.NOBLOCK)
        assert raised.value.errno == errno.EHOSTUNREACH


def test_a_dealer_without_a_connection_does_not_queue(context: Context) -> None:
    with new_dealer(context) as dealer:
        dealer.connect("tcp://127.0.0.1:9")
        with pytest.raises(zmq.Again):
            dealer.send(b"x", zmq.NOBLOCK)


def test_an_oversized_frame_cuts_its_sender_off_and_nobody_else(context: Context) -> None:
    with new_router(context) as router, new_dealer(context) as large, new_dealer(context) as small:
        router.setsockopt(zmq.MAXMSGSIZE, 1_000)
        router.bind("tcp://127.0.0.1:*")
        for dealer in (large, small):
            dealer.connect(str(router.get_string(zmq.LAST_ENDPOINT)))
            assert dealer.poll(WAIT_MS, zmq.POLLOUT)
        monitor = large.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        large.send(bytes(1_001))
        assert monitor.poll(WAIT_MS)
        small.send(bytes(1_000))
        assert router.poll(WAIT_MS)
        assert len(router.recv_multipart()[1]) == 1_000
        assert not router.poll(100)
        large.disable_monitor()
        monitor.close()
