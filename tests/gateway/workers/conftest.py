"""A pool on a real ipc socket, and scripted workers that dial it."""

import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from octavo.gateway.workers.pool import WorkerPool
from tests.support.gateway.workers import Dial, FakeWorker, open_pool


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[WorkerPool]:
    """Started, with one ipc endpoint."""
    async with open_pool(tmp_path) as (opened, _):
        yield opened


@pytest.fixture
def dial(pool: WorkerPool) -> Iterator[Dial]:
    """Makes workers that are connected to the pool, and closes them."""
    workers: list[FakeWorker] = []

    def connect(worker_id: str = "w0", **changes: object) -> FakeWorker:
        workers.append(FakeWorker(pool.bound_endpoints[0], worker_id, **changes))
        return workers[-1]

    yield connect
    for worker in workers:
        worker.close()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing, to be killed."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()
