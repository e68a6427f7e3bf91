"""What callers see when a worker dies under them, and that the service comes back."""

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from octavo import AsyncClient, OctavoError
from tests.support.services.service import Service, serve

ORACLE = ("--runner=oracle", "--oracle-step-delay-s=0.01", "--num-blocks=512", "--max-num-seqs=64")


async def outcome(client: AsyncClient, index: int) -> tuple[list[int], OctavoError | None, float]:
    """Tokens received, how it failed, and when it ended (monotonic seconds)."""
    stream = client.stream(
        token_ids=[index + 1, 2, 3], temperature=0, max_tokens=2000, ignore_eos=True, output="token_ids"
    )
    try:
        async for _ in stream.deltas():
            pass
    except OctavoError as error:
        return stream.token_ids, error, time.monotonic()
    return stream.token_ids, None, time.monotonic()


async def wait_for_first_tokens(service: Service, num_streams: int) -> None:
    """Until that many requests run."""
    start_s = time.monotonic()
    while time.monotonic() - start_s < 60:
        if sum(load.num_running for load in await asyncio.to_thread(service.load)) >= num_streams:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the streams never ran together")


async def test_a_killed_worker_ends_its_streams_at_once_where_they_may_not_move_and_is_started_again(
    tmp_path: Path, oracle_checkpoint: Path
) -> None:
    arguments = (f"--model={oracle_checkpoint}", "--max-model-len=4096", "--max-migrations=0", *ORACLE)
    arguments += ("--heartbeat-timeout-s=120",)  # what is noticed long before was not noticed by silence
    with serve(tmp_path, *arguments) as service:
        (worker,) = service.children("worker")
        async with AsyncClient(service.target) as client:
            streams = [asyncio.create_task(outcome(client, index)) for index in range(8)]
            await wait_for_first_tokens(service, 8)
            killed_s = time.monotonic()
            worker.send_signal(signal.SIGKILL)
            results = await asyncio.gather(*streams)
        assert [error and error.reason for _, error, _ in results] == ["WORKER_LOST"] * 8
        assert [error and error.code.name for _, error, _ in results] == ["UNAVAILABLE"] * 8
        assert [error and error.tokens_delivered for _, error, _ in results] == [len(ids) for ids, _, _ in results]
        assert max(end_s for _, _, end_s in results) - killed_s < 60  # half of the silence
        await asyncio.to_thread(service.wait_until_ready)
        async with AsyncClient(service.target) as client:
            answer = await client.complete(token_ids=[1, 2, 3], max_tokens=5, ignore_eos=True, output="token_ids")
        assert len(answer.token_ids) == 5
        (restarted,) = service.children("worker")
        assert restarted.pid != worker.pid


async def test_streams_of_a_killed_worker_go_on_when_it_is_back(tmp_path: Path, oracle_checkpoint: Path) -> None:
    with serve(tmp_path, f"--model={oracle_checkpoint}", "--max-model-len=4096", *ORACLE) as service:
        service.wait_until_supervised()
        (worker,) = service.children("worker")
        async with AsyncClient(service.target) as client:
            whole = await client.complete(
                token_ids=[1, 2, 3], temperature=0, max_tokens=300, ignore_eos=True, output="token_ids", seed=1
            )
            streams = [
                client.stream(
                    token_ids=[1, 2, 3], temperature=0, max_tokens=300, ignore_eos=True, output="token_ids", seed=1
                )
                for _ in range(4)
            ]
            reading = [asyncio.create_task(read(stream)) for stream in streams]
            await wait_for_first_tokens(service, 4)
            worker.send_signal(signal.SIGKILL)
            await asyncio.gather(*reading)
        assert [stream.token_ids for stream in streams] == [list(whole.token_ids)] * 4
        assert [stream.finished.receipt.migrations for stream in streams if stream.finished] == [1] * 4


async def read(stream: Any) -> None:
    async for _ in stream.deltas():
        pass


@pytest.mark.parametrize("gateways", [1, 2])
async def test_a_terminated_service_finishes_what_runs(tmp_path: Path, oracle_checkpoint: Path, gateways: int) -> None:
    arguments = (f"--model={oracle_checkpoint}", f"--gateways={gateways}", *ORACLE)
    with serve(tmp_path, *arguments) as service:
        async with AsyncClient(service.target) as client:
            stream = client.stream(token_ids=[5], max_tokens=100, ignore_eos=True, output="token_ids")
            deltas = stream.deltas()
            await anext(deltas)
            service.process.send_signal(signal.SIGTERM)
            async for _ in deltas:
                pass
        assert len(stream.token_ids) == 100
        assert await asyncio.to_thread(service.process.wait, 60) == 0
