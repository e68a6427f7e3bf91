"""Generate over a real channel: what callers see, and what the pool is asked for."""

import asyncio
from typing import Any

import grpc
import numpy as np
import pytest
from octavo.v1 import common_pb2
from octavo.v1 import inference_pb2 as pb

from gateway.text.model_text import ModelText
from tests.support.fake_pool import FakePool, FakeRun
from tests.support.rpc_errors import refusal_of
from wire.messages import Sampling, WireFinishReason

REQUEST = pb.GenerateRequest(request_id="r1", text="Hello world", sampling=pb.SamplingParams(seed=7))


def ids_of(text: str, model_text: ModelText) -> list[int]:
    return model_text.encode(text, max_bytes=1 << 20).ids_T.tolist()


async def refused(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    return refusal_of(caught.value)


async def test_a_stream_is_started_then_deltas_then_finished_once(serve: Any, tiny_text: ModelText) -> None:
    answer = ids_of("Once upon a time 你好 🦙.", tiny_text)

    async def speak(run: FakeRun) -> None:
        run.sink.on_started()
        for token_id in answer:
            run.tokens([token_id])
            await asyncio.sleep(0.002)
        run.tokens([0])
        run.finish(WireFinishReason.STOP, stop_token_id=0)

    tasks: list[asyncio.Task[None]] = []
    pool = FakePool(on_run=lambda run: tasks.append(asyncio.create_task(speak(run))))
    async with serve(pool) as served:
        call = served.inference.Generate(REQUEST)
        events = [event async for event in call]
        assert [key for key, _ in await call.initial_metadata()].count("x-request-id") == 1
        assert await call.code() is grpc.StatusCode.OK
    prompt = ids_of("Hello world", tiny_text)
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds == ["started", *["delta"] * (len(kinds) - 2), "finished"]
    assert events[0].started == pb.Started(request_id="r1", model="tiny", prompt_tokens=len(prompt))
    assert "".join(event.delta.text for event in events) == "Once upon a time 你好 🦙."
    assert all("\ufffd" not in event.delta.text for event in events)
    assert all(not event.delta.token_ids for event in events)
    finished = events[-1].finished
    assert finished.reason == pb.FINISH_REASON_STOP
    assert finished.stop == pb.StopMatch(token_id=0)
    assert finished.usage == common_pb2.Usage(
        prompt_tokens=len(prompt), completion_tokens=len(answer) + 1, cached_tokens=3
    )
    receipt = finished.receipt
    assert (receipt.worker_id, receipt.model_fingerprint, receipt.seed) == ("w0", "fingerprint-of-tiny", 7)
    assert (receipt.queue_s, receipt.prefill_s, receipt.decode_s) == (0.25, 0.5, 0.75)
    assert (receipt.computed_tokens, receipt.preemptions) == (5, 1)
    assert 0 < receipt.gateway_s <= receipt.time_to_first_token_s <= receipt.total_s < 5
    run = pool.runs[0]
    assert run.request.prompt_ids.dtype == np.int32
    assert run.request.prompt_ids.tolist() == prompt
    assert run.request.sampling == Sampling(
        temperature=0.5, top_k=20, top_p=0.75, repetition_penalty=1.125, seed=7, max_tokens=256 - len(prompt)
    )
    assert (run.request.priority, run.request.cache_salt, run.request.timeout_s) == (0, "", None)
    assert pool.cancelled == []
    assert len(served.gateway.desk.live) == 0
    assert served.gateway.desk.admission.counts().num_entered == 0
