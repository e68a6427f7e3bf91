"""Faults of the front door and of the workers' sockets: what strangers send, in threads of this process.

Each adds to `foreign` how many calls the gateway may have counted for it.
"""

import asyncio
import random
import socket
import time
import urllib.request
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from typing import Any

import msgspec
import psutil
import zmq

from octavo import AsyncClient, OctavoError
from octavo.wire.codec import encode
from octavo.wire.messages import Heartbeat
from octavo.wire.options import new_dealer
from tests.soak.faults import Fault, Field
from tests.soak.load import OWN_CONNECTION
from tests.support.faults.bench import NO_RETRIES
from tests.support.http2 import hostile
from tests.support.http2.raw import PREFACE, RawHttp2, generate, grpc_headers, grpc_message
from tests.support.http2.unread_caller import UnreadingCaller

MIB = 1 << 20
PING = bytes.fromhex("000008060000000000") + b"12345678"
SETTINGS = bytes.fromhex("000000040000000000")
Attack = Callable[[int, random.Random], int]  # of a port; gives the calls that may have been counted


def _reset_connection(port: int, drawn: random.Random) -> int:
    connection = RawHttp2(port)
    for n in range(8):
        connection.call(grpc_message(generate([7, 8, n + 1], max_tokens=500)))
    connection.read(1.0)
    connection.abort()
    return 8


def _silence(port: int, drawn: random.Random) -> int:
    beginnings = [b"", PREFACE[:10], PREFACE + SETTINGS, bytes.fromhex("16030100c8010000c4")]
    with ExitStack() as stack:
        for n in range(60):
            held = stack.enter_context(RawHttp2(port, preface=b""))
            held.send(beginnings[n % 4])
        time.sleep(drawn.uniform(1.0, 6.0))
    return 0


def _oversized(port: int, drawn: random.Random) -> int:
    for length in (4 * MIB + 1, 2**32 - 1):
        with RawHttp2(port) as connection:
            connection.ending(connection.call(grpc_message(bytes(100), length=length)))
    return 2


def _bombs(port: int, drawn: random.Random) -> int:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    packed = b"".join(packer.compress(bytes(MIB)) for _ in range(64)) + packer.flush()
    for _ in range(5):
        with RawHttp2(port) as connection:
            headers = grpc_headers(extra=[("grpc-encoding", "gzip")])
            connection.ending(connection.call(grpc_message(packed, compressed=1), headers))
    return 5


def _metadata(port: int, drawn: random.Random) -> int:
    for num_bytes in (17_000, 60_000):
        with RawHttp2(port) as connection:
            connection.read(0.5)
            headers = grpc_headers(extra=[(f"x-{n}", "v" * 1_000) for n in range(num_bytes // 1_000)])
            connection.ending(connection.call(grpc_message(generate()), headers), timeout_s=1.0)
    return 2


def _rapid_reset(port: int, drawn: random.Random) -> int:
    return hostile.rapid_reset(port, 1_000)[0]


def _floods(port: int, drawn: random.Random) -> int:
    hostile.flood(port, drawn.choice((PING, SETTINGS)), 10_000)
    return 0


def _garbage_connections(port: int, drawn: random.Random) -> int:
    return hostile.connections(port, 150, seed=drawn.getrandbits(32)).total()


def _garbage_calls(port: int, drawn: random.Random) -> int:
    return hostile.calls(port, 200, seed=drawn.getrandbits(32)).total()


def _in_thread(attack: Attack) -> Callable[[Field, random.Random], Any]:
    async def inject(field: Field, drawn: random.Random) -> None:
        num_calls = 2_000  # whatever it sent where it did not get to its end
        with suppress(OSError):
            num_calls = await asyncio.to_thread(attack, field.bench.service.port, drawn)
        field.bench.foreign += num_calls

    return inject


async def _unread(field: Field, drawn: random.Random) -> None:
    """Streams in whose windows nothing fits, until the service ends them."""
    field.bench.foreign += 10
    with suppress(OSError):
        caller = await UnreadingCaller.connect(field.bench.service.port)
        for n in range(10):
            caller.open(generate([9, 10 + n], max_tokens=200, seed=n))
        await caller.receive(for_s=drawn.uniform(0.5, 3.0))
        await caller.close()


async def _wrong_requests(field: Field, drawn: random.Random) -> None:
    """Rows 42, 44, 47, 48, 58 and 59: parameters, names, texts and schemas that are refused, each by its name."""
    odd: list[dict[str, Any]] = [
        {"temperature": float("nan")}, {"temperature": -1.0}, {"top_p": 2.0}, {"top_k": 2**31}, {"max_tokens": 0},
        {"num_outputs": 16_384}, {"logprobs": 10_000}, {"stop": ["x"] * 10_000}, {"model": "../../etc/passwd"},
        {"model": f"tenant-{drawn.getrandbits(32)}"}, {"token_ids": [10**9]}, {"text": "a" * 3_000_000},
        {"text": "<|im_end|>" * 20_000}, {"regex": "(a+)+$" * 5_000}, {"json_schema": '{"type":' * 500},
        {"json_schema": '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}'},
    ]  # fmt: skip
    async with AsyncClient(field.load.target, options=(*NO_RETRIES, OWN_CONNECTION)) as client:
        for fields in odd:
            field.bench.foreign += 1
            with suppress(OctavoError, ValueError):  # the latter where no message can hold it
                has_input = {"text", "token_ids"} & fields.keys()
                await client.complete(timeout_s=10, **({} if has_input else {"text": "x"}) | {"max_tokens": 2} | fields)


async def _scrapes(field: Field, drawn: random.Random) -> None:
    def scrape(_: int) -> None:
        with suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{field.bench.metrics_port}/metrics", timeout=5).read()

    def flood() -> None:
        with ThreadPoolExecutor(10) as threads:
            list(threads.map(scrape, range(50)))

    await asyncio.to_thread(flood)


async def _few_descriptors(field: Field, drawn: random.Random) -> None:
    """The gateway may have no more than it has now, and many want in."""
    (gateway,) = field.bench.service.children("gateway")
    limits = gateway.rlimit(psutil.RLIMIT_NOFILE)
    gateway.rlimit(psutil.RLIMIT_NOFILE, (gateway.num_fds() + 10, limits[1]))

    def exhaust() -> None:
        with ExitStack() as stack:
            for _ in range(100):
                with suppress(OSError):
                    stack.enter_context(RawHttp2(field.bench.service.port))
            time.sleep(1.0)

    try:
        await asyncio.to_thread(exhaust)
    finally:
        with suppress(psutil.Error, OSError):
            gateway.rlimit(psutil.RLIMIT_NOFILE, limits)


async def _hostile_frames(field: Field, drawn: random.Random) -> None:
    path = field.bench.service.log.parent / "run" / "gateway-0.sock"
    proper = encode(Heartbeat(epoch="x" * 32, num_steps=1, has_work=False))
    frames = [drawn.randbytes(40), b"\x01" + drawn.randbytes(40), proper[:9], b"\x01" + b"\x91" * 2_000, b""]
    frames.append(b"\x01" + msgspec.msgpack.encode(["hb", float("nan"), 2**64 - 1, None]))

    def throw() -> None:
        with zmq.Context() as context, new_dealer(context) as peer:
            peer.setsockopt(zmq.LINGER, 500)
            peer.setsockopt(zmq.SNDTIMEO, 1_000)
            peer.connect(f"ipc://{path}")
            with suppress(zmq.Again):
                for n in range(3_000):
                    peer.send(frames[n % len(frames)])
        for n in range(50):
            with closing(socket.socket(socket.AF_UNIX)) as raw, suppress(OSError):
                raw.connect(str(path))
                raw.sendall(bytes([n]) * (1 + n))

    await asyncio.to_thread(throw)


_BUSY = frozenset({"UNKNOWN"})  # the library's own refusal, without a reason of ours
OUTER = (
    Fault(name="reset connection", rows="32", inject=_in_thread(_reset_connection)),
    Fault(name="silent connections", rows="33", inject=_in_thread(_silence)),
    Fault(name="oversized messages", rows="34", inject=_in_thread(_oversized)),
    Fault(name="compression bombs", rows="35", inject=_in_thread(_bombs)),
    Fault(name="metadata", rows="36", inject=_in_thread(_metadata)),
    Fault(name="rapid reset", rows="37", inject=_in_thread(_rapid_reset), costs=_BUSY),
    Fault(name="frame floods", rows="38", inject=_in_thread(_floods)),
    Fault(name="garbage connections", rows="39", inject=_in_thread(_garbage_connections)),
    Fault(name="garbage calls", rows="39", inject=_in_thread(_garbage_calls)),
    Fault(name="unread streams", rows="28", inject=_unread),
    Fault(name="wrong requests", rows="42, 44, 47, 48, 58", inject=_wrong_requests),
    Fault(name="scrape flood", rows="59", inject=_scrapes),
    Fault(name="few descriptors", rows="41", inject=_few_descriptors, costs=_BUSY, weight=0.5),
    Fault(name="hostile frames", rows="51", inject=_hostile_frames),
)
