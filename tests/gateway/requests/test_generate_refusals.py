"""Requests of Generate that are refused: with which status, and without a trace."""

from typing import Any

import grpc
import pytest
import structlog

from octavo.gateway.config import RequestLimits
from octavo.v1 import common_pb2
from octavo.v1 import inference_pb2 as pb
from octavo.wire.messages import Capacity
from tests.support.gateway.fake_pool import FakePool, busy, gone, model_card, worker_view
from tests.support.gateway.generating import REQUEST, speaking, text_of
from tests.support.gateway.rpc_errors import refused


async def test_a_duplicate_id_is_refused_and_the_first_request_is_not_disturbed(serve: Any) -> None:
    async with serve() as served:
        call = served.inference.Generate(REQUEST)
        await served.until(lambda: served.pool.runs)
        refusal = await refused(served.inference.Generate(REQUEST))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST")
        assert (refusal.request_id, refusal.tokens_delivered, refusal.pushback_ms) == ("r1", 0, None)
        assert refusal.info == ("DUPLICATE_REQUEST", "octavo")
        served.pool.runs[0].finish()
        assert (await text_of(call))[1][-1].HasField("finished")
        served.pool.on_run = lambda run: run.finish()
        assert (await text_of(served.inference.Generate(REQUEST)))[1][-1].HasField("finished")


async def test_a_full_worker_pushes_back(serve: Any) -> None:
    small = Capacity(num_blocks=64, block_size=16, max_num_seqs=1, max_waiting=1, max_batch_tokens=64)
    async with serve(FakePool(views=[worker_view(capacity=small)])) as served:
        request = pb.GenerateRequest(token_ids=common_pb2.TokenIds(ids=[4]))
        calls = [served.inference.Generate(request) for _ in range(2)]
        await served.until(lambda: len(served.pool.runs) == 2)
        refusal = await refused(served.inference.Generate(request))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert refusal.pushback_ms == 500
        for run in served.pool.runs:
            run.finish()
        for call in calls:
            await text_of(call)
        assert served.gateway.tracker.admission.counts().num_entered == 0


async def test_a_busy_socket_pushes_back_and_a_worker_that_just_left_is_replaced(serve: Any) -> None:
    pool = speaking([5])
    async with serve(pool) as served:
        pool.refuse = [busy()]
        refusal = await refused(served.inference.Generate(REQUEST))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        pool.refuse = [gone(), gone()]
        assert (await text_of(served.inference.Generate(REQUEST)))[1][-1].HasField("finished")
        pool.refuse = [gone(), gone(), gone()]
        refusal = await refused(served.inference.Generate(REQUEST))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "WORKER_LOST")
        assert served.gateway.tracker.admission.counts().num_entered == 0


async def test_the_gateways_own_limit_is_checked_before_tokenizing(serve: Any) -> None:
    async with serve(limits=RequestLimits(max_requests=1)) as served:
        first = served.inference.Generate(REQUEST)
        await served.until(lambda: served.pool.runs)
        refusal = await refused(served.inference.Generate(pb.GenerateRequest(text="Hello")))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        first.cancel()


async def test_without_a_worker_the_caller_may_come_back(serve: Any) -> None:
    async with serve(FakePool(views=[])) as served:
        refusal = await refused(served.inference.Generate(pb.GenerateRequest(text="x")))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_WORKER")
    assert (refusal.pushback_ms, refusal.tokens_delivered) == (500, 0)


@pytest.mark.parametrize("is_draining", [False, True], ids=["no worker", "draining"])
async def test_a_request_that_gets_no_further_has_an_id_for_its_caller_and_the_log(
    serve: Any, is_draining: bool
) -> None:
    async with serve(FakePool(views=[])) as served:
        served.gateway.tracker.is_draining = is_draining
        with structlog.testing.capture_logs() as lines:
            refusals = [
                await refused(served.inference.Generate(pb.GenerateRequest(text="x"))),
                await refused(served.inference.Embed(pb.EmbedRequest(inputs=[pb.EmbedInput(text="x")]))),
            ]
    assert {refusal.reason for refusal in refusals} == {"DRAINING" if is_draining else "NO_WORKER"}
    ids = [refusal.request_id for refusal in refusals]
    assert all(each.startswith("req-") for each in ids)
    assert [line["request_id"] for line in lines if line["event"] == "end"] == ids


async def test_models_are_named_where_there_are_several(serve: Any) -> None:
    views = [worker_view("w0"), worker_view("w1", card=model_card("big", max_model_len=512))]
    pool = speaking([5])
    pool.views = views
    async with serve(pool) as served:
        refusal = await refused(served.inference.Generate(pb.GenerateRequest(text="x")))
        assert (refusal.code, refusal.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ("model",))
        nested = pb.CompleteRequest(generate=pb.GenerateRequest(text="x"))
        assert (await refused(served.inference.Complete(nested))).fields == ("generate.model",)
        refusal = await refused(served.inference.Generate(pb.GenerateRequest(text="x", model="/etc/passwd")))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
        assert "/etc" not in refusal.message
        await text_of(served.inference.Generate(pb.GenerateRequest(text="x", model="big")))
        assert pool.runs[-1].worker.worker_id == "w1"
        pool.set_views(views[0])
        refusal = await refused(served.inference.Generate(pb.GenerateRequest(text="x", model="big")))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_WORKER")


async def test_a_model_that_is_replaced_while_a_prompt_is_tokenized_does_not_get_it(serve: Any) -> None:
    pool = speaking([5])
    async with serve(pool) as served:
        text, tokenize = served.gateway.text, served.gateway.text.run_steps

        async def and_replace(*args: Any, **named: Any) -> Any:
            encoded = await tokenize(*args, **named)
            pool.set_views(worker_view("w1", card=model_card(fingerprint="another", tokenizer_digest="e" * 64)))
            return encoded

        text.run_steps = and_replace
        for call in (
            lambda: served.inference.Generate(pb.GenerateRequest(text="x")),
            lambda: served.inference.Embed(pb.EmbedRequest(inputs=[pb.EmbedInput(text="x")])),
        ):
            pool.set_views(worker_view())
            refusal = await refused(call())
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_WORKER")
            assert "replaced by another of its name" in refusal.message
            assert refusal.pushback_ms == 500
    assert pool.runs == []


async def test_what_can_never_fit_is_refused_at_once(serve: Any) -> None:
    small = Capacity(num_blocks=2, block_size=16, max_num_seqs=4, max_waiting=4, max_batch_tokens=64)
    cases = [
        (worker_view(), 255, 0, True),
        (worker_view(), 256, 0, False),  # no room for one token in the context of 256
        (worker_view(), 200, 56, True),
        (worker_view(), 200, 57, False),
        (worker_view(capacity=small), 31, 0, True),
        (worker_view(capacity=small), 32, 0, False),  # nor in a pool of 2 blocks of 16
        (worker_view(capacity=small), 20, 13, True),  # the last token needs no place in the pool
        (worker_view(capacity=small), 20, 14, False),
    ]
    for view, num_tokens, min_tokens, fits in cases:
        pool = speaking([5])
        pool.views = [view]
        async with serve(pool) as served:
            request = pb.GenerateRequest(
                token_ids=common_pb2.TokenIds(ids=[4] * num_tokens), stop=pb.StopConditions(min_tokens=min_tokens)
            )
            if fits:
                await text_of(served.inference.Generate(request))
                continue
            refusal = await refused(served.inference.Generate(request))
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "EXCEEDS_CAPACITY")
            assert pool.runs == []


async def test_a_text_above_the_limit_is_refused_before_it_is_tokenized(serve: Any) -> None:
    async with serve(speaking([5]), limits=RequestLimits(max_prompt_bytes=100)) as served:
        await text_of(served.inference.Generate(pb.GenerateRequest(text="é" * 50)))
        for request in (pb.GenerateRequest(text="é" * 51), pb.GenerateRequest(text="a" * 2_000_000)):
            refusal = await refused(served.inference.Generate(request))
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "EXCEEDS_CAPACITY")


async def test_a_template_that_refuses_is_the_callers_fault(serve: Any) -> None:
    async with serve() as served:
        chat = pb.Chat(messages=[pb.ChatMessage(role=pb.CHAT_ROLE_TOOL, content="x")])
        refusal = await refused(served.inference.Generate(pb.GenerateRequest(chat=chat)))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "TEMPLATE")
    assert refusal.message == "a tool cannot begin"


async def test_ids_that_the_model_does_not_have_are_named_by_their_place(serve: Any) -> None:
    async with serve() as served:
        request = pb.GenerateRequest(token_ids=common_pb2.TokenIds(ids=[1, 600, 2, 2**32 - 1]))
        assert (await refused(served.inference.Generate(request))).fields == ("token_ids.ids[1]", "token_ids.ids[3]")
        request = pb.GenerateRequest(text="x", stop=pb.StopConditions(token_ids=[1, 600]))
        refusal = await refused(served.inference.Complete(pb.CompleteRequest(generate=request)))
        assert refusal.fields == ("generate.stop.token_ids[1]",)
        refusal = await refused(served.inference.Detokenize(pb.DetokenizeRequest(token_ids=[700])))
        assert refusal.fields == ("token_ids[0]",)


async def test_a_refusal_sends_no_initial_metadata_so_that_it_can_be_retried(serve: Any) -> None:
    async with serve(FakePool(views=[])) as served:
        call = served.inference.Generate(REQUEST)
        assert (await refused(call)).reason == "NO_WORKER"
        assert "x-request-id" not in dict(await call.initial_metadata())
