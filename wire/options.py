"""Sockets with every limit set: ZeroMQ's own defaults have none.

Every send is NOBLOCK: a full queue or an absent peer is an error for the caller, never a wait and never a silent drop.
"""

import zmq

from octavo.wire.codec import MAX_FRAME_BYTES, MAX_TO_WORKER_BYTES

SEND_HIGH_WATER = 2_000  # messages per peer: some seconds of steps
RECEIVE_HIGH_WATER = 2_000
HANDSHAKE_MS = 2_000  # a peer that connects and sends nothing is disconnected
PING_INTERVAL_MS = 2_000
PING_TIMEOUT_MS = 10_000  # longer than the loss timeouts above it: a short freeze must not break the connection
RECONNECT_MS = 50
RECONNECT_MAX_MS = 1_000
MAX_BACKLOG = 512  # connections not yet accepted
ZAP_DOMAIN = b"octavo"


def new_router(context: "zmq.Context[zmq.Socket[bytes]]") -> "zmq.Socket[bytes]":
    """The gateway's socket. Sends raise zmq.Again (queue full) or ZMQError EHOSTUNREACH (peer gone).

    The socket draws the ids of its peers: ZeroMQ refuses a peer that claims another's id.
    """
    socket = context.socket(zmq.ROUTER)
    _set_common(socket)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.BACKLOG, MAX_BACKLOG)
    return socket


def new_dealer(context: "zmq.Context[zmq.Socket[bytes]]") -> "zmq.Socket[bytes]":
    """A worker's socket. Sends raise zmq.Again while it is not connected or its queue is full."""
    socket = context.socket(zmq.DEALER)
    _set_common(socket)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_TO_WORKER_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    return socket


def _set_common(socket: "zmq.Socket[bytes]") -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, PING_INTERVAL_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, PING_TIMEOUT_MS)
    # No queue before the connection is open, and what a lost connection had queued is dropped with it: nothing
    # meant for one incarnation of a peer reaches the next.
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.IPV6, 1)
