"""The stream's states, without any RPC."""

import asyncio

import pytest

from octavo.gateway.errors import Draining, InternalDefect, NumericalFault, RequestAborted, SlowConsumer, WorkerLost
from octavo.gateway.streams.output_processor import OutputFormat, OutputProcessor
from octavo.gateway.streams.stream import Notifier, OutputStream, OutputStreams, StreamState
from octavo.gateway.text.stop_matcher import StopStrings
from octavo.wire.messages import Finished, TokenLogprobs, WireFinishReason

ROWS = [b"<end>", b"a", b"b"]


def stream(*, stops: list[str] | None = None, max_pending: int = 100) -> tuple[OutputStream, list[OutputStream]]:
    matched: list[OutputStream] = []
    output = OutputFormat(bytes_by_id=ROWS, wants_ids=False, stop_strings=StopStrings(stops) if stops else None)
    return OutputStream(OutputProcessor(output), max_pending_tokens=max_pending, on_match=matched.append), matched


def finished(reason: WireFinishReason = WireFinishReason.LENGTH, **fields: object) -> Finished:
    return Finished(handle=1, reason=reason, **fields)  # type: ignore[arg-type]


async def rest(output: OutputStream) -> str:
    text = ""
    while (piece := await output.next()) is not None:
        text += piece.text
    return text


async def test_pieces_come_as_they_are_fed_and_the_end_once() -> None:
    output, _ = stream()
    reading = asyncio.create_task(rest(output))
    await asyncio.sleep(0)
    output.on_tokens([1], None)
    await asyncio.sleep(0)
    output.on_tokens([2], None)
    output.on_finished(finished())
    assert await reading == "ab"
    assert await output.next() is None
    for late in (
        lambda: output.on_tokens([1], None),
        lambda: output.on_finished(finished()),
        lambda: output.on_lost("WORKER_LOST", ""),
    ):
        late()
        assert (output.state, output.error) == (StreamState.ENDED, None)
        assert await output.next() is None


async def test_what_came_before_an_error_is_delivered_before_it() -> None:
    output, _ = stream()
    output.on_tokens([1, 2], None)
    output.on_finished(finished(WireFinishReason.ERROR, error="NUMERICAL", detail="row 3"))
    piece = await output.next()
    assert piece is not None
    assert piece.text == "ab"
    with pytest.raises(NumericalFault, match="row 3"):
        await output.next()


async def test_an_output_that_is_cut_short_ends_before_the_half_character_that_it_had() -> None:
    rows = [b"<end>", b"a", "\u00e9".encode()[:1], "\u00e9".encode()[1:]]
    output_format = OutputFormat(bytes_by_id=rows, wants_ids=False)
    output = OutputStream(OutputProcessor(output_format), max_pending_tokens=9, on_match=lambda _: None)
    output.on_tokens([1, 2], None)
    output.on_finished(finished(WireFinishReason.ERROR, error="DRAINING", detail="the grace is over"))
    piece = await output.next()
    assert piece is not None
    assert piece.text == "a"
    with pytest.raises(Draining):
        await output.next()


async def test_the_first_end_counts() -> None:
    output, _ = stream()
    output.fail(RequestAborted("x"))
    output.fail(Draining("y"))
    output.on_lost("WORKER_LOST", "z")
    output.on_finished(finished())
    with pytest.raises(RequestAborted):
        await output.next()


async def test_a_stop_string_is_told_once_and_the_figures_are_taken() -> None:
    output, matched = stream(stops=["b"])
    output.on_tokens([1, 2, 1], None)
    output.on_tokens([1, 2], None)
    assert output.state is StreamState.MATCHED
    assert matched == []  # soon, not in the middle of the pool's message
    await asyncio.sleep(0)
    assert matched == [output]
    output.on_finished(finished(WireFinishReason.CANCELLED, cached_tokens=3))
    assert await rest(output) == "a"
    assert output.finished is not None
    assert output.finished.cached_tokens == 3


async def test_after_a_stop_string_neither_loss_nor_silence_is_an_error() -> None:
    for end in ("lost", "silence"):
        output, _ = stream(stops=["b"])
        output.on_tokens([1, 2], None)
        if end == "lost":
            output.on_lost("WORKER_LOST", "")
        else:
            output.stop_waiting_for_figures()
        assert await rest(output) == "a"
        assert (output.state, output.finished) == (StreamState.ENDED, None)


async def test_a_running_stream_does_not_stop_waiting() -> None:
    output, _ = stream()
    output.stop_waiting_for_figures()
    assert output.state is StreamState.RUNNING


async def test_lost_reasons_have_their_errors() -> None:
    for reason, kind in (("WORKER_LOST", WorkerLost), ("DRAINING", Draining), ("INTERNAL", InternalDefect)):
        output, _ = stream()
        output.on_lost(reason, "why")
        with pytest.raises(kind, match="why"):
            await output.next()


async def test_more_unread_tokens_than_allowed_end_it() -> None:
    output, _ = stream(max_pending=3)
    output.on_tokens([1, 1, 1], None)
    assert output.state is StreamState.RUNNING
    output.on_tokens([1], None)
    assert isinstance(output.error, SlowConsumer)


async def test_tokens_of_which_nothing_can_be_sent_wait_for_no_reader() -> None:
    output_format = OutputFormat(bytes_by_id=[b"", b"a"], wants_ids=False)
    output = OutputStream(OutputProcessor(output_format), max_pending_tokens=3, on_match=lambda _: None)
    reading = asyncio.create_task(output.next())
    for _ in range(9):
        await asyncio.sleep(0)
        output.on_tokens([0], None)
    await asyncio.sleep(0)
    output.on_tokens([1], None)
    piece = await reading
    assert piece is not None
    assert (piece.text, piece.num_tokens, output.state) == ("a", 10, StreamState.RUNNING)


async def test_a_reader_that_is_cancelled_leaves_no_waiter_behind() -> None:
    output, _ = stream()
    reading = asyncio.create_task(output.next())
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    output.on_tokens([1], None)
    piece = await output.next()
    assert piece is not None
    assert piece.text == "a"


# ---------------------------------------------------------------- readers that are behind


def paced(*, mark: int = 4, max_pending: int = 100, wants_ids: bool = True) -> tuple[OutputStream, list[bool]]:
    """A stream that gives ids, and whether it was paused, at each change."""
    flow: list[bool] = []
    output = OutputStream(
        OutputProcessor(OutputFormat(bytes_by_id=None, wants_ids=wants_ids)),
        max_pending_tokens=max_pending,
        pause_pending_tokens=mark,
        on_match=lambda _: None,
        on_flow=lambda stream: flow.append(stream.is_paused),
    )
    return output, flow


async def test_a_reader_that_is_busy_elsewhere_pauses_it_and_lets_it_go_on_when_it_comes_back() -> None:
    output, flow = paced()
    output.on_tokens([1] * 4, None)
    assert flow == []
    output.on_tokens([2], None)
    output.on_tokens([3], None)  # of a step that was in flight
    assert flow == [True]
    piece = await output.next()
    assert piece is not None
    assert (piece.token_ids, flow) == ([1, 1, 1, 1, 2, 3], [True, False])


async def test_a_reader_that_waits_for_news_is_not_behind_whatever_comes_at_once() -> None:
    output, flow = paced()
    reading = asyncio.create_task(output.next())
    await asyncio.sleep(0)
    output.on_tokens([1] * 9, None)
    output.on_tokens([1] * 9, None)
    assert len((await reading).token_ids) == 18  # type: ignore[union-attr]
    assert flow == []


async def test_nobody_waits_for_a_paused_output_of_which_nothing_can_be_sent_yet() -> None:
    output, flow = paced(wants_ids=False)
    output.on_tokens([1] * 9, None)
    reading = asyncio.create_task(output.next())
    await asyncio.sleep(0)
    assert flow == [True, False]
    reading.cancel()


async def test_tokens_of_steps_in_flight_fit_between_the_mark_and_the_end() -> None:
    output, flow = paced(mark=1000, max_pending=10)
    output.on_tokens([1] * 6, None)
    assert flow == [True]
    output.on_tokens([1] * 4, None)
    assert output.state is StreamState.RUNNING
    output.on_tokens([1], None)
    assert isinstance(output.error, SlowConsumer)


async def test_nothing_of_any_output_precedes_the_prompts_log_probabilities() -> None:
    notifier, num_prompt_tokens = Notifier(), 700  # more than one piece tells
    streams = []
    for prompt_ids in (range(num_prompt_tokens), ()):
        output_format = OutputFormat(bytes_by_id=ROWS, wants_ids=False, prompt_ids=prompt_ids)
        processor = OutputProcessor(output_format)
        streams.append(OutputStream(processor, max_pending_tokens=9, on_match=lambda _: None, notifier=notifier))
    streams[0].on_prompt_logprobs([TokenLogprobs(-1.0, (), ())] * (num_prompt_tokens - 1))
    for each in reversed(streams):
        each.on_tokens([1], None)
        each.on_finished(finished())
    outputs, told = OutputStreams(streams), list[tuple[int, int, str]]()
    while (news := await outputs.next()) is not None:
        index, piece = news
        if piece is not None:
            told.append((index, len(piece.prompt_logprobs), piece.text))
    assert told == [(0, 256, ""), (0, 256, ""), (0, 187, "a"), (1, 0, "a")]
