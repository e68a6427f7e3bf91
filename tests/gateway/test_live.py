"""Ending live requests from outside, whatever their task is doing."""

import asyncio

import pytest

from octavo.gateway.errors import Draining, RequestError, WorkerLost
from octavo.gateway.requests.tracker import LiveRequest
from octavo.gateway.streams.output_processor import OutputAssembler, OutputFormat
from octavo.gateway.streams.response import error_behind
from octavo.gateway.streams.stream import OutputStream, StreamState
from octavo.wire.messages import Finished, Sampling, WireFinishReason
from tests.support.gateway.fake_pool import model_card, worker_view


async def live_in_a_write() -> LiveRequest:
    """Its task writes to somebody who does not read, and raises what it finds when it is cancelled."""
    output = OutputFormat(bytes_by_id=[b"a"], wants_ids=False)
    stream = OutputStream(OutputAssembler(output), max_pending_tokens=9, on_match=lambda _: None)

    async def write() -> object:
        try:
            return await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise error_behind(live) from None

    live = LiveRequest(
        request_id="r",
        key="r",
        card=model_card(),
        worker=worker_view(),
        handle=1,
        stream=stream,
        sampling=Sampling(),
        num_prompt_tokens=1,
        arrived_s=1.0,
        sent_s=1.0,
        task=asyncio.create_task(write()),
    )
    stream.write_since_s = 1.0
    await asyncio.sleep(0)
    return live


async def ends_with(live: LiveRequest) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await asyncio.wait_for(live.task, 30.0)
    return caught.value


async def test_a_running_output_ends_with_the_error() -> None:
    live, error = await live_in_a_write(), Draining("the grace is over")
    live.fail(error)
    assert await ends_with(live) is error


async def test_a_complete_output_that_nobody_reads_ends_too() -> None:
    live, error = await live_in_a_write(), Draining("the grace is over")
    live.stream.on_finished(Finished(handle=1, reason=WireFinishReason.LENGTH))
    assert live.stream.state is StreamState.ENDED
    live.fail(error)
    assert await ends_with(live) is error


async def test_an_output_that_had_failed_ends_with_its_first_error() -> None:
    live = await live_in_a_write()
    live.stream.on_lost("WORKER_LOST", "gone")
    live.fail(Draining("the grace is over"))
    assert isinstance(await ends_with(live), WorkerLost)
