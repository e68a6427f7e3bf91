"""Rows E of the fault matrix: hostile peers on the sockets between gateways and workers."""

import asyncio
import random
import socket
import struct
import time
from collections.abc import AsyncIterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from octavo.gateway.workers.pool import WorkerPool
from octavo.wire.codec import MAX_FRAME_BYTES, encode
from octavo.wire.messages import Heartbeat
from octavo.wire.options import new_dealer
from tests.support.faults.callers import calls
from tests.support.faults.figures import record
from tests.support.faults.siege import besiege
from tests.support.gateway.workers import (
    FakeWorker,
    RecordingSink,
    finished,
    open_pool,
    request,
    step_output,
    submit,
)
from tests.support.waiting import until

ONE = "--workers=1"
LONG = pytest.mark.long
MINUTES = pytest.mark.timeout(1800)
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48)


def hostile_frames(drawn: random.Random) -> list[bytes]:
    """One message of one peer: noise, damaged messages, wrong types, nesting, floods of empty frames."""
    proper = encode(Heartbeat(epoch="x" * 32, num_steps=1, has_work=False))
    kind = drawn.randrange(7)
    if kind == 0:
        return [drawn.randbytes(drawn.randrange(80))]
    if kind == 1:
        return [b"\x01" + drawn.randbytes(drawn.randrange(80))]
    if kind == 2:
        return [proper[: drawn.randrange(len(proper))]]
    if kind == 3:
        damaged = bytearray(proper)
        damaged[drawn.randrange(1, len(damaged))] = drawn.randrange(256)
        return [bytes(damaged)]
    if kind == 4:
        return [b"\x01" + msgspec.msgpack.encode([drawn.choice(("hb", "step", "?")), float("nan"), 2**64 - 1, None])]
    if kind == 5:
        return [b"\x01" + b"\x91" * drawn.choice((10, 2_000, 20_000))]
    return [b""] * drawn.choice((1, 2, 100))


def throw_frames(address: str, count: int, seed: int) -> int:
    """So many hostile messages, as fast as the gateway takes them."""
    drawn, sent = random.Random(seed), 0
    prepared = [hostile_frames(drawn) for _ in range(2_000)]
    with zmq.Context() as context, new_dealer(context) as peer:
        peer.setsockopt(zmq.LINGER, 60_000)
        peer.setsockopt(zmq.SNDTIMEO, 60_000)
        peer.connect(address)
        while sent < count:
            peer.send_multipart(prepared[drawn.randrange(len(prepared))])
            sent += 1
    return sent


def endpoint(faults: Any) -> str:
    """Where the gateway listens for workers."""
    return f"ipc://{faults.service.log.parent / 'run' / 'gateway-0.sock'}"


@pytest.mark.parametrize("count", [20_000, pytest.param(1_000_000, marks=[LONG, MINUTES])])
async def test_row_51_hostile_frames_are_counted_and_nothing_else(standing: Any, count: int) -> None:
    async with standing() as faults:
        siege = await besiege(faults, lambda: throw_frames(endpoint(faults), count, seed=51), canary_s=30)
        page = await faults.metrics()
        dropped = page.total("octavo_gateway_zmq_undecodable_frames_total")
        record(
            f"51 {count}",
            frames=count, crashes=0, undecodable=int(dropped), per_s=round(count / siege.seconds), **siege.figures(),
        )  # fmt: skip
        assert dropped > count * 0.9


async def test_row_51_bytes_that_are_no_zeromq_reach_nobody(standing: Any) -> None:
    drawn = random.Random(510)
    beginnings = [b"", b"\xff", GREETING[:32], GREETING, GREETING + drawn.randbytes(200), b"GET / HTTP/1.1\r\n\r\n"]

    def attack() -> int:
        num_closed, path = 0, endpoint(faults).removeprefix("ipc://")
        for n in range(600):
            with closing(patient_socket()) as peer, suppress(OSError):
                peer.connect(path)
                peer.sendall(beginnings[n % 6] if n % 2 else drawn.randbytes(1 + n % 200))
                num_closed += 1
        return num_closed

    async with standing() as faults:
        siege = await besiege(faults, attack)
        record("51 raw", connections=siege.result, **siege.figures())
        assert siege.result > 500


async def test_row_53_a_frame_above_the_limit_cuts_its_sender_and_takes_no_memory(bench: Any) -> None:
    def attack() -> list[bool]:
        """Whether each socket was cut: by a frame that says it has so many bytes."""
        cut = []
        for num_bytes in (MAX_FRAME_BYTES + 1, 1 << 30, 1 << 62):
            with closing(patient_socket()) as peer:
                peer.connect(endpoint(faults).removeprefix("ipc://"))
                peer.sendall(GREETING[:10] + b"\x03\x01NULL" + bytes(16) + b"\x00" + bytes(31))
                ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
                peer.sendall(b"\x04" + bytes([len(ready)]) + ready)
                peer.sendall(b"\x02" + num_bytes.to_bytes(8, "big") + b"x" * 1000)
                cut.append(_is_cut(peer))
        return cut

    async with bench(ONE) as faults:
        siege = await besiege(faults, attack)
        record("53", cut=siege.result, **siege.figures())
        assert siege.result == [True, True, True]
        assert siege.peak_mib - siege.before_mib < 16


def patient_socket() -> socket.socket:
    """One that waits for room in the queue of who listens, and for what comes: a minute. (With Python's own timeouts a
    full queue is an error at once.)"""
    peer = socket.socket(socket.AF_UNIX)
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        peer.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 60, 0))
    return peer


def _is_cut(peer: socket.socket) -> bool:
    try:
        while peer.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[WorkerPool]:
    async with open_pool(tmp_path) as (opened, _):
        yield opened


def change(frames: list[bytes], kind: str, at: int) -> list[bytes]:
    """What an attacker between the two makes of a worker's messages."""
    if kind == "replayed":
        return [*frames[: at + 1], frames[max(0, at - 2)], *frames[at + 1 :]]
    if kind == "duplicated":
        return [*frames[: at + 1], frames[at], *frames[at + 1 :]]
    if kind == "swapped":
        return [*frames[:at], *frames[at : at + 2][::-1], *frames[at + 2 :]]
    return [*frames[:at], *frames[at + 1 :]]  # lost


@pytest.mark.parametrize("kind", ["replayed", "duplicated", "swapped", "lost"])
async def test_row_54_changed_order_of_steps_never_changes_a_token(pool: WorkerPool, kind: str) -> None:
    """Twelve positions each: what arrived is a beginning of the truth, and the worker is recycled."""
    num_tokens = 14
    for at in range(12):
        worker = FakeWorker(pool.bound_endpoints[0], f"w{at}")
        try:
            await worker.join(pool)
            sink = RecordingSink()
            view = next(each for each in pool.workers() if each.epoch == worker.epoch)
            handle = submit(pool, view, request(prompt=(1, 2, 3)), sink)
            frames = [encode(step_output(worker.epoch, n + 1, [(handle, 100 + n)])) for n in range(num_tokens)]
            for frame in change(frames, kind, at):
                await worker.send_frames(frame)
            await sink.end()
            assert sink.ends == [("lost", "WORKER_LOST")]
            assert sink.tokens == [100 + n for n in range(len(sink.tokens))], f"{kind} at {at}"
            await until(lambda: worker.epoch not in {each.epoch for each in pool.workers()})  # noqa: B023
        finally:
            worker.close()
    record(f"54 {kind}", positions=12, tokens_twice_or_missing=0)


async def test_row_54_the_control_arrives_whole(pool: WorkerPool) -> None:
    worker = FakeWorker(pool.bound_endpoints[0])
    await worker.join(pool)
    sink = RecordingSink()
    handle = submit(pool, pool.workers()[0], request(), sink)
    for n in range(14):
        await worker.step([(handle, 100 + n)])
    await worker.step(finished=(finished(handle, 14),))
    await sink.end()
    assert sink.tokens == [100 + n for n in range(14)]
    worker.close()


async def test_row_55_strangers_that_claim_a_workers_name_get_nothing(standing: Any) -> None:
    """A service draws a token for its workers; who does not show it is nobody, whatever else it says."""

    async def impostor(n: int) -> bool:
        worker = FakeWorker(endpoint(faults), "worker-0" if n % 2 else f"rogue-{n}")
        try:
            await worker.send(worker.register)
            await worker.send(step_output(worker.epoch, 1, [(1, 5), (2, 5)]))
            await worker.send(step_output(next(iter(epochs)), 1, [(1, 5)]))
            return True
        finally:
            await asyncio.sleep(0.01)
            worker.close()

    async with standing() as faults:
        epochs = {load.epoch for load in faults.service.load()}
        before = [process.pid for process in faults.service.children("worker")]
        others = calls(8, max_tokens=200)
        running = asyncio.create_task(faults.run(others))
        for n in range(40):
            assert await impostor(n)
        await running
        assert [process.pid for process in faults.service.children("worker")] == before
        assert [load.worker_id for load in faults.service.load()] == ["worker-0"]
        record("55", impostors=40, hijacks=0)
        assert [call.error for call in others] == [None] * len(others)
        faults.check_calls(others, limit_s=60)
        await faults.canary()


async def test_row_55_four_hundred_handshakes_that_stall_keep_nobody_out(standing: Any) -> None:
    def attack() -> int:
        held = []
        try:
            for _ in range(400):
                peer = patient_socket()
                held.append(peer)
                peer.connect(endpoint(faults).removeprefix("ipc://"))
                with suppress(OSError):
                    peer.sendall(GREETING[:20])
            return sum(_is_cut(peer) for peer in held[:50])  # handshakes have two seconds
        finally:
            for peer in held:
                peer.close()

    async with standing() as faults:
        siege = await besiege(faults, attack)
        record("55 stalled", connections=400, cut_of_50=siege.result, **siege.figures())
        assert siege.result == 50


async def test_row_56_a_socket_that_vanishes_is_bound_again(standing: Any) -> None:
    async with standing() as faults:
        path = Path(endpoint(faults).removeprefix("ipc://"))
        everybody = calls(8, max_tokens=200)
        running = asyncio.create_task(faults.run(everybody))
        path.unlink()  # noqa: ASYNC240
        start_s = time.monotonic()
        while not path.exists():  # noqa: ASYNC240
            await asyncio.sleep(0.01)
            assert time.monotonic() - start_s < 60
        record("56", bound_again_after_s=round(time.monotonic() - start_s, 2))
        await running
        faults.check_calls(everybody, limit_s=60)
        await faults.note_gateways()  # the first listener stays open, or its connections would be cut
        await faults.check(everybody, limit_s=60)
