"""Waits for requests of unary calls: so long, so many, and whom each end is told to."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from octavo.gateway.errors import DeadlinePassed
from octavo.gateway.rpc import interceptor
from octavo.gateway.rpc.interceptor import RequestWaits


class Caller:
    """A call whose request comes when the test says so."""

    def __init__(self, waits: RequestWaits) -> None:
        self._request = asyncio.get_running_loop().create_future()
        self.task = asyncio.ensure_future(waits.read(cast(Any, self)))
        self.ended_s = 0.0
        self.task.add_done_callback(lambda _: setattr(self, "ended_s", asyncio.get_running_loop().time()))

    async def read(self) -> Any:
        return await self._request

    def send(self, request: bytes) -> None:
        self._request.set_result(request)

    async def outcome(self) -> Any:
        (end,) = await asyncio.gather(self.task, return_exceptions=True)
        return end if isinstance(end, bytes) else type(end)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_so():  # noqa: ASYNC110  (any state of a task)
            await asyncio.sleep(0.001)


async def test_each_wait_ends_in_its_own_time_by_one_timer() -> None:
    waits, callers = RequestWaits(0.2), []
    begin_s = asyncio.get_running_loop().time()
    for _ in range(3):
        callers.append((asyncio.get_running_loop().time(), Caller(waits)))
        await asyncio.sleep(0.05)
    callers[1][1].send(b"in time")
    outcomes = [await caller.outcome() for _, caller in callers]
    assert outcomes == [DeadlinePassed, b"in time", DeadlinePassed]
    assert all(caller.ended_s >= began_s + 0.2 for began_s, caller in callers[::2]), f"begun at {begin_s}"
    late = Caller(waits)
    assert await late.outcome() is DeadlinePassed, "the timer is set again for those who come later"
    assert waits._due_s == {}


async def test_of_too_many_the_oldest_ends_and_the_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interceptor, "MAX_WAITS", 2)
    waits = RequestWaits(60.0)
    callers = [Caller(waits) for _ in range(4)]
    await until(lambda: callers[0].task.done() and callers[1].task.done())
    assert [await caller.outcome() for caller in callers[:2]] == [DeadlinePassed, DeadlinePassed]
    for caller in callers[2:]:
        assert not caller.task.done()
        caller.send(b"there")
    assert [await caller.outcome() for caller in callers[2:]] == [b"there", b"there"]
    assert waits._due_s == {}


@pytest.mark.parametrize("is_overdue", [False, True])
async def test_a_call_that_is_cancelled_is_not_told_of_a_deadline(is_overdue: bool) -> None:
    waits = RequestWaits(60.0)
    caller = Caller(waits)
    await until(lambda: len(waits._due_s) == 1)
    caller.task.cancel()
    if is_overdue:  # in the same turn of the loop
        waits._end(caller.task)
    assert await caller.outcome() is asyncio.CancelledError
    assert waits._due_s == {}
