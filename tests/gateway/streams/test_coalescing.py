"""When tokens are told to those who write them. Time and the thread's work are the test's."""

import asyncio
import random

from octavo.gateway.streams.output_processor import OutputFormat, OutputProcessor
from octavo.gateway.streams.stream import (
    BUSY_SHARE,
    CALM_SHARE,
    LEAST_INTERVAL_S,
    MOST_INTERVAL_S,
    MOST_YIELD_S,
    ROUND_PART,
    STALE_S,
    WINDOW_S,
    YIELD_S,
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
    for share in (1.0,) * 9 + ((BUSY_SHARE + CALM_SHARE) / 2,) + (0.1,) * 9:
        clock.pass_window(share)
        await until_round(made)
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


def new_stream(made: Coalescer | None) -> OutputStream:
    output = OutputFormat(bytes_by_id=None, wants_ids=True)
    return OutputStream(OutputProcessor(output), max_pending_tokens=10_000, on_match=lambda _: None, coalescer=made)


async def test_a_message_that_ends_between_two_rounds_is_followed_by_none_before_the_next() -> None:
    """However fast messages are written: one a round, with all that came."""
    made, clock = busy_coalescer()
    await until_round(made)
    stream = new_stream(made)
    stream.on_tokens([1], None)
    first = await stream.next()
    assert first is not None
    assert first.token_ids == [1]
    stream.on_tokens([2], None)  # while the first message is written
    reading = asyncio.create_task(stream.next())
    await turns()
    stream.on_tokens([3], None)
    assert not reading.done()
    clock.now_s += MOST_INTERVAL_S
    piece = await reading
    assert piece is not None
    assert piece.token_ids == [2, 3]


async def test_a_reader_that_was_busy_while_a_round_passed_does_not_wait_for_another_one() -> None:
    made, clock = busy_coalescer()
    await until_round(made)
    stream = new_stream(made)
    stream.on_tokens([1], None)
    assert await stream.next() is not None
    stream.on_tokens([2], None)
    clock.now_s += MOST_INTERVAL_S
    await until_round(made)  # the message is still on its way
    stream.on_tokens([3], None)
    piece = stream.take()
    assert piece is not None
    assert piece.token_ids == [2, 3]
    stream.on_tokens([4], None)
    assert stream.take() is None
    clock.now_s += MOST_INTERVAL_S
    await until_round(made)
    assert (await stream.next()).token_ids == [4]  # type: ignore[union-attr]


async def test_rounds_wait_for_calls_that_come_in_and_no_longer_than_their_limit() -> None:
    made, clock = busy_coalescer()
    await until_round(made)
    ear = Ear()
    await turns()
    clock.now_s += MOST_INTERVAL_S
    made.notify(ear.notifier)
    due_s = clock.now_s
    while not ear.num_heard:  # a call between any two looks
        made.yield_to_call()
        await asyncio.sleep(YIELD_S / 4)
        clock.now_s += YIELD_S / 4
        assert clock.now_s - due_s < 2 * MOST_YIELD_S
    assert clock.now_s - due_s >= MOST_YIELD_S
    made.yield_to_call()
    clock.now_s += YIELD_S  # and then none
    made.notify(ear.notifier)
    await until_heard(ear, 2)
    ear.close()


async def test_a_gateway_with_time_to_spare_waits_a_moment_only_where_a_call_has_just_come() -> None:
    made, clock = coalescer()
    ear = Ear()
    await turns()
    made.yield_to_call()
    made.notify(ear.notifier)
    await turns()
    assert not ear.num_heard
    clock.now_s += YIELD_S
    await until_heard(ear, 1)
    made.notify(ear.notifier)
    await turns()
    assert ear.num_heard == 2
    ear.close()


async def test_a_round_is_told_in_parts_and_calls_come_in_between() -> None:
    made, clock = busy_coalescer()
    await until_round(made)
    ears = [Ear() for _ in range(3 * ROUND_PART)]
    await turns()
    for ear in ears:
        made.notify(ear.notifier)

    def num_heard() -> int:
        return sum(ear.num_heard for ear in ears)

    async with asyncio.timeout(10):
        while not num_heard():  # noqa: ASYNC110
            await asyncio.sleep(0)
    made.yield_to_call()
    await turns(20)
    assert num_heard() <= 2 * ROUND_PART  # what was woken before the call has its turn
    made.notify(ears[0].notifier)  # new tokens belong to the next round
    made.notify(ears[-1].notifier)  # and to this one where it has not come to them
    clock.now_s += YIELD_S
    for ear in ears[1:]:
        await until_heard(ear, 1)
    clock.now_s += MOST_INTERVAL_S
    await until_heard(ears[0], 2)
    await turns()
    assert [ear.num_heard for ear in ears] == [2] + [1] * (len(ears) - 1)
    for ear in ears:
        ear.close()


async def read_slowly(stream: OutputStream, dice: random.Random, got: list[int]) -> None:
    """As a caller does whose messages take some turns of the loop."""
    while (piece := await stream.next()) is not None:
        got += piece.token_ids
        await turns(dice.randrange(6))


async def test_in_rounds_every_output_gives_what_it_gives_without_them() -> None:
    """The twin: streams that know no rounds, and get the same."""
    for seed in range(8):
        dice = random.Random(seed)
        made, clock = busy_coalescer()
        streams, twins = [new_stream(made) for _ in range(40)], [new_stream(None) for _ in range(40)]
        got: list[list[int]] = [[] for _ in range(80)]
        readers = [
            asyncio.create_task(read_slowly(stream, random.Random(seed + number), got[number]))
            for number, stream in enumerate([*streams, *twins])
        ]
        for step in range(60):
            for stream, twin in zip(streams, twins, strict=True):
                if dice.random() < 0.7:
                    ids = [dice.randrange(100) for _ in range(dice.randint(1, 3))]
                    stream.on_tokens(ids, None)
                    twin.on_tokens(ids, None)
            if dice.random() < 0.3:
                made.yield_to_call()
            clock.pass_window(share=dice.random(), seconds=dice.random() * WINDOW_S)
            await asyncio.sleep(0.001 * (step % 7 == 0))
        for handle, stream in enumerate([*streams, *twins]):
            stream.on_finished(Finished(handle=handle, reason=WireFinishReason.LENGTH))
        async with asyncio.timeout(30):
            await asyncio.gather(*readers)
        assert got[:40] == got[40:]
