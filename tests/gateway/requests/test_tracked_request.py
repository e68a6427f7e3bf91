"""Ending tracked requests from outside, whatever their task is doing."""

import asyncio

import pytest

from octavo.gateway.errors import Draining, RequestError, WorkerLost
from octavo.gateway.observability.meters import GatewayMeters
from octavo.gateway.requests.tracker import TrackedRequest
from octavo.gateway.rpc.interceptor import RpcScope
from octavo.gateway.streams.output_processor import OutputFormat, OutputProcessor
from octavo.gateway.streams.stream import OutputStream, StreamState
from octavo.wire.messages import Finished, SamplingParams, WireFinishReason
from tests.support.gateway.fake_pool import worker_view


async def request_in_a_write() -> TrackedRequest:
    """Its task writes to a caller that does not read, and raises what it finds when it is cancelled."""
    output = OutputFormat(bytes_by_id=[b"a"], wants_ids=False)
    stream = OutputStream(OutputProcessor(output), max_pending_tokens=9, on_match=lambda _: None)

    async def write() -> object:
        try:
            return await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise tracked.error_behind() from None

    tracked = TrackedRequest(
        scope=RpcScope(method="m", started_s=1.0, request_id="r"),
        worker=worker_view(),
        outputs=((1, stream),),
        sampling=SamplingParams(),
        num_prompt_tokens=1,
        sent_s=1.0,
        task=asyncio.create_task(write()),
        meters=GatewayMeters().of_model("tiny"),
    )
    stream.write_since_s = 1.0
    await asyncio.sleep(0)
    return tracked


async def ends_with(tracked: TrackedRequest) -> RequestError:
    with pytest.raises(RequestError) as caught:
        async with asyncio.timeout(30.0):
            await tracked.task
    return caught.value


async def test_a_running_output_ends_with_the_error() -> None:
    tracked, error = await request_in_a_write(), Draining("the grace is over")
    tracked.fail(error)
    assert await ends_with(tracked) is error


async def test_a_complete_output_that_nobody_reads_ends_too() -> None:
    tracked, error = await request_in_a_write(), Draining("the grace is over")
    tracked.stream.on_finished(Finished(handle=1, reason=WireFinishReason.LENGTH))
    assert tracked.stream.state is StreamState.ENDED
    tracked.fail(error)
    assert await ends_with(tracked) is error


async def test_an_output_that_had_failed_ends_with_its_first_error() -> None:
    tracked = await request_in_a_write()
    tracked.stream.on_lost("WORKER_LOST", "gone")
    tracked.fail(Draining("the grace is over"))
    assert isinstance(await ends_with(tracked), WorkerLost)
