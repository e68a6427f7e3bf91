"""Embed over a real channel: what callers see, and what the pool is asked for."""

import asyncio
from typing import Any

import grpc
import numpy as np
import pytest

from octavo.gateway.requests import embedding
from octavo.gateway.requests.embedding import normalized
from octavo.gateway.text.model_text import ModelText
from octavo.v1 import admin_pb2, common_pb2
from octavo.v1 import inference_pb2 as pb
from octavo.wire.messages import Capacity, Pooling, WireFinishReason
from tests.support.gateway.fake_pool import FakePool, FakeRun, busy, worker_view
from tests.support.gateway.rpc_errors import refused


def vector_of(run: FakeRun) -> list[float]:
    return [float(len(run.prompt_ids)), -2.0, 0.5]


def embedding_pool() -> FakePool:
    return FakePool(on_run=lambda run: asyncio.get_running_loop().call_soon(run.embed, vector_of(run)) and None)


def inputs(*lengths: int) -> list[pb.EmbedInput]:
    return [pb.EmbedInput(token_ids=common_pb2.TokenIds(ids=range(length))) for length in lengths]


async def test_vectors_come_in_the_order_of_the_inputs(serve: Any, tiny_text: ModelText) -> None:
    messages = [pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="hi")]
    asked = [pb.EmbedInput(text="Hello world"), *inputs(7), pb.EmbedInput(chat=pb.Chat(messages=messages))]
    request = pb.EmbedRequest(
        request_id="e", inputs=asked, pooling=pb.POOLING_MEAN, normalize=False, priority=3, cache_salt="s"
    )
    async with serve(pool := embedding_pool()) as served:
        response = await served.inference.Embed(request, timeout=300)
        tracker = served.gateway.tracker
        assert (len(tracker), tracker.admission.counts().num_entered) == (0, 0)
    assert (response.request_id, response.model) == ("e", "tiny")
    assert [list(each.values) for each in response.embeddings] == [vector_of(run) for run in pool.runs]
    lengths = [len(run.prompt_ids) for run in pool.runs]
    assert lengths[1] == 7
    assert [each.usage.prompt_tokens for each in response.embeddings] == lengths
    first = response.embeddings[0]
    assert (first.usage.cached_tokens, first.usage.completion_tokens) == (3, 0)
    assert (first.receipt.worker_id, first.receipt.queue_s, first.receipt.computed_tokens) == ("w0", 0.25, 5)
    assert 0 < first.receipt.gateway_s < first.receipt.total_s
    for run in pool.runs:
        asked_for = run.request
        assert (asked_for.pooling, asked_for.priority) == (Pooling.MEAN, 3)
        assert asked_for.timeout_s is not None
        assert 200 < asked_for.timeout_s <= 302  # gRPC rounds deadlines up on the wire
    assert pool.cancelled == []


async def test_vectors_have_length_one_unless_told_otherwise(serve: Any) -> None:
    async with serve(pool := embedding_pool()) as served:
        response = await served.inference.Embed(pb.EmbedRequest(inputs=inputs(4)))
    vector_D = np.asarray(response.embeddings[0].values)
    assert np.linalg.norm(vector_D) == pytest.approx(1, abs=1e-7)
    assert vector_D == pytest.approx(np.asarray(vector_of(pool.runs[0])) / np.sqrt(16 + 4 + 0.25), abs=1e-7)
    assert pool.runs[0].request.pooling is Pooling.LAST_TOKEN
    assert normalized(np.zeros(3, np.float32)).tolist() == [0, 0, 0]


async def test_only_the_last_tokens_are_kept_where_that_is_asked(serve: Any, tiny_text: ModelText) -> None:
    request = pb.EmbedRequest(inputs=[*inputs(500), pb.EmbedInput(text="Hello world")], truncate_prompt_tokens=2)
    async with serve(pool := embedding_pool()) as served:
        await served.inference.Embed(request)
    assert pool.runs[0].prompt_ids.tolist() == [498, 499]
    whole = tiny_text.encode("Hello world", max_bytes=100).ids_T.tolist()
    assert pool.runs[1].prompt_ids.tolist() == whole[-2:]


async def test_what_is_wrong_is_named_by_its_input(serve: Any) -> None:
    async with serve(pool := embedding_pool()) as served:
        bad = pb.EmbedRequest(inputs=[*inputs(3), pb.EmbedInput(token_ids=common_pb2.TokenIds(ids=[1, 600]))])
        assert (await refused(served.inference.Embed(bad))).fields == ("inputs[1].token_ids.ids[1]",)
        bad.inputs[1].token_ids.ids[:] = [1, 2, 3, 600, 4]
        bad.truncate_prompt_tokens = 2
        assert (await refused(served.inference.Embed(bad))).fields == ("inputs[1].token_ids.ids[3]",)
        long = await refused(served.inference.Embed(pb.EmbedRequest(inputs=inputs(3, 256))))
        assert (long.code, long.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "EXCEEDS_CAPACITY")
        assert long.message.startswith("inputs[1]: 256 prompt tokens")
        assert (await refused(served.inference.Embed(pb.EmbedRequest()))).fields == ("inputs",)
    assert pool.runs == []


async def test_an_input_that_no_pool_can_hold_is_named(serve: Any) -> None:
    small = Capacity(num_blocks=4, block_size=16, max_num_seqs=4, max_waiting=4, max_batch_tokens=64)
    pool = embedding_pool()
    pool.views = [worker_view(capacity=small)]
    async with serve(pool) as served:
        long = await refused(served.inference.Embed(pb.EmbedRequest(inputs=inputs(3, 100))))
    assert long.reason == "EXCEEDS_CAPACITY"
    assert long.message.startswith("inputs[1]: 100 prompt tokens")


async def test_a_bounded_number_is_with_the_workers_and_the_others_follow(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding, "WINDOW", 3)
    async with serve(pool := FakePool()) as served:
        call = asyncio.ensure_future(served.inference.Embed(pb.EmbedRequest(inputs=inputs(*range(1, 9)))))
        for index in (2, 0, 1, 3, 5, 4, 6, 7):
            await served.until(lambda index=index: len(pool.runs) > index)
            await asyncio.sleep(0.01)
            assert len([run for run in pool.runs if not run.is_over]) <= 3
            pool.runs[index].embed(vector_of(pool.runs[index]))
        response = await call
    assert [each.usage.prompt_tokens for each in response.embeddings] == list(range(1, 9))


async def test_a_full_worker_is_waited_for_while_others_of_the_call_run(serve: Any) -> None:
    pool = embedding_pool()
    async with serve(pool) as served:
        pool.refuse = [busy()]
        refusal = await refused(served.inference.Embed(pb.EmbedRequest(inputs=inputs(1))))
        assert refusal.reason == "QUEUE_FULL"
        first = pool.on_run

        def full_after_one(run: FakeRun) -> None:
            pool.refuse, pool.on_run = [busy(), busy()], first
            assert first is not None
            first(run)

        pool.on_run = full_after_one
        # Two refusals, one end to wait for: the second refusal finds nothing running and is the caller's.
        assert (await refused(served.inference.Embed(pb.EmbedRequest(inputs=inputs(1, 2))))).reason == "QUEUE_FULL"
        pool.on_run = lambda run: (setattr(pool, "refuse", [busy()]), setattr(pool, "on_run", first), first(run))[2]  # type: ignore[misc]
        assert len((await served.inference.Embed(pb.EmbedRequest(inputs=inputs(1, 2)))).embeddings) == 2


async def test_one_failure_ends_the_call_and_frees_the_others(serve: Any) -> None:
    async with serve(pool := FakePool()) as served:
        call = served.inference.Embed(pb.EmbedRequest(inputs=inputs(1, 2, 3)))
        failing = asyncio.ensure_future(refused(call))
        await served.until(lambda: len(pool.runs) == 3)
        pool.runs[0].finish(WireFinishReason.ERROR, error="NUMERICAL", detail="no")
        assert (await failing).reason == "NUMERICAL"
        await served.until(lambda: served.gateway.tracker.admission.counts().num_entered == 0)
    assert sorted(pool.cancelled) == [2, 3]


async def test_a_caller_who_leaves_an_abort_and_a_deadline_free_everything(serve: Any, tmp_path: Any) -> None:
    async with serve(pool := FakePool(), admin_address=f"unix:{tmp_path}/admin.sock") as served:
        idle = lambda: served.gateway.tracker.admission.counts().num_entered == 0  # noqa: E731
        call = served.inference.Embed(pb.EmbedRequest(inputs=inputs(1, 2)))
        await served.until(lambda: len(pool.runs) == 2)
        call.cancel()
        await served.until(idle)
        assert sorted(pool.cancelled) == [1, 2]
        aborted = asyncio.ensure_future(
            refused(served.inference.Embed(pb.EmbedRequest(request_id="e", inputs=inputs(1))))
        )
        await served.until(lambda: len(pool.runs) == 3)
        await served.admin.Abort(admin_pb2.AbortRequest(request_id="e"))
        assert (await aborted).reason == "ABORTED"
        while len(pool.runs) < 4:  # a pause of the machine may take all the time before a worker has the input
            late = await refused(served.inference.Embed(pb.EmbedRequest(inputs=inputs(1), timeout_s=0.05)))
            assert (late.code, late.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE")
        await served.until(idle)
    assert sorted(pool.cancelled) == [1, 2, 3, 4]


async def test_the_receipt_names_the_worker_that_an_input_moved_to(serve: Any) -> None:
    def move(run: FakeRun) -> None:
        run.sink.on_moved("w1", 1.0, 2.0)
        run.sink.on_moved("w2", 3.0, 4.0)
        asyncio.get_running_loop().call_soon(run.embed, vector_of(run))

    async with serve(FakePool(on_run=move)) as served:
        (moved,) = (await served.inference.Embed(pb.EmbedRequest(inputs=inputs(1)))).embeddings
    assert (moved.receipt.worker_id, moved.receipt.migrations) == ("w2", 2)


async def test_a_lost_worker_ends_the_call(serve: Any) -> None:
    async with serve(FakePool(on_run=lambda run: run.lose())) as served:
        refusal = await refused(served.inference.Embed(pb.EmbedRequest(inputs=inputs(1))))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "WORKER_LOST")
