"""VllmEngine's Abort, and callers that leave."""

import asyncio
from typing import Any

import grpc
import pytest

pytest.importorskip("smg_grpc_proto")
from smg_grpc_proto import vllm_engine_pb2 as vllm  # type: ignore[import-untyped]

from tests.support.gateway.fake_pool import FakePool, FakeRun
from tests.support.gateway.vllm_calls import Stub, request


@pytest.mark.parametrize("stream", [True, False])
async def test_an_abort_ends_every_output_that_is_under_way(serve: Any, vllm_stub: Stub, stream: bool) -> None:
    def speak(run: FakeRun) -> None:
        run.tokens([10 * run.handle])
        if run.handle == 1:
            run.finish()

    async with serve(FakePool(on_run=speak, answers_cancels=False)) as served:
        stub = vllm_stub(served.channel)
        call = stub.Generate(request(stream=stream, n=3))
        await served.until(lambda: len(served.pool.runs) == 3)
        await asyncio.sleep(0.05)
        await stub.Abort(vllm.AbortRequest(request_ids=["r1"]))
        ends = [answer.complete async for answer in call if answer.HasField("complete")]
        assert set(served.pool.cancelled) >= {2, 3}
        assert served.gateway.tracker.admission.counts().num_entered == 0
    assert sorted((end.index, end.finish_reason) for end in ends) == [(0, "length"), (1, "abort"), (2, "abort")]


@pytest.mark.parametrize("stream", [True, False])
async def test_abort_ends_the_stream_with_what_came_before_and_tells_the_worker(
    serve: Any, vllm_stub: Stub, stream: bool
) -> None:
    pool = FakePool(on_run=lambda run: run.tokens([11, 12]), answers_cancels=False)
    async with serve(pool) as served:
        stub = vllm_stub(served.channel)
        call = stub.Generate(request(stream=stream))
        await served.until(lambda: pool.runs)
        await stub.Abort(vllm.AbortRequest(request_ids=["unknown", "r1"]))
        assert set(pool.cancelled) == {1}
        answers = [answer async for answer in call]
        assert await call.code() is grpc.StatusCode.OK
        assert served.gateway.tracker.admission.counts().num_entered == 0
        await stub.Abort(vllm.AbortRequest(request_ids=["r1"]))
    ids = [token for answer in answers for token in (*answer.chunk.token_ids, *answer.complete.output_ids)]
    assert ids == [11, 12]
    assert answers[-1].complete.finish_reason == "abort"
    assert [answer.HasField("complete") for answer in answers].count(True) == 1


async def test_abort_tells_the_worker_at_once_even_where_nobody_reads(serve: Any, vllm_stub: Stub) -> None:
    async with serve(FakePool(on_run=lambda run: run.tokens([11]))) as served:
        call = vllm_stub(served.channel).Generate(request())
        await served.until(lambda: served.pool.runs)
        assert served.gateway.tracker.abort("r1")
        assert served.pool.cancelled == [1]  # before any task had a turn
        call.cancel()


@pytest.mark.parametrize("n", [0, 1, 3])
async def test_a_request_that_is_aborted_while_it_is_tokenized_ends_too(serve: Any, vllm_stub: Stub, n: int) -> None:
    """Every output of it."""
    async with serve() as served:
        stub, gate = vllm_stub(served.channel), asyncio.Event()

        async def hang(*_: Any, **__: Any) -> None:
            await gate.wait()

        served.gateway.text.run_steps = hang
        asked = vllm.GenerateRequest(request_id="r1", text="Hello", sampling_params=vllm.SamplingParams(n=n))
        call = stub.Generate(asked)
        await served.until(lambda: served.gateway.tracker.admission.holds("r1"))
        await stub.Abort(vllm.AbortRequest(request_ids=["r1"]))
        ends = [(answer.complete.index, answer.complete.finish_reason) async for answer in call]
        assert ends == [(index, "abort") for index in range(n or 1)]
        assert served.pool.runs == []


async def test_a_caller_that_leaves_frees_the_worker(serve: Any, vllm_stub: Stub) -> None:
    async with serve(FakePool(on_run=lambda run: run.tokens([1]))) as served:
        call = vllm_stub(served.channel).Generate(request())
        await call.read()
        call.cancel()
        await served.until(lambda: served.pool.cancelled == [1])
        await served.until(lambda: served.gateway.tracker.admission.counts().num_entered == 0)
