"""Rows 1 to 5 and 9 of the fault matrix: processes that die, and what callers see of it."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from octavo import AsyncClient
from tests.support.faults.bench import NO_RETRIES, FaultBench
from tests.support.faults.callers import Call, calls, run
from tests.support.faults.figures import percentile, record
from tests.support.services.service import launch

MAGIC = 2  # the end token: no output has it, so what goes on elsewhere carries it only if it was asked for
INJECTED = Path(__file__).parent / "injected"
ORACLE = ("--model=oracle", "--runner=oracle", "--num-blocks=64", "--max-num-seqs=8", "--max-model-len=512")
SILENCE_S = 120.0  # that means death: whatever is noticed long before was not noticed by silence
AT_ONCE_S = 20.0
PATIENT = f"--heartbeat-timeout-s={SILENCE_S}"


async def until_running(faults: FaultBench, count: int) -> None:
    """Until workers say that so many requests run."""
    start_s = time.monotonic()
    while time.monotonic() - start_s < 60:
        if sum(load.num_running for load in await asyncio.to_thread(faults.service.load)) >= count:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{count} requests never ran together")


async def states(faults: FaultBench) -> AsyncIterator[bool]:
    """Whether a worker is registered, as often as that can be asked."""
    while True:
        yield bool(await asyncio.to_thread(faults.service.load))
        await asyncio.sleep(0.001)


async def test_row_1_an_idle_worker_that_is_killed_is_missed_at_once_and_replaced(bench: Any) -> None:
    async with bench("--workers=1", PATIENT) as faults:
        detected_ms, served_s, reasons = list[float](), list[float](), set()
        for _ in range(3):
            (worker,) = faults.service.children("worker")
            killed_s = time.monotonic()
            worker.send_signal(signal.SIGKILL)
            async for is_there in states(faults):
                if not is_there:
                    break
            detected_ms.append(1000 * (time.monotonic() - killed_s))
            meanwhile = Call(prompt=[4, 5], max_tokens=3)
            await faults.run([meanwhile])
            reasons.add((meanwhile.code, meanwhile.reason))
            await faults.until_workers(1, num_new=1)
            served_s.append(time.monotonic() - killed_s)
        assert ("UNAVAILABLE", "NO_WORKER") in reasons
        assert reasons <= {("UNAVAILABLE", "NO_WORKER"), ("OK", None)}  # one that was held up finds the next worker
        assert max(detected_ms) < 1000 * AT_ONCE_S
        await faults.check([], limit_s=1)
        record(
            "1",
            detect_ms_p50=round(percentile(detected_ms, 50), 1),
            detect_ms_max=round(max(detected_ms), 1),
            serving_again_s_max=round(max(served_s), 2),
        )


async def test_row_2_a_prompt_half_computed_is_computed_elsewhere_and_its_caller_only_waits(
    bench: Any, tmp_path: Path
) -> None:
    """Both workers are held in the tenth step of 56 that two prompts take."""
    hold = tmp_path / "hold"
    async with bench("--workers=2", "--max-batch-tokens=64", hold_file=str(hold)) as faults:
        everybody = [Call(prompt=[n, *range(3, 900), *range(3, 900)], max_tokens=5) for n in range(10, 14)]
        hold.touch()
        running = asyncio.create_task(faults.run(everybody))
        workers = faults.service.children("worker")
        async with asyncio.timeout(60):
            while not all(hold.with_suffix(f".{each.pid}").exists() for each in workers):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            while (await faults.metrics()).total("octavo_worker_in_flight_requests") < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert [call.token_ids for call in everybody] == [[]] * 4
        workers[0].send_signal(signal.SIGKILL)
        hold.unlink()
        await running
        await faults.until_workers(2, num_new=1)
        await faults.check(everybody, limit_s=60)
        moved = (await faults.metrics()).total("octavo_requests_migrated_total")
        assert moved >= 2
        record("2", recovered_percent=100, moved_outputs=round(moved))


async def test_row_3_streams_of_a_killed_worker_go_on_and_nobody_loses_a_token(bench: Any) -> None:
    async with bench("--workers=2") as faults:
        everybody = calls(64, max_tokens=300)
        running = asyncio.create_task(faults.run(everybody))
        await until_running(faults, 64)
        faults.service.children("worker")[1].send_signal(signal.SIGKILL)
        await running
        await faults.until_workers(2, num_new=1)
        await faults.check(everybody, limit_s=60)
        assert (await faults.metrics()).total("octavo_requests_migrated_total") >= 16
        record("3", streams=64, lost=0, longest_pause_s=round(max(call.longest_pause_s for call in everybody), 2))


async def test_row_3_where_nothing_may_move_victims_are_told_and_bystanders_notice_nothing(bench: Any) -> None:
    async with bench("--workers=2", "--max-migrations=0", PATIENT) as faults:
        everybody = calls(64, max_tokens=300)
        running = asyncio.create_task(faults.run(everybody))
        await until_running(faults, 64)
        killed_s = time.monotonic()
        faults.service.children("worker")[1].send_signal(signal.SIGKILL)
        await running
        victims = [call for call in everybody if call.error is not None]
        assert {(call.code, call.reason) for call in victims} == {("UNAVAILABLE", "WORKER_LOST")}
        assert 16 <= len(victims) < 64
        told_s = max(call.ended_s for call in victims) - killed_s
        assert told_s < AT_ONCE_S
        await faults.until_workers(2, num_new=1)
        await faults.check(everybody, limit_s=60, victims=["WORKER_LOST"])
        record("3 without migration", victims=len(victims), told_within_ms=round(1000 * told_s), bystander_diffs=0)


@pytest.mark.parametrize("how", ["raises", "is killed"])
def test_row_4_a_worker_that_dies_while_it_loads_ends_the_start_and_leaves_nobody_behind(
    tmp_path: Path, how: str
) -> None:
    injected: dict[str, object] = {"load_raises": "broken checkpoint"} if how == "raises" else {"load_sleep_s": 600}
    with launch(tmp_path, *ORACLE, injector=INJECTED, injected=injected) as service:
        start_s, family = time.monotonic(), psutil.Process(service.process.pid)
        workers = service.children("worker")
        while not workers and time.monotonic() - start_s < 60:
            time.sleep(0.05)
            workers = service.children("worker")
        members = family.children(recursive=True)
        if how == "is killed":
            time.sleep(1.0)
            members = family.children(recursive=True)
            start_s = time.monotonic()
            workers[0].send_signal(signal.SIGKILL)
        assert service.process.wait(60) == 1
        failed_s = time.monotonic() - start_s
        _, alive = psutil.wait_procs(members, timeout=20)
        assert alive == []
        log = service.log.read_text()
        assert ("broken checkpoint" if how == "raises" else "was killed by signal 9 before it was ready") in log
        record(f"4, load {how}", failed_after_s=round(failed_s, 2), orphans=0)


async def test_row_5_a_request_that_kills_workers_costs_two_and_bystanders_nothing(bench: Any) -> None:
    async with bench("--workers=2", crash_token_id=MAGIC) as faults:
        poison, bystanders = Call(prompt=[MAGIC, 5], max_tokens=10), calls(24, max_tokens=600)
        everybody = [*bystanders, poison]
        running = asyncio.create_task(faults.run(bystanders))
        await until_running(faults, 24)  # a call while both workers are dead gets NO_WORKER, as in row 1
        await faults.run([poison])
        await running
        assert (poison.code, poison.reason) == ("UNAVAILABLE", "WORKER_LOST")  # two deaths may be chance
        assert [call.reason for call in everybody if call.error] == ["WORKER_LOST"]
        await faults.until_workers(2, num_new=2)
        await faults.check(everybody, limit_s=60, victims=["WORKER_LOST"])
        page = await faults.metrics()
        killed = page.total("octavo_gateway_workers_lost_total")
        assert killed == 2
        assert page.total("octavo_requests_migrated_total") >= 24  # nobody had ended before: 600 steps take 3 s
        again = Call(prompt=[MAGIC, 5], max_tokens=10)
        await faults.run([again])
        assert (again.code, again.reason) == ("INTERNAL", "POISONED")
        await faults.until_workers(2, num_new=1)
        await faults.check([again], limit_s=60, victims=["POISONED"])
        killed_again = (await faults.metrics()).total("octavo_gateway_workers_lost_total") - killed
        assert killed_again == 1
        record("5", workers_killed=round(killed), when_tried_again=round(killed_again), bystanders_failed=0)


@pytest.mark.parametrize("apart_s", [0.0, 0.05])
async def test_row_5_two_workers_that_are_killed_together_condemn_nobody(bench: Any, apart_s: float) -> None:
    """Every stream has given tokens: none is lost, whether it was on trial when the second worker was killed or not."""
    async with bench("--workers=2") as faults:
        everybody = calls(32, max_tokens=600)
        running = asyncio.create_task(faults.run(everybody))
        await until_running(faults, 32)
        while not all(call.token_ids for call in everybody):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        first, second = faults.service.children("worker")
        first.send_signal(signal.SIGKILL)
        await asyncio.sleep(apart_s)
        second.send_signal(signal.SIGKILL)
        await running
        assert [(call.code, call.reason) for call in everybody if call.error] == []
        await faults.until_workers(2, num_new=2)
        await faults.check(everybody, limit_s=60)
        pause_s = max(call.longest_pause_s for call in everybody)
        record(f"5 together {apart_s:g} s apart", streams=32, condemned=0, longest_pause_s=round(pause_s, 2))


async def test_row_9_a_killed_gateway_is_back_its_workers_stay_and_hold_nothing_of_it(bench: Any) -> None:
    async with bench("--workers=2") as faults:
        workers, back_s = {each.pid for each in faults.service.children("worker")}, list[float]()
        for _ in range(3):
            async with AsyncClient(faults.service.target, options=NO_RETRIES) as client:
                running = [asyncio.create_task(run(client, call)) for call in calls(16, max_tokens=4000)]
                await until_running(faults, 16)
                (gateway,) = faults.service.children("gateway")
                killed_s = time.monotonic()
                gateway.send_signal(signal.SIGKILL)
                async with asyncio.timeout(AT_ONCE_S):
                    ended = await asyncio.gather(*running)
            assert {call.code for call in ended} == {"UNAVAILABLE"}
            await asyncio.to_thread(faults.service.wait_until_ready)
            back_s.append(time.monotonic() - killed_s)
            await asyncio.to_thread(faults.service.wait_until_idle, 15)  # 4000 steps take 20 s
        assert {each.pid for each in faults.service.children("worker")} == workers
        faults.num_rpcs = 0  # another process counts from nought
        await faults.note_gateways()
        await faults.check([], limit_s=1)
        record("9", kills=3, back_s_max=round(max(back_s), 2), orphans=0)
