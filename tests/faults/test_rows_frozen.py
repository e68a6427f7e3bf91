"""Rows 6, 7, 8, 13 and 15 of the fault matrix: processes that stand still, are busy, starve, or are asked to leave."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import grpc
import psutil
import pytest

from octavo import AsyncClient
from octavo.v1 import inference_pb2_grpc
from tests.support.faults.bench import NO_RETRIES, FaultBench
from tests.support.faults.callers import Call, calls, request, run
from tests.support.faults.figures import percentile, record

MAGIC = 2  # the end token: no output has it, so what goes on elsewhere carries it only if it was asked for
HEARTBEAT_TIMEOUT_S = 4.0  # half of it is a pause that the machine may add to without a worker being lost
WATCHED = ("--workers=2", f"--heartbeat-timeout-s={HEARTBEAT_TIMEOUT_S}", "--heartbeat-interval-s=0.1")


async def all_begun(everybody: list[Call]) -> None:
    """Until every caller has its first token."""
    async with asyncio.timeout(60):
        while not all(call.token_ids or call.ended_s for call in everybody):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@contextmanager
def frozen(process: psutil.Process) -> Iterator[None]:
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


async def lost_workers(faults: FaultBench) -> float:
    return (await faults.metrics()).total("octavo_gateway_workers_lost_total")


async def until_lost(faults: FaultBench, count: int) -> None:
    """Until the gateway has given so many workers up."""
    async with asyncio.timeout(60):
        while await lost_workers(faults) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


@pytest.mark.slow
async def test_rows_6_and_7_a_short_freeze_is_a_pause_and_a_long_one_moves_the_streams_for_good(bench: Any) -> None:
    async with bench(*WATCHED) as faults:
        everybody = calls(32, max_tokens=400)
        running = asyncio.create_task(faults.run(everybody))
        await all_begun(everybody)
        with frozen(faults.service.children("worker")[0]):
            await asyncio.sleep(HEARTBEAT_TIMEOUT_S / 2)
        await running
        assert await lost_workers(faults) == 0
        await faults.check(everybody, limit_s=60)
        pause_s = max(call.longest_pause_s for call in everybody)
        record("6", false_kills=0, longest_pause_s=round(pause_s, 2), frozen_s=HEARTBEAT_TIMEOUT_S / 2)

        everybody = calls(32, max_tokens=900)
        running = asyncio.create_task(faults.run(everybody))
        await all_begun(everybody)
        worker = faults.service.children("worker")[0]
        with frozen(worker):
            await until_lost(faults, 1)
        await asyncio.to_thread(psutil.wait_procs, [worker], 60)
        assert not worker.is_running()
        await running
        await faults.until_workers(2, num_new=1)
        await faults.check(everybody, limit_s=60)
        page = await faults.metrics()
        assert page.total("octavo_gateway_workers_lost_total", reason="WORKER_STALLED") == 1
        stale = page.total("octavo_gateway_stale_messages_total")
        assert stale >= 1
        assert page.total("octavo_requests_migrated_total") >= 8
        pause_s = max(call.longest_pause_s for call in everybody)
        record("7", stale_frames_dropped=round(stale), bystander_diffs=0, longest_pause_s=round(pause_s, 2))


async def first_refusal(stub: Any) -> tuple[grpc.StatusCode, str]:
    """Code and reason of the first short call that is not served."""
    async with asyncio.timeout(60):
        while True:
            late = stub.Generate(request(Call(prompt=[5, 6], max_tokens=3)))
            with suppress(grpc.RpcError):
                async for _ in late:
                    pass
            if (code := await late.code()) is not grpc.StatusCode.OK:
                return code, _reason(await late.trailing_metadata())


async def test_row_8_a_service_that_is_asked_to_end_finishes_what_it_has(bench: Any) -> None:
    async with bench("--workers=2") as faults, grpc.aio.insecure_channel(faults.service.target) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        assert [event async for event in stub.Generate(request(Call(prompt=[5], max_tokens=1)))]
        everybody = calls(24, max_tokens=300)
        running = asyncio.create_task(faults.run(everybody))
        await all_begun(everybody)
        holder = stub.Generate(request(Call(prompt=[5, 7], max_tokens=4000)))  # the drain waits until it leaves
        await holder.read()
        asked_s = time.monotonic()
        faults.service.process.send_signal(signal.SIGTERM)
        assert await first_refusal(stub) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        holder.cancel()
        await running
        faults.check_calls(everybody, limit_s=60)
        assert [call for call in everybody if call.error] == []
        assert await asyncio.to_thread(faults.service.process.wait, 60) == 0
        faults.check_log()
        record("8", lost_streams=0, drain_s=round(time.monotonic() - asked_s, 2), exit_code=0)


async def test_row_8_what_is_not_done_when_the_grace_is_over_ends_and_says_why(bench: Any) -> None:
    async with bench("--workers=1", "--drain-grace-s=0.5") as faults:
        everybody = calls(8, max_tokens=4000)
        running = asyncio.create_task(faults.run(everybody))
        await all_begun(everybody)
        faults.service.process.send_signal(signal.SIGTERM)
        await running
        faults.check_calls(everybody, limit_s=60, victims=["DRAINING"])
        assert {(call.code, call.reason) for call in everybody} == {("UNAVAILABLE", "DRAINING")}
        assert await asyncio.to_thread(faults.service.process.wait, 60) == 0
        faults.check_log()


async def test_row_8_a_worker_that_is_asked_to_leave_hands_over_what_its_grace_does_not_suffice_for(bench: Any) -> None:
    async with bench("--workers=2", "--drain-grace-s=0.3") as faults:
        everybody = calls(24, max_tokens=700)
        running = asyncio.create_task(faults.run(everybody))
        await all_begun(everybody)
        faults.service.children("worker")[0].send_signal(signal.SIGTERM)
        await running
        assert [call for call in everybody if call.error] == []
        await faults.until_workers(2, num_new=1)  # its supervisor did not ask it to leave, and starts it again
        await faults.check(everybody, limit_s=60)
        moved = (await faults.metrics()).total("octavo_requests_migrated_total")
        pause_s = max(call.longest_pause_s for call in everybody)
        assert moved >= 8
        record("8, one worker", lost_streams=0, moved_outputs=round(moved), longest_pause_s=round(pause_s, 2))


async def test_row_13_a_worker_that_never_ends_its_step_is_given_up_and_replaced(bench: Any) -> None:
    settings = ("--workers=2", "--heartbeat-timeout-s=2.5", "--heartbeat-interval-s=0.1", "--max-migrations=0")
    async with bench(*settings, "--stall-timeout-s=6", "--stall-exit-s=7", seize_token_id=MAGIC) as faults:
        culprit = Call(prompt=[MAGIC, 5], max_tokens=10)
        everybody = [*calls(16, max_tokens=200), culprit]
        start_s = time.monotonic()
        await faults.run(everybody)
        assert (culprit.code, culprit.reason) == ("UNAVAILABLE", "WORKER_STALLED")
        detected_s = culprit.ended_s - start_s
        await faults.until_workers(2, num_new=1)
        replaced_s = time.monotonic() - start_s
        await faults.check(everybody, limit_s=60, victims=["WORKER_STALLED"])
        assert len(faults.service.children("worker")) == 2
        record("13", detected_s=round(detected_s, 2), replaced_s=round(replaced_s, 2))


async def test_row_15_without_cpu_nobody_is_taken_for_dead_and_deadlines_hold(bench: Any) -> None:
    burn = [sys.executable, "-c", "while True: pass"]
    async with bench("--workers=2") as faults:
        burners = [subprocess.Popen(burn) for _ in range(2)]  # noqa: ASYNC220
        try:
            everybody = calls(32, max_tokens=150)
            async with AsyncClient(faults.service.target, options=NO_RETRIES) as client:
                late = asyncio.gather(*(at_deadline(client, index) for index in range(20)))
                await faults.run(everybody)
                over_ms = [1000 * over_s for over_s in await late]
            faults.num_rpcs += 20
        finally:
            for burner in burners:
                burner.kill()
                burner.wait()
        assert await lost_workers(faults) == 0
        await faults.check(everybody, limit_s=120)
        assert max(over_ms) < 10_000  # 4000 steps take 20 s
        record(
            "15",
            false_kills=0,
            deadline_overshoot_ms_p50=round(percentile(over_ms, 50)),
            deadline_overshoot_ms_max=round(max(over_ms)),
        )


async def at_deadline(client: AsyncClient, index: int) -> float:
    """Seconds that an endless output went on after its deadline of one second."""
    call = Call(prompt=[5, 10 + index], max_tokens=4000, seed=index)
    await run(client, call, timeout_s=1.0)
    assert call.code == "DEADLINE_EXCEEDED"
    return call.ended_s - call.sent_s - 1.0


def _reason(metadata: Any) -> str:
    return dict(metadata or ()).get("x-error-reason", "")
