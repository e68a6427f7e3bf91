"""Workers of two processes each, as a service: when a process of one dies or stands still, all of that worker end, its
streams go on at the other, and it comes back whole."""

import asyncio
import signal
from collections.abc import Iterator

import psutil
import pytest

from octavo import AsyncClient
from tests.support.services.service import Service, serve

NUM_TOKENS, KILL_AFTER, NUM_STREAMS = 300, 16, 4
RANK = "octavo.worker.loading.group"
SETTINGS = ("--workers=2", "--tensor-parallel-size=2", "--num-blocks=256", "--stall-timeout-s=4", "--stall-exit-s=6")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Four processes with the model: each test leaves as many."""
    with serve(tmp_path_factory.mktemp("service"), *SETTINGS) as running:
        running.wait_until_supervised()
        yield running
        ranks = running.children(RANK)
    assert [process for process in ranks if process.is_running()] == []


async def read(client: AsyncClient, index: int, got: list[list[int]], moved: list[int]) -> None:
    stream = client.stream(
        messages=[("user", f"Tell me a story, part {index}.")], temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True,
        output="token_ids",
    )  # fmt: skip
    async for delta in stream.deltas():
        got[index] += delta.token_ids
    assert stream.finished is not None
    moved[index] = stream.finished.receipt.migrations


async def disturbed(service: Service, victim: psutil.Process, number: signal.Signals) -> tuple[list[list[int]], int]:
    """All streams' tokens, and how often any of them moved, when the victim gets a signal in the middle."""
    got, moved = [list[int]() for _ in range(NUM_STREAMS)], [0] * NUM_STREAMS
    async with AsyncClient(service.target) as client, asyncio.timeout(240), asyncio.TaskGroup() as group:
        for index in range(NUM_STREAMS):
            group.create_task(read(client, index, got, moved))
        while not all(len(ids) >= KILL_AFTER for ids in got):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        victim.send_signal(number)
    return got, sum(moved)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "stands still"])
async def test_a_rank_that_is_lost_takes_its_worker_along_and_no_stream(
    service: Service, number: signal.Signals
) -> None:
    before, told = service.children(RANK), len(service.log.read_text())
    assert len(before) == 2
    got, num_moved = await disturbed(service, before[0], number)
    assert [len(ids) for ids in got] == [NUM_TOKENS] * NUM_STREAMS
    assert num_moved >= 1
    async with asyncio.timeout(120):
        while len(service.load()) < 2 or len(service.children(RANK)) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    assert not before[0].is_running()
    assert before[0] not in service.children(RANK)
    assert before[1] in service.children(RANK)
    assert "died (exit code 75); starting it again" in service.log.read_text()[told:]
