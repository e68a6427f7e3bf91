"""Rows C of the fault matrix, first half: callers that vanish, wait for ever, or send more than they may."""

import asyncio
import signal
import subprocess
import sys
import time
import zlib
from collections import Counter
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from hpack import Encoder
from hyperframe.frame import ContinuationFrame, DataFrame, Frame, HeadersFrame

from tests.support.faults.callers import calls
from tests.support.faults.figures import record
from tests.support.faults.siege import MIB, besiege, settle
from tests.support.http2.raw import PREFACE, RawHttp2, generate, grpc_headers, grpc_message
from tests.support.services.service import environment

ONE = "--workers=1"
LIMIT_BYTES = 4 * MIB
NUM_STREAMS = 32
HELD_S = 5.0  # 3000 steps, for which a stream that nobody ended would be held, take 15 s
CLIENT = """
import asyncio, sys
from octavo import AsyncClient
async def one(client, n):
    stream = client.stream(token_ids=[7, 8, n + 1], temperature=0, max_tokens=3000, ignore_eos=True, output="token_ids")
    async for _ in stream.deltas():
        print("started", flush=True)
async def main():
    async with AsyncClient(sys.argv[1]) as client:
        await asyncio.gather(*(one(client, n) for n in range(int(sys.argv[2]))))
asyncio.run(main())
"""


async def freed(faults: Any) -> float:
    """Seconds until nothing runs."""
    start_s = time.monotonic()
    while any(load.num_running or load.num_waiting for load in await asyncio.to_thread(faults.service.load)):
        await asyncio.sleep(0.02)
        assert time.monotonic() - start_s < 60, "B: still running"
    return time.monotonic() - start_s


async def bystand(faults: Any, victim: Any) -> tuple[list[Any], float]:
    """Others' calls around a victim that is cut; the seconds until only theirs are left, by the slow end of those."""
    others = calls(8, max_tokens=100, first=100)
    running = asyncio.create_task(faults.run(others))
    await asyncio.to_thread(victim)
    cut_s = time.monotonic()
    while any(load.num_running > len(others) for load in await asyncio.to_thread(faults.service.load)):
        await asyncio.sleep(0.01)
        assert time.monotonic() - cut_s < 60, "B: victims still run"
    seconds = time.monotonic() - cut_s
    await running
    return others, seconds


async def test_row_32_a_connection_that_is_reset_frees_its_streams(standing: Any) -> None:
    def victim() -> None:
        connection = RawHttp2(faults.service.port)
        for n in range(NUM_STREAMS):
            connection.call(grpc_message(generate([7, 8, n + 1], max_tokens=3000)))
        assert any("grpc" not in frame.__class__.__name__ for frame in connection.read(30.0))
        time.sleep(0.3)
        connection.abort()

    async with standing() as faults:
        others, seconds = await bystand(faults, victim)
        await freed(faults)
        await settle(faults)
        await faults.check(others, limit_s=60)
        record("32 RST", streams=NUM_STREAMS, freed_after_ms=round(1000 * seconds))
        assert seconds < HELD_S


async def test_row_32_a_killed_client_frees_its_streams(standing: Any) -> None:
    def victim() -> None:
        command = [sys.executable, "-c", CLIENT, faults.service.target, str(NUM_STREAMS)]
        with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            for _ in range(NUM_STREAMS):
                process.stdout.readline()
            process.send_signal(signal.SIGKILL)

    async with standing() as faults:
        others, seconds = await bystand(faults, victim)
        await freed(faults)
        await settle(faults)
        await faults.check(others, limit_s=60)
        record("32 kill -9", streams=NUM_STREAMS, freed_after_ms=round(1000 * seconds))
        assert seconds < HELD_S


def _hangs_up(connection: RawHttp2, until_s: float) -> bool:
    """Whether the other side does, without a word from us. until_s: monotonic."""
    with suppress(ConnectionError):
        while (rest_s := until_s - time.monotonic()) > 0:
            connection.socket.settimeout(rest_s)
            try:
                if not connection.socket.recv(1 << 16):
                    return True
            except TimeoutError:
                return False
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("count", [250, pytest.param(1000, marks=pytest.mark.long)])
async def test_row_33_a_thousand_connections_that_say_nothing_or_half_a_word(bench: Any, count: int) -> None:
    """A quarter each: nothing; half a preface; half a header block; a TLS hello that goes no further."""
    beginnings = [b"", PREFACE[:10], PREFACE + bytes.fromhex("000000040000000000"), bytes.fromhex("16030100c8010000c4")]

    def attack() -> tuple[int, float]:
        start_s = time.monotonic()
        with ExitStack() as stack:
            held = [stack.enter_context(RawHttp2(faults.service.port, preface=b"")) for _ in range(count)]
            for n, each in enumerate(held):
                each.answers_pings = False
                each.send(beginnings[n % 4])
                if n % 4 == 2:
                    each.send(HeadersFrame(1, Encoder().encode(grpc_headers())[:20]))
            until_s = time.monotonic() + 60  # handshakes have 3 s, acknowledgements 2; the library's own limit is 120
            closed = sum(_hangs_up(each, until_s) for each in held)
            return closed, time.monotonic() - start_s

    async with bench(ONE, connection={"handshake_timeout_s": 3.0, "settings_timeout_s": 2.0}) as faults:
        siege = await besiege(faults, attack)
        record("33", connections=count, closed_by_us=siege.result[0], **siege.figures())
        assert siege.result[0] == count


def oversized(port: int) -> Counter[str]:
    """Endings of messages that are, or say that they are, too large."""
    endings: Counter[str] = Counter()
    for length in (LIMIT_BYTES + 1, 64 * MIB, 2**32 - 1):
        with RawHttp2(port) as connection:
            stream_id = connection.call(grpc_message(bytes(100), length=length))
            endings[connection.ending(stream_id).kind] += 1
    for num_bytes in (LIMIT_BYTES + 1, 64 * MIB):
        with RawHttp2(port) as connection:
            stream_id = connection.call(grpc_message(bytes(num_bytes)))
            endings[connection.ending(stream_id).kind] += 1
    return endings


async def test_row_34_a_message_above_the_limit_is_refused_by_its_length_alone(bench: Any) -> None:
    async with bench(ONE) as faults:
        siege = await besiege(faults, lambda: oversized(faults.service.port))
        record("34", **siege.figures(), endings=dict(siege.result))
        assert siege.result == {"status 8": 5}
        assert siege.peak_mib - siege.before_mib < 3 * LIMIT_BYTES / MIB


def bomb(num_mib: int) -> bytes:
    """gzip of so many zeros, a thousandth of it."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    return b"".join(packer.compress(bytes(MIB)) for _ in range(num_mib)) + packer.flush()


@pytest.mark.parametrize("num_mib", [512, pytest.param(4096, marks=pytest.mark.long)])
async def test_row_35_what_unpacks_to_gigabytes_is_not_unpacked(bench: Any, num_mib: int) -> None:
    packed = grpc_message(bomb(num_mib), compressed=1)

    def attack() -> Counter[str]:
        endings: Counter[str] = Counter()
        for _ in range(20):
            with RawHttp2(faults.service.port) as connection:
                stream_id = connection.call(packed, grpc_headers(extra=[("grpc-encoding", "gzip")]))
                endings[connection.ending(stream_id).kind] += 1
        return endings

    async with bench(ONE) as faults:
        siege = await besiege(faults, attack)
        record(f"35 {num_mib} MiB", packed_kib=len(packed) >> 10, **siege.figures(), endings=dict(siege.result))
        assert siege.result == {"status 8": 20}
        assert siege.peak_mib - siege.before_mib < 5 * LIMIT_BYTES / MIB


async def test_row_35_encodings_that_nobody_knows_end_the_call_alone(standing: Any) -> None:
    def attack() -> list[str]:
        kinds = []
        for encoding, flag in (("snappy2", 1), ("identity", 1), ("deflate", 1), ("gzip", 1), ("gzip", 0)):
            headers = grpc_headers(extra=[("grpc-encoding", encoding)])
            with RawHttp2(faults.service.port) as connection:
                stream_id = connection.call(grpc_message(generate(), compressed=flag), headers)
                kinds.append(connection.ending(stream_id).kind)
        return kinds

    async with standing() as faults:
        siege = await besiege(faults, attack)
        record("35 unknown", endings=siege.result)
        assert siege.result[-1] == "status 0"  # not compressed, and it says so
        assert set(siege.result[:-1]) <= {"status 12", "status 13"}  # UNIMPLEMENTED or INTERNAL, of the library's


def header_frames(stream_id: int, num_bytes: int) -> list[Frame | bytes]:
    """HEADERS and CONTINUATIONs with a value of so many bytes. The stream stays open: no message follows."""
    block = Encoder().encode(grpc_headers(extra=[("x-a", "v" * num_bytes)]), huffman=False)
    parts: list[Frame] = [HeadersFrame(stream_id, block[:16_000])]
    parts += [ContinuationFrame(stream_id, block[at : at + 16_000]) for at in range(16_000, len(block), 16_000)]
    parts[-1].flags.add("END_HEADERS")
    return [part.serialize() for part in parts]


def _hears(connection: RawHttp2) -> tuple[int, int]:
    """Without an answer to anything, until the other side hangs up: streams that it ended, and bytes."""
    connection.socket.settimeout(60.0)
    data = b""
    with suppress(OSError):
        while chunk := connection.socket.recv(1 << 16):
            data += chunk
        connection.is_closed = True
    return data.count(bytes.fromhex("000004030000")), len(data)


async def test_row_36_metadata_above_the_limit_is_refused_also_of_clients_that_acknowledge_nothing(bench: Any) -> None:
    def polite(num_bytes: int) -> str:
        with RawHttp2(faults.service.port) as connection:
            while not connection.peer_settings:
                assert connection.read(30.0)
            connection.send(*header_frames(1, num_bytes))
            return connection.ending(1).kind

    def rude() -> tuple[int, bool]:
        """24 streams of a megabyte each on four connections that never acknowledge SETTINGS: the library holds such
        clients to no limit of ours. How many streams were ended; whether every connection was."""
        with ExitStack() as stack:
            connections = [stack.enter_context(RawHttp2(faults.service.port)) for _ in range(4)]
            for n in range(6):
                for connection in connections:
                    connection.send(*header_frames(2 * n + 1, 1_000_000))
            return sum(_hears(each)[0] for each in connections), all(each.is_closed for each in connections)

    async with bench(ONE) as faults:
        kinds = await asyncio.to_thread(lambda: {size: polite(size) for size in (17_000, 100_000, 1_000_000)})
        assert set(kinds.values()) == {"status 8"}, kinds
        siege = await besiege(faults, rude)
        record("36", **siege.figures(), rude_streams_ended=siege.result[0], rude_connection_closed=siege.result[1])
        assert siege.result == (24, True), "a client that acknowledges nothing may stay"
        assert siege.peak_mib - siege.before_mib < 80  # 24 blocks of a megabyte, as bytes and as pairs


async def test_row_36_hostile_header_blocks_cost_only_their_connection(standing: Any) -> None:
    """Padded integers, names without letters, endless CONTINUATION, tables that grow and shrink."""
    blocks = [
        b"\x7f" + b"\x80" * 10_000 + b"\x01",  # an integer of ten thousand bytes (CVE-2023-33953)
        b"\x40\x00\x01x" * 4_000,  # empty names
        b"\x3f\xff\xff\xff\xff\x0f" * 2_000,  # table size updates
        b"\x40\x7f\xff\xff\xff\xff\x0f",  # a name of gigabytes
        b"\xff" * 16_000,
        b"\x80" * 16_000,  # index 0
    ]

    def attack() -> Counter[str]:
        endings: Counter[str] = Counter()
        for block in blocks:
            with RawHttp2(faults.service.port) as connection:
                connection.send(HeadersFrame(1, block, flags=["END_HEADERS"]))
                endings[connection.ending(1, timeout_s=1.0).kind] += 1
        for _ in range(4):
            with RawHttp2(faults.service.port) as connection:
                connection.send(HeadersFrame(1, b""))
                flood = ContinuationFrame(1, Encoder().encode([("x-a", "v" * 100)])).serialize() * 500
                while connection.send(flood) and endings["floods"] < 400:
                    endings["floods"] += 1
                endings[connection.ending(1, timeout_s=1.0).kind] += 1
        return endings

    async with standing() as faults:
        siege = await besiege(faults, attack)
        record("36 HPACK", **siege.figures(), endings=dict(siege.result))
        assert siege.cpu_s < siege.seconds
        assert "status 0" not in siege.result


async def test_row_39_a_good_call_by_frames_is_served(standing: Any) -> None:
    """The control: what the rows above and below send is refused for its fault, not for its form."""

    def attack() -> str:
        with RawHttp2(faults.service.port) as connection:
            stream_id = connection.new_id()
            connection.send(connection.headers(stream_id))
            connection.send(DataFrame(stream_id, grpc_message(generate()), flags=["END_STREAM"]))
            return connection.ending(stream_id).kind

    async with standing() as faults:
        siege = await besiege(faults, attack)
        assert siege.result == "status 0"
