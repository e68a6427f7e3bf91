"""Whose text work is done when, and what happens when there is too much of it. Counted in steps, not in seconds."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from octavo.gateway.errors import InternalDefect
from octavo.gateway.text.errors import TextQueueFull
from octavo.gateway.text.service import STEP_BYTES, FairQueue, Share, Steps, TextService


def share(tenant: str, weight: int = 1) -> Share:
    return Share(tenant=tenant, weight=weight)


def drained(queue: FairQueue[str]) -> list[str]:
    names = iter(lambda: queue.pop(lambda _: True, lambda _: 0), None)
    return list(names)


def test_the_shorter_goes_first_and_nobody_for_ever() -> None:
    queue = FairQueue[str]()
    queue.push("long", num_bytes=100_000, share=share("a"))
    order = []
    for number in range(30):
        queue.push(f"short {number}", num_bytes=10_000, share=share("a"))
        name = queue.pop(lambda _: True, lambda each: 100_000 if each == "long" else 10_000)
        order.append(name)
    assert order[0] == "short 0"
    assert order.index("long") == 9  # as many bytes as it has itself have passed it


def test_tenants_take_turns_by_bytes_and_weight_and_the_idle_have_no_credit() -> None:
    queue = FairQueue[tuple[str, int]]()
    served = {"a": 0, "b": 0, "c": 0}
    for number in range(100):
        queue.push(("a", number), num_bytes=30_000, share=share("a"))
        queue.push(("b", number), num_bytes=10_000, share=share("b", 2))

    def turn() -> None:
        item = queue.pop(lambda _: True, lambda each: 30_000 if each[0] == "a" else 10_000)
        assert item is not None
        served[item[0]] += 30_000 if item[0] == "a" else 10_000

    for _ in range(50):
        turn()
    assert 0.4 < served["a"] / served["b"] < 0.6
    for number in range(100):
        queue.push(("c", number), num_bytes=10_000, share=share("c"))
    before = dict(served)
    for _ in range(50):
        turn()
    assert served["c"] - before["c"] <= 1.5 * (served["b"] - before["b"]) / 2 + 20_000


def test_of_too_much_the_largest_waiter_gives_up_what_it_would_get_last() -> None:
    queue = FairQueue[str]()
    for name, num_bytes, whose in (("a1", 50_000, "a"), ("a2", 2_000, "a"), ("b1", 20_000, "b")):
        queue.push(name, num_bytes=num_bytes, share=share(whose))
    assert queue.pop_last() == "a1"
    assert queue.pop_last() == "b1"
    assert drained(queue) == ["a2"]


def test_what_was_popped_comes_back_to_its_place_and_what_is_removed_is_gone() -> None:
    queue = FairQueue[str]()
    for name in ("x", "y", "z"):
        queue.push(name, num_bytes=1000, share=share("a"))
    first = queue.pop(lambda _: True, lambda _: 10)
    assert first == "x"
    queue.push_back("x", num_bytes=990)
    assert (queue.remove("y"), queue.remove("y"), len(queue)) == (True, False, 2)
    assert drained(queue) == ["x", "z"]


def test_many_tenants_that_came_once_are_forgotten() -> None:
    queue = FairQueue[str]()
    for number in range(5000):
        queue.push(f"text {number}", num_bytes=10, share=share(f"tenant {number}"))
        queue.forget(queue.pop(lambda _: True, lambda _: 10) or "")
    assert len(queue._tenants) < 200


class Gate:
    """Threads that take a step wait here, and what they did is written down."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.begun = threading.Semaphore(0)
        self.log: list[str] = []

    def steps(self, name: str, num_steps: int, *, num_bytes: int = STEP_BYTES) -> Steps[str]:
        for _ in range(num_steps):
            yield num_bytes
            self.log.append(name)
            self.begun.release()
            assert self.is_open.wait(30)
        return name


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.is_open.set()


async def begun(gate: Gate) -> None:
    while not gate.begun.acquire(blocking=False):  # noqa: ASYNC110  (a thread's state)
        await asyncio.sleep(0.001)


async def test_a_short_text_waits_for_the_steps_that_run_and_no_other(gate: Gate) -> None:
    service = TextService(num_threads=2, max_waiting=99)
    hostile = [
        asyncio.create_task(service.run_steps(gate.steps(f"h{n}", 100_000), num_bytes=2 << 20)) for n in range(16)
    ]
    for _ in range(2):
        await begun(gate)
    canary = asyncio.create_task(service.run(lambda: gate.log.append("canary"), num_bytes=10))
    await asyncio.sleep(0)
    gate.is_open.set()
    await canary
    assert gate.log.index("canary") <= 4
    for each in hostile:
        each.cancel()
    await asyncio.gather(*hostile, return_exceptions=True)
    while service.num_waiting:  # noqa: ASYNC110  (threads are done soon)
        await asyncio.sleep(0.001)
    assert len(gate.log) < 1_000_000  # of 1.6: what nobody waits for is not done
    service.close()


async def test_a_step_that_cannot_be_cut_leaves_a_thread_to_the_short_ones(gate: Gate) -> None:
    service = TextService(num_threads=2, max_waiting=99)
    size = 2 << 20
    hostile = [
        asyncio.create_task(service.run_steps(gate.steps(f"h{n}", 1, num_bytes=size), num_bytes=size))
        for n in range(16)
    ]
    await begun(gate)
    assert await service.run(lambda: "served", num_bytes=10) == "served"  # while the gate is closed
    assert gate.log == ["h0"]
    gate.is_open.set()
    assert await asyncio.gather(*hostile) == [f"h{n}" for n in range(16)]
    service.close()


async def test_a_full_queue_refuses_the_largest_and_takes_the_short_one(gate: Gate) -> None:
    service = TextService(num_threads=1, max_waiting=4, max_bytes=10 << 20)
    hostile = [
        asyncio.create_task(service.run_steps(gate.steps(f"h{n}", 1), num_bytes=1 << 20, share=share("h")))
        for n in range(4)
    ]
    await begun(gate)
    canary = asyncio.create_task(service.run(lambda: "served", num_bytes=10, share=share("c")))
    with pytest.raises(TextQueueFull):
        await hostile[3]
    with pytest.raises(TextQueueFull):  # and by bytes: it is the largest itself
        await service.run(lambda: "never", num_bytes=9 << 20, share=share("x"))
    gate.is_open.set()
    assert await asyncio.gather(canary, *hostile[:3]) == ["served", "h0", "h1", "h2"]
    while service.num_waiting:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert await service.run(lambda: "alone", num_bytes=1 << 30) == "alone"  # whatever it is, by itself
    service.close()


async def test_closing_cancels_what_waits(gate: Gate) -> None:
    service = TextService(num_threads=1, max_waiting=9)
    first, second = (asyncio.create_task(service.run_steps(gate.steps(n, 9), num_bytes=9)) for n in "ab")
    await begun(gate)
    service.close()
    gate.is_open.set()
    assert [type(each) for each in await asyncio.gather(first, second, return_exceptions=True)] == [
        asyncio.CancelledError
    ] * 2


async def test_a_panic_of_a_library_is_a_defect_like_any_other() -> None:
    class Panic(BaseException):
        pass

    def work() -> None:
        raise Panic("no thread")

    service = TextService(num_threads=1, max_waiting=1)
    with pytest.raises(InternalDefect, match="Panic: no thread"):
        await service.run(work)
    service.close()
    assert service.num_waiting == 0
