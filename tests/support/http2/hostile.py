"""Bytes that no honest caller sends to a gRPC port. All cases are drawn from a seeded generator."""

import random
import struct
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from hpack import Encoder
from hyperframe.frame import DataFrame, Frame, HeadersFrame, RstStreamFrame

from octavo.v1 import inference_pb2 as pb
from tests.support.http2.raw import GENERATE, PREFACE, RawHttp2, generate, grpc_headers, grpc_message

TLS_HELLO = (
    bytes.fromhex("16030100450100004103035bd6") + bytes(32) + bytes.fromhex("000004c02bc02f010000140000000e000c")
)
HTTP1 = b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: x\r\n\r\n"
SETTINGS = bytes.fromhex("000000040000000000")
UNKNOWN_FIELD = b"\x98\x06\x01"  # so that no altered message is by chance a valid request, perhaps for a long output
BATCH = 200  # streams open at once


def _varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


@cache
def nested(depth: int, field_number: int = 1) -> bytes:
    """Nested messages, this deep."""
    data = b""
    for _ in range(depth):
        data = _varint(field_number << 3 | 2) + _varint(len(data)) + data
    return data


def first_bytes(drawn: random.Random) -> bytes:
    """What a connection begins with."""
    kind = drawn.randrange(6)
    if kind == 0:
        return HTTP1
    if kind == 1:
        return TLS_HELLO
    if kind == 2:
        return drawn.randbytes(drawn.randrange(1, 400))
    if kind == 3:
        return PREFACE + drawn.randbytes(drawn.randrange(9, 400))
    if kind == 4:  # a frame header, then noise
        length = drawn.choice((0, 1, 8, 100, 0xFFFFFF))
        head = struct.pack(">I", length)[1:] + bytes([drawn.randrange(16), drawn.randrange(256)])
        return PREFACE + SETTINGS + head + struct.pack(">I", drawn.getrandbits(32)) + drawn.randbytes(100)
    good = bytearray(Encoder().encode(grpc_headers()))
    for _ in range(drawn.randrange(1, 4)):
        good[drawn.randrange(len(good))] = drawn.randrange(256)
    return PREFACE + SETTINGS + HeadersFrame(1, bytes(good), flags=["END_HEADERS"]).serialize()


def connections(port: int, count: int, seed: int) -> Counter[str]:
    """Open this many connections that begin badly; counts of how they ended."""
    drawn, endings = random.Random(seed), Counter[str]()
    for _ in range(count):
        with RawHttp2(port, preface=b"") as connection:
            connection.send(first_bytes(drawn))
            connection.socket.settimeout(0.002)
            try:
                endings["answered" if connection.socket.recv(4096) else "closed"] += 1
            except TimeoutError:
                endings["left alone"] += 1
            except OSError:
                endings["closed"] += 1
    return endings


def bad_call(drawn: random.Random) -> tuple[bytes, list[tuple[str, str]]]:
    """A framed message and its headers, invalid in some way."""
    good = bytearray(generate())
    headers = list(grpc_headers())
    kind = drawn.randrange(8)
    if kind == 0:
        return grpc_message(drawn.randbytes(drawn.randrange(1, 200))), headers
    if kind == 1:
        good[drawn.randrange(len(good))] ^= 1 << drawn.randrange(8)
        good += UNKNOWN_FIELD
        return grpc_message(bytes(good)), headers
    if kind == 2:
        number = drawn.choice([field.number for field in pb.GenerateRequest.DESCRIPTOR.fields])
        return grpc_message(nested(drawn.choice((10, 99, 101, 5_000)), number) + UNKNOWN_FIELD), headers
    if kind == 3:
        return grpc_message(bytes(good)), list(
            grpc_headers(drawn.choice(("/a/b", "//", "/", GENERATE + "x", "/" * 99)))
        )
    if kind == 4:
        return grpc_message(bytes(good), length=drawn.getrandbits(32)), headers
    if kind == 5:
        wrong = drawn.choice(("application/json", "text/html", ""))
        message = grpc_message(bytes(good) + UNKNOWN_FIELD)
        return message, [(name, wrong if name == "content-type" else value) for name, value in headers]
    if kind == 6:
        return grpc_message(bytes(good), compressed=drawn.randrange(1, 256))[: drawn.randrange(1, 5)], headers
    gone = drawn.choice((":method", ":path", ":scheme", "te"))
    return grpc_message(bytes(good)), [each for each in headers if each[0] != gone]


def calls(port: int, count: int, seed: int) -> Counter[str]:
    """Make this many bad calls over few connections, in batches; counts of how their streams ended."""
    drawn, endings = random.Random(seed), Counter[str]()
    done = 0
    while done < count:
        with RawHttp2(port) as connection:
            size = min(BATCH, count - done)
            for _ in range(size):
                message, headers = bad_call(drawn)
                connection.call(message, headers)
            endings += connection.endings(size, timeout_s=30.0)  # generous, for slow machines
            done += size
    return endings


def calls_side_by_side(port: int, count: int, seed: int, *, num_threads: int) -> Counter[str]:
    """The same from several callers at once, each with its own seed, since one alone mostly waits."""
    shares = [count // num_threads + (index < count % num_threads) for index in range(num_threads)]
    with ThreadPoolExecutor(num_threads) as threads:
        done = [threads.submit(calls, port, share, seed + index) for index, share in enumerate(shares)]
        return sum((each.result() for each in done), Counter[str]())


def rapid_reset(port: int, count: int) -> tuple[int, int]:
    """Send HEADERS, DATA and RST_STREAM of valid calls over and over: how many were sent, over how many connections."""
    sent = num_connections = 0
    while sent < count:
        num_connections += 1
        with RawHttp2(port) as connection:
            while sent < count and not connection.is_closed:
                sent += _resets(connection, min(50, count - sent))
                connection.read(0.0005)
    return sent, num_connections


def _resets(connection: RawHttp2, count: int) -> int:
    message, parts = grpc_message(generate(max_tokens=1000)), list[Frame | bytes]()
    for _ in range(count):
        stream_id = connection.new_id()
        parts += [
            connection.headers(stream_id),
            DataFrame(stream_id, message, flags=["END_STREAM"]),
            RstStreamFrame(stream_id, error_code=8),
        ]
    connection.send(*parts)
    return count


def flood(port: int, unit: bytes, count: int, *, per_send: int = 200) -> tuple[int, int]:
    """Send the same frame over and over, reconnecting when the connection is closed; numbers of frames and of
    connections."""
    sent = num_connections = 0
    while sent < count:
        num_connections += 1
        with RawHttp2(port) as connection:
            while sent < count and connection.send(unit * min(per_send, count - sent)):
                sent += min(per_send, count - sent)
                connection.read(0.0005)
    return sent, num_connections


Attack = Callable[[int, int], tuple[int, int]]
