"""When tokens are told to those who write them. Time and the thread's work are the test's."""

import asyncio

from octavo.gateway.streams.output_processor import OutputFormat, OutputProcessor
from octavo.gateway.streams.stream import (
    CALM_SHARE,
    LEAST_INTERVAL_S,
    MOST_INTERVAL_S,
    STALE_S,
    WINDOW_S,
    Coalescer,
    Notifier,
    OutputStream,
)
from octavo.wire.messages import Finished, WireFinishReason


class Clock:
    """What the coalescer looks at: the time, and what the thread has computed."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.cpu_s = 7.0

    def pass_window(self, share: float, seconds: float = WINDOW_S) -> None:
        self.now_s += 1.01 * seconds
        self.cpu_s += share * 1.01 * seconds


class Ear:
    """Waits for a notifier again and again. num_heard: how often it woke."""

    def __init__(self) -> None:
        self.notifier = Notifier()
        self.num_heard = 0
        self._task = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        while True:
            await self.notifier.wait()
            self.num_heard += 1

    def close(self) -> None:
        self._task.cancel()


def coalescer() -> tuple[Coalescer, Clock]:
    clock = Clock()
    return Coalescer(cpu_s=lambda: clock.cpu_s, now_s=lambda: clock.now_s), clock


def busy_coalescer() -> tuple[Coalescer, Clock]:
    """It has just begun to make rounds, and rings its first one at once."""
    made, clock = coalescer()
    clock.pass_window(share=1.0)
    made.notify(Notifier())
    assert made.interval_s == LEAST_INTERVAL_S
    return made, clock


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def until_heard(ear: Ear, times: int) -> None:
    async with asyncio.timeout(10):
        while ear.num_heard < times:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_with_time_to_spare_a_bell_rings_in_the_same_turn() -> None:
    made, clock = coalescer()
    ear = Ear()
    await turns()
    for times in range(1, 6):
        clock.pass_window(share=CALM_SHARE)
        made.notify(ear.notifier)
        await turns()
        assert ear.num_heard == times
    assert made.interval_s == 0.0
    ear.close()


async def test_a_busy_gateway_rings_once_for_what_came_in_between() -> None:
    made, clock = busy_coalescer()
    first, second = Ear(), Ear()
    await until_round(made)
    for _ in range(10):
        made.notify(first.notifier)
    made.notify(second.notifier)
    await turns()
    assert (first.num_heard, second.num_heard) == (0, 0)
    await until_heard(first, 1)
    await until_heard(second, 1)
    await turns()
    assert (first.num_heard, second.num_heard) == (1, 1)
    clock.now_s += WINDOW_S / 2
    made.notify(first.notifier)  # nothing is lost between rounds
    await until_heard(first, 2)
    first.close()
    second.close()


async def until_round(made: Coalescer) -> None:
    """The round that is due is over."""
    ear = Ear()
    await turns()
    made.notify(ear.notifier)
    await until_heard(ear, 1)
    ear.close()


async def test_rounds_move_apart_while_the_thread_is_busy_and_together_when_it_is_not() -> None:
    made, clock = coalescer()
    seen = []
    for share in (1.0,) * 9 + (0.6,) + (0.1,) * 9:
        clock.pass_window(share)
        made.notify(Notifier())
        seen.append(made.interval_s)
    assert seen[0] == LEAST_INTERVAL_S
    assert seen[:9] == sorted(seen[:9])
    assert seen[8] == seen[9] == MOST_INTERVAL_S
    assert seen[9:] == sorted(seen[9:], reverse=True)
    assert seen[-1] == 0.0


async def test_a_share_is_taken_over_a_window_not_between_two_tokens() -> None:
    made, clock = coalescer()
    for _ in range(10):
        clock.pass_window(share=1.0, seconds=WINDOW_S / 20)
        made.notify(Notifier())
    assert made.interval_s == 0.0


async def test_what_was_busy_long_ago_says_nothing() -> None:
    made, clock = busy_coalescer()
    clock.pass_window(share=1.0, seconds=2 * STALE_S)
    assert made.interval_s == 0.0
    made.notify(Notifier())
    assert made.interval_s == 0.0


async def test_by_its_own_clock_a_thread_that_waits_is_not_busy() -> None:
    made = Coalescer()
    for _ in range(3):  # a pause of the machine is no work of the thread
        await asyncio.sleep(2 * WINDOW_S)
        made.notify(Notifier())
    assert made.interval_s == 0.0


async def test_first_tokens_and_ends_do_not_wait_for_the_round() -> None:
    made, clock = busy_coalescer()
    output = OutputFormat(bytes_by_id=[b"<end>", b"a", b"b"], wants_ids=False, stop_strings=None)
    stream = OutputStream(OutputProcessor(output), max_pending_tokens=100, on_match=lambda _: None, coalescer=made)
    read: list[str] = []

    async def read_all() -> None:
        while (piece := await stream.next()) is not None:
            read.append(piece.text)

    reading = asyncio.create_task(read_all())
    await until_round(made)
    stream.on_tokens([1], None)
    await turns()
    assert read == ["a"]
    clock.now_s += LEAST_INTERVAL_S / 2
    stream.on_tokens([2], None)
    stream.on_tokens([2], None)
    await turns()
    assert read == ["a"]
    stream.on_finished(Finished(handle=1, reason=WireFinishReason.LENGTH))
    await turns()
    assert "".join(read) == "abb"
    await reading
