"""Tasks of a gateway that begin again."""

import asyncio

import pytest
import structlog

from octavo.gateway import restarting as module
from octavo.gateway.restarting import restarting_task


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RESTART_DELAY_S", 0.001)


async def test_a_task_that_fails_begins_again_and_each_new_error_is_told_once() -> None:
    errors = [RuntimeError("can't start new thread")] * 3 + [OSError("no descriptors")]
    done = asyncio.Event()

    async def run() -> None:
        if errors:
            raise errors.pop(0)
        done.set()
        await asyncio.Event().wait()

    with structlog.testing.capture_logs() as logs:
        task = restarting_task(run, name="reloader")
        async with asyncio.timeout(10):
            await done.wait()
    assert [(each["event"], each["task"], str(each["exc_info"])) for each in logs] == [
        ("defect", "reloader", "can't start new thread"),
        ("defect", "reloader", "no descriptors"),
    ]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()


async def test_a_task_that_ends_by_itself_has_ended() -> None:
    async def run() -> None:
        return

    async with asyncio.timeout(10):
        await restarting_task(run, name="once")
