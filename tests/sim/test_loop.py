"""The virtual clock and what is taken away from chance."""

import asyncio
import secrets
import time
import uuid
from collections.abc import Coroutine
from typing import Any

import pytest

from sim.edges.loop import START_S, Deadlock, Livelock, SimLoop, isolated


def run(main: Coroutine[Any, Any, Any]) -> Any:
    loop = SimLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.call_soon(loop.stop)
        loop.run_forever()
        loop.close()


def test_an_hour_passes_at_once_and_timers_keep_their_order() -> None:
    async def main() -> tuple[list[str], float]:
        order: list[str] = []

        async def after(seconds: float, name: str) -> None:
            await asyncio.sleep(seconds)
            order.append(name)

        await asyncio.gather(after(3600, "c"), after(0.001, "a"), after(0.002, "b"))
        return order, asyncio.get_running_loop().time() - START_S

    began_s = time.monotonic()
    order, elapsed_s = run(main())
    assert order == ["a", "b", "c"]
    assert elapsed_s == pytest.approx(3600)
    assert time.monotonic() - began_s < 60


def test_waiting_for_what_never_comes_is_an_error() -> None:
    with pytest.raises(Deadlock):
        run(asyncio.Event().wait())


def test_turning_for_ever_at_one_time_is_an_error() -> None:
    async def spin() -> None:
        while True:  # noqa: ASYNC110  (that is the point)
            await asyncio.sleep(0)

    with pytest.raises(Livelock):
        run(spin())


def test_threads_are_functions() -> None:
    async def main() -> int:
        return await asyncio.to_thread(lambda: 7)

    assert run(main()) == 7


def test_clocks_and_random_numbers_belong_to_the_run_and_come_back_after_it() -> None:
    def draws() -> tuple[object, ...]:
        loop = SimLoop()
        with isolated(loop, 5):
            drawn = (time.monotonic(), time.time(), secrets.token_hex(4), secrets.randbits(9), uuid.uuid4())
        loop.close()
        return drawn

    assert draws() == draws()
    assert draws()[0] == START_S
    assert time.time() > 1e9
    assert secrets.token_hex(8) != secrets.token_hex(8)
