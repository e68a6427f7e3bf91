"""Rows C of the fault matrix, second half: HTTP/2 turned against the server, garbage, and descriptors that run out."""

import asyncio
import socket
import threading
import time
from collections import Counter
from typing import Any

import psutil
import pytest
from hyperframe.frame import DataFrame, PingFrame, SettingsFrame, WindowUpdateFrame

from octavo import AsyncClient
from tests.support.faults.bench import NO_RETRIES, FaultBench
from tests.support.faults.callers import Call, calls, golden, run
from tests.support.faults.figures import record
from tests.support.faults.siege import besiege, let_pool_threads_be, settle
from tests.support.http2 import hostile
from tests.support.http2.crowd import Crowd, Manner
from tests.support.http2.raw import RawHttp2, generate, grpc_headers, grpc_message

ONE = "--workers=1"
LONG = pytest.mark.long
MINUTES = pytest.mark.timeout(1800)
# What gRPC's core keeps of a call that is reset, with the pages around it: a bare server of grpc.aio as much.
KEPT_BYTES_A_RESET = 100


@pytest.mark.parametrize(
    ("count", "num_connections"),
    [
        (2_000, 1),
        pytest.param(50_000, 1, marks=[LONG, MINUTES]),
        pytest.param(5_000, 10, marks=[LONG, MINUTES]),
        pytest.param(50_000, 10, marks=[LONG, MINUTES]),
    ],
)
async def test_row_37_streams_that_are_reset_at_once_leave_nothing(
    standing: Any, count: int, num_connections: int
) -> None:
    def attack() -> int:
        threads = [
            threading.Thread(target=hostile.rapid_reset, args=(faults.service.port, count))
            for _ in range(num_connections)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return count * num_connections

    async with standing() as faults:
        faults.rss_slack_bytes += count * num_connections * KEPT_BYTES_A_RESET
        # Ten such connections at once are more than the library queues: it refuses some callers by itself.
        siege = await besiege(faults, attack, canary_s=30, victims=["UNKNOWN"] if num_connections > 1 else [])
        record(
            f"37 {count} × {num_connections}",
            resets=siege.result,
            canaries_refused=sum(call.error is not None for call in siege.canaries),
            resets_per_s=round(siege.result / siege.seconds),
            **siege.figures(),
        )
        assert siege.peak_mib - siege.before_mib < 200


@pytest.mark.parametrize("num_bytes", [20_000, pytest.param(1_000_000, marks=[LONG, MINUTES])])
async def test_row_38_a_message_in_frames_of_one_byte_costs_little_memory(bench: Any, num_bytes: int) -> None:
    def attack() -> Counter[str]:
        with RawHttp2(faults.service.port) as connection:
            message = grpc_message(bytes([0x98, 0x06]) * (num_bytes // 2))  # a field that nobody knows
            connection.call(message, piece_bytes=1)
            return connection.endings(1, timeout_s=60.0)

    async with bench(ONE) as faults:
        siege = await besiege(faults, attack)
        per_mb = (siege.peak_mib - siege.before_mib) / (num_bytes / 1e6)
        record(f"38 DATA {num_bytes}", endings=dict(siege.result), mib_per_mb=round(per_mb, 1), **siege.figures())
        assert siege.peak_mib - siege.before_mib < 150
        # The last: a request has twenty seconds to come.
        assert set(siege.result) <= {"status 3 INVALID_FIELD", "status 13 INVALID_FIELD", "status 4 DEADLINE"}


FLOODS = {
    "pings": PingFrame(opaque_data=b"12345678").serialize(),
    "settings": SettingsFrame(settings={SettingsFrame.INITIAL_WINDOW_SIZE: 65_535}).serialize(),
    "empty data": DataFrame(1, b"").serialize(),
    "windows": WindowUpdateFrame(0, window_increment=1).serialize(),
}


@pytest.mark.parametrize("kind", sorted(FLOODS))
@pytest.mark.parametrize("count", [20_000, pytest.param(1_000_000, marks=[LONG, MINUTES])])
async def test_row_38_frames_that_mean_nothing_cost_bounded_memory(standing: Any, kind: str, count: int) -> None:
    async with standing() as faults:
        siege = await besiege(faults, lambda: hostile.flood(faults.service.port, FLOODS[kind], count))
        frames, connections = siege.result
        record(f"38 {kind} {count}", frames=frames, connections=connections, **siege.figures())
        assert siege.peak_mib - siege.before_mib < 100


async def test_row_38_a_window_beyond_two_gigabytes_is_no_reason_to_send_for_ever(bench: Any) -> None:
    """The library neither counts it as an error nor gives it memory."""

    def attack() -> Counter[str]:
        with RawHttp2(faults.service.port) as connection:
            stream_id = connection.call(grpc_message(generate(max_tokens=50)))
            for each in (0, stream_id) * 50:
                connection.send(WindowUpdateFrame(each, window_increment=2**31 - 1))
            return connection.endings(1, timeout_s=3.0)

    async with bench(ONE) as faults:
        siege = await besiege(faults, attack)
        record("38 overflow", endings=dict(siege.result), **siege.figures())
        assert siege.result.total() == 1
        assert siege.peak_mib - siege.before_mib < 16


@pytest.mark.parametrize("count", [500, pytest.param(50_000, marks=[LONG, MINUTES])])
async def test_row_39_connections_that_begin_with_garbage_are_closed_and_harm_nobody(standing: Any, count: int) -> None:
    async with standing() as faults:
        siege = await besiege(faults, lambda: hostile.connections(faults.service.port, count, seed=39))
        record(
            f"39 connections {count}",
            cases=count, crashes=0, per_s=round(count / siege.seconds), endings=dict(siege.result), **siege.figures(),
        )  # fmt: skip
        assert siege.result.total() == count


@pytest.mark.parametrize(("count", "num_threads"), [(600, 1), pytest.param(50_000, 5, marks=[LONG, MINUTES])])
async def test_row_39_calls_that_are_garbage_end_each_with_a_status(
    standing: Any, count: int, num_threads: int
) -> None:
    def attack() -> Counter[str]:
        return hostile.calls_side_by_side(faults.service.port, count, seed=40, num_threads=num_threads)

    async with standing() as faults:
        siege = await besiege(faults, attack, canary_s=30)
        record(
            f"39 calls {count}",
            cases=count, crashes=0, per_s=round(count / siege.seconds), endings=dict(siege.result), **siege.figures(),
        )  # fmt: skip
        assert siege.result.total() == count
        assert not [kind for kind in siege.result if kind.startswith(("status 2 ", "silence"))], "P, H"


def hold(port: int, count: int, held: list[RawHttp2 | socket.socket]) -> None:
    """So many connections; once the system's queue is full, it answers nobody, and the others are hardly waited for."""
    is_full = False
    for _ in range(count):
        try:
            held.append(
                socket.create_connection(("127.0.0.1", port), timeout=0.005)
                if is_full
                else RawHttp2(port, connect_timeout_s=3.0)
            )
        except TimeoutError:
            is_full = True


@pytest.mark.parametrize(("count", "descriptors"), [(400, 128), pytest.param(5_000, 128, marks=[LONG, MINUTES])])
async def test_row_41_connections_beyond_the_descriptors_are_not_let_in_and_the_others_go_on(
    standing: Any, count: int, descriptors: int
) -> None:
    async with standing() as faults:
        gateway = faults.service.children("gateway")[0]
        limits = gateway.rlimit(psutil.RLIMIT_NOFILE)
        gateway.rlimit(psutil.RLIMIT_NOFILE, (descriptors, limits[1]))
        others = calls(8, max_tokens=600)
        running = asyncio.create_task(faults.run(others))
        while not all(call.token_ids for call in others):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        held: list[RawHttp2 | socket.socket] = []
        try:
            await asyncio.to_thread(hold, faults.service.port, count, held)
            await running
            start_s, busy_s = time.monotonic(), sum(gateway.cpu_times()[:2])
            await asyncio.sleep(1.5)  # nobody is served now
            share = (sum(gateway.cpu_times()[:2]) - busy_s) / (time.monotonic() - start_s)
            most = gateway.num_fds()
        finally:
            for each in held:
                each.close()
        gateway.rlimit(psutil.RLIMIT_NOFILE, limits)
        start_s = time.monotonic()
        await faults.canary()
        record(
            "41" if count == 400 else f"41 {count}",
            connections=count, queued_or_let_in=len(held), descriptors=descriptors, held_at_most=most,
            cpu_share_while_exhausted=round(share, 2),
            canary_after_s=round(time.monotonic() - start_s, 2),
        )  # fmt: skip
        let_pool_threads_be(faults)
        await settle(faults)
        await faults.check(others, limit_s=60)
        assert share < 0.5, "a busy loop on EMFILE"


async def served(faults: FaultBench) -> int:
    """A new caller's first answer; how often it had to come."""
    for num_tries in range(1, 100):
        call = Call(prompt=[3, 1, 4, num_tries], max_tokens=3)
        async with AsyncClient(faults.service.target, options=NO_RETRIES) as client:
            await run(client, call)
        if call.error is None:
            assert call.token_ids == golden(call, faults.model)
            faults.num_rpcs += 1
            return num_tries
        await asyncio.sleep(0.1)
    raise AssertionError(f"L: nobody new is let in: {call.error}")


@pytest.mark.parametrize(
    ("manner", "returns_per_s"),
    [(Manner.PINGS, 0), (Manner.SILENT, 0), (Manner.HALF_CALL, 0), (Manner.WATCH, 0), (Manner.PINGS, 200)],
)
async def test_row_41_connections_that_only_cost_descriptors_keep_neither_callers_nor_scrapers_out(
    bench: Any, manner: Manner, returns_per_s: int
) -> None:
    """Half of 256 descriptors are callers', an eighth of these is always free for the next. The crowd comes from the
    same address as everybody here."""
    async with bench(ONE, "--keepalive-time-s=1", descriptors=256) as faults:
        (gateway,) = faults.service.children("gateway")
        others = calls(8, max_tokens=600)
        running = asyncio.create_task(faults.run(others))
        while not all(call.token_ids for call in others):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        tries, most = list[int](), 0
        with Crowd(faults.service.port, 400, manner, returns_per_s=returns_per_s) as crowd:
            await asyncio.to_thread(crowd.until, lambda crowd: crowd.num_opened >= 400 and crowd.num_open < 128)
            busy_s, start_s = sum(gateway.cpu_times()[:2]), time.monotonic()
            for _ in range(10):
                tries.append(await served(faults))
                page = await faults.metrics()
                most = max(most, gateway.num_fds())
            await running
            share = (sum(gateway.cpu_times()[:2]) - busy_s) / (time.monotonic() - start_s)
        record(
            "41 returning" if returns_per_s else f"41 {manner.value}",
            connections=crowd.num_opened, return_per_s=returns_per_s,
            held_at_most=most, descriptors=256, tries_of_callers_most=max(tries),
            scrapes_answered=len(tries), cpu_share=round(share, 2),
        )  # fmt: skip
        assert page.total("octavo_gateway_connections_closed_total") > 0
        assert page.total("octavo_gateway_max_connections") == 128
        assert most <= 200, "descriptors that are not callers' were taken"
        assert "too_many_connections" in faults.service.log.read_text()
        if not returns_per_s:
            assert tries == [1] * 10
        let_pool_threads_be(faults)
        await settle(faults)
        await faults.check(others, limit_s=60)


async def test_row_33_calls_whose_message_never_comes_take_nobodys_place(bench: Any) -> None:
    """Six thousand are more than the library lets in. While they arrive, more than it queues, it refuses some callers
    by itself (CANCELLED); once they are there, nobody notices them."""

    def attack() -> int:
        start_s, held = time.monotonic(), [RawHttp2(faults.service.port) for _ in range(12)]
        try:
            for each in held:
                each.read(1.0)
                for _ in range(500):
                    each.send(each.headers(each.new_id(), grpc_headers()))
            still_open = [500] * len(held)
            while sum(still_open) > 512 and time.monotonic() - start_s < 60:  # messages have 200 s to come
                still_open = [
                    each.endings(count, timeout_s=0.1)["silence"] for each, count in zip(held, still_open, strict=True)
                ]
            time.sleep(3.0)
            return sum(still_open)
        finally:
            for each in held:
                each.close()

    async with bench(ONE, connection={"message_timeout_s": 200.0}) as faults:
        await asyncio.to_thread(attack)  # a first time: what its calls took is kept by the allocator, and used again
        await settle(faults)
        await faults.note_gateways()
        siege = await besiege(faults, attack, victims=["UNKNOWN"])
        lost = [call for call in siege.canaries if call.error is not None]
        record("33 half calls", begun=6_000, still_open=siege.result, canaries_refused=len(lost), **siege.figures())
        assert siege.result <= 512
        assert lost != siege.canaries
        assert not [call for call in siege.canaries[-3:] if call.error], "they keep others out while they wait"
