"""Streams of Generate that end early: the caller leaves, time is over, the worker is lost or fails."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from octavo.gateway.text.model_text import ModelText, finish
from octavo.v1 import common_pb2
from octavo.v1 import inference_pb2 as pb
from octavo.wire.messages import WireFinishReason
from tests.support.gateway.fake_pool import FakePool
from tests.support.gateway.generating import REQUEST, ids_of, speaking
from tests.support.gateway.rpc_errors import refusal_of, refused

AT_ONCE = 5000  # turns of the loop, ten seconds and more: threads of the library come late on a busy machine


async def test_cancel_reaches_the_worker_at_once(serve: Any) -> None:
    pool = FakePool()
    async with serve(pool) as served:
        call = served.inference.Generate(REQUEST)
        await served.until(lambda: pool.runs)
        pool.runs[0].tokens([5])
        async for event in call:
            if event.HasField("delta"):
                break
        call.cancel()
        await served.until(lambda: pool.cancelled == [pool.runs[0].handle], max_turns=AT_ONCE)
        await served.until(lambda: not served.gateway.tracker.admission.holds("r1"), max_turns=AT_ONCE)
        assert len(served.gateway.tracker) == 0
        key = ("/octavo.v1.InferenceService/Generate", "CANCELLED", "CLIENT")
        await served.until(lambda: served.gateway.meters.rpcs[key] == 1)


async def test_a_cancel_while_the_prompt_is_tokenized_leaves_nothing_behind(serve: Any) -> None:
    async with serve() as served:
        began, release = asyncio.Event(), asyncio.Event()

        async def slow(steps: Any, **_: Any) -> Any:
            began.set()
            await release.wait()

        served.gateway.text.run_steps = slow
        call = served.inference.Generate(REQUEST)
        await began.wait()
        assert served.gateway.tracker.admission.holds("r1")
        call.cancel()
        await served.until(lambda: not served.gateway.tracker.admission.holds("r1"), max_turns=AT_ONCE)
        assert served.pool.runs == []


async def test_a_deadline_that_passes_while_the_prompt_is_tokenized_costs_the_worker_nothing(serve: Any) -> None:
    async with serve() as served:

        async def slow(steps: Any, **_: Any) -> Any:
            await asyncio.sleep(0.3)
            return finish(steps)

        served.gateway.text.run_steps = slow
        refusal = await refused(served.inference.Generate(REQUEST, timeout=0.1))
        assert refusal.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await served.until(lambda: not served.gateway.tracker.admission.holds("r1"))
        assert served.pool.runs == []


async def test_the_time_that_a_request_takes_to_arrive_counts_once(serve: Any) -> None:
    """A large message on a slow way, or one whose check waits for others': the rest of the time is for the worker."""
    requests = iter([pb.CompleteRequest(generate=REQUEST).SerializeToString()])
    async with serve(FakePool(on_run=lambda run: run.finish())) as served:

        async def slowly() -> AsyncIterator[bytes]:
            await asyncio.sleep(1.0)
            for each in requests:
                yield each

        began_s = time.monotonic()
        await served.channel.stream_unary("/octavo.v1.InferenceService/Complete")(slowly(), timeout=60.0)
        left_s = 60.0 - (time.monotonic() - began_s)
    (run,) = served.pool.runs
    assert left_s - 0.1 < run.request.timeout_s < 59.2


async def test_a_closed_connection_cancels_every_stream_on_it(serve: Any) -> None:
    pool = FakePool()
    async with serve(pool) as served:
        calls = [
            served.inference.Generate(pb.GenerateRequest(token_ids=common_pb2.TokenIds(ids=[4]))) for _ in range(3)
        ]
        await served.until(lambda: len(pool.runs) == 3)
        await served.channel.close(grace=None)
        await served.until(lambda: sorted(pool.cancelled) == [1, 2, 3], max_turns=AT_ONCE)
        del calls


async def test_a_unary_call_that_is_cancelled_frees_the_worker(serve: Any) -> None:
    pool = FakePool()
    async with serve(pool) as served:
        call = served.inference.Complete(pb.CompleteRequest(generate=REQUEST))
        await served.until(lambda: pool.runs)
        call.cancel()
        await served.until(lambda: pool.cancelled == [1], max_turns=AT_ONCE)


async def test_a_deadline_ends_the_stream_and_frees_the_worker(serve: Any) -> None:
    pool = FakePool()
    async with serve(pool) as served:
        while not pool.runs:  # a pause of the machine may take all the time before a worker has the request
            refusal = await refused(served.inference.Generate(REQUEST, timeout=0.2))
            assert refusal.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await served.until(lambda: pool.cancelled == [run.handle for run in pool.runs], max_turns=AT_ONCE)
        assert pool.runs[0].request.timeout_s is not None
        assert pool.runs[0].request.timeout_s < 0.21  # gRPC rounds deadlines up on the wire


async def test_a_worker_that_sees_the_deadline_first_says_so(serve: Any) -> None:
    pool = FakePool(on_run=lambda run: run.finish(WireFinishReason.DEADLINE))
    async with serve(pool) as served:
        refusal = await refused(served.inference.Generate(REQUEST, timeout=30))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE")


async def test_every_end_that_a_worker_can_report_has_its_status(serve: Any, tiny_text: ModelText) -> None:
    cat = ids_of("cat", tiny_text)
    unavailable, internal = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL
    for error, code, pushback in (
        ("NUMERICAL", internal, None),
        ("ENGINE_ERROR", internal, None),
        ("OUT_OF_MEMORY", grpc.StatusCode.RESOURCE_EXHAUSTED, 500),
        ("QUEUE_FULL", grpc.StatusCode.RESOURCE_EXHAUSTED, 500),
        ("EXCEEDS_CAPACITY", grpc.StatusCode.INVALID_ARGUMENT, None),
        ("DRAINING", unavailable, 500),
    ):
        pool = speaking(cat, reason=WireFinishReason.ERROR, error=error, detail="at /srv/models/x.bin line 3")
        async with serve(pool) as served:
            call = served.inference.Generate(REQUEST)
            texts = []
            try:
                async for event in call:
                    texts.append(event.delta.text)  # noqa: PERF401  (what came before the error counts)
            except grpc.aio.AioRpcError as caught:
                refusal = refusal_of(caught)
        assert "".join(texts) == "cat"
        assert (refusal.code, refusal.reason, refusal.pushback_ms) == (code, error, pushback)
        assert (refusal.tokens_delivered, refusal.message) == (len(cat), "at <path> line 3")


async def test_a_lost_worker_is_told_with_what_was_delivered(serve: Any, tiny_text: ModelText) -> None:
    cat = ids_of("cat", tiny_text)
    for reason in ("WORKER_LOST", "WORKER_STALLED", "DRAINING"):
        pool = FakePool()
        async with serve(pool) as served:
            call = asyncio.ensure_future(refused(served.inference.Generate(REQUEST)))
            await served.until(lambda pool=pool: pool.runs)
            pool.runs[0].tokens(cat)
            pool.runs[0].lose(reason)
            refusal = await call
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, reason)
        assert refusal.tokens_delivered == len(cat)


async def test_a_worker_that_breaks_the_protocol_is_our_defect(serve: Any) -> None:
    pool = FakePool(on_run=lambda run: run.lose("INTERNAL", "token 99999 at /run/octavo/gateway-0.sock"))
    async with serve(pool) as served:
        refusal = await refused(served.inference.Generate(REQUEST))
    assert (refusal.code, refusal.reason, refusal.request_id) == (grpc.StatusCode.INTERNAL, "INTERNAL", "r1")
    assert refusal.message == "internal error; the server's log has it under this request id"


async def test_a_defect_of_ours_is_internal_and_never_unknown(serve: Any) -> None:
    pool = FakePool(refuse=[ZeroDivisionError("secret /path"), asyncio.CancelledError()])
    async with serve(pool) as served:
        for _ in range(2):
            refusal = await refused(served.inference.Generate(REQUEST, timeout=30))
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
            assert "secret" not in refusal.message
        assert served.gateway.tracker.admission.counts().num_entered == 0
        assert served.gateway.tracker.get("r1") is None
