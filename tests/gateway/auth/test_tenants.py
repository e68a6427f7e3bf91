"""What a tenant may have, and what others learn of it: on a real server with a real channel."""

import asyncio
import re
from pathlib import Path
from typing import Any

import grpc
import pytest

from octavo.openengine import openengine_pb2 as oe
from octavo.openengine import openengine_pb2_grpc as oe_grpc
from octavo.v1 import admin_pb2, common_pb2
from octavo.v1 import inference_pb2 as pb
from tests.support.gateway.fake_pool import FakePool
from tests.support.gateway.keyed import FILE, answers, as_
from tests.support.gateway.rpc_errors import refused

C = grpc.StatusCode


async def test_tenants_have_salts_of_their_own_and_their_own_ids(guarded: Any) -> None:
    pool = FakePool()
    async with guarded(pool) as served:
        request = pb.GenerateRequest(request_id="same", text="x", cache_salt="s")
        streams = []
        for name in ("ann", "bob"):
            streams.append(served.inference.Generate(request, metadata=as_(name)))
            assert (await anext(aiter(streams[-1]))).started.request_id == "same"
        refusal = await refused(served.inference.Generate(request, metadata=as_("ann")))
        assert (refusal.code, refusal.message) == (C.ALREADY_EXISTS, "request id 'same' is in flight")
        mine = served.inference.Generate(pb.GenerateRequest(text="x", cache_salt="s"), metadata=as_("ann"))
        await anext(aiter(mine))
        first, second, third = [run.request.cache_salt for run in pool.runs]
        assert first != second
        assert first == third
        assert all(re.fullmatch("[0-9a-f]{64}", salt) for salt in (first, second))
        assert [run.request.request_id for run in pool.runs[:2]] == ["same", "same"]


async def test_a_tenant_cannot_end_anothers_request(guarded: Any) -> None:
    stubs = pytest.importorskip("smg_grpc_proto")
    pool = FakePool()
    async with guarded(pool) as served:
        stream = served.inference.Generate(pb.GenerateRequest(request_id="r", text="x"), metadata=as_("ann"))
        await anext(aiter(stream))
        engine = stubs.vllm_engine_pb2_grpc.VllmEngineStub(served.channel)
        await engine.Abort(stubs.vllm_engine_pb2.AbortRequest(request_ids=["r"]), metadata=as_("bob"))
        assert pool.cancelled == []
        await engine.Abort(stubs.vllm_engine_pb2.AbortRequest(request_ids=["r"]), metadata=as_("ann"))
        assert set(pool.cancelled) == {1}
        assert (await refused(stream)).reason == "ABORTED"


async def test_a_tenant_does_not_learn_which_requests_of_others_have_ended(guarded: Any) -> None:
    async with guarded(answers(5)) as served:
        ask = oe.GenerateRequest(request_id="r", prompt="x")
        async for _ in oe_grpc.InferenceStub(served.channel).Generate(ask, metadata=as_("ann")):
            pass
        control, abort = oe_grpc.ControlStub(served.channel), oe.AbortRequest(request_id="r")
        assert (await refused(control.Abort(abort, metadata=as_("bob")))).code is C.NOT_FOUND
        assert (await control.Abort(abort, metadata=as_("ann"))).status == oe.ABORT_STATUS_ALREADY_FINISHED


async def test_a_caller_ends_the_request_of_its_own_that_has_the_id_and_no_other(guarded: Any, tmp_path: Path) -> None:
    """The same id is in flight for two tenants, and another one that ends with it."""
    pool = FakePool()
    async with guarded(pool, admin_address=f"unix:{tmp_path}/admin.sock") as served:
        streams = {}
        for name, request_id in (("ann", "r"), ("bob", "r"), ("ann", "xr"), ("bob", "rr")):
            stream = served.inference.Generate(pb.GenerateRequest(request_id=request_id, text="x"), metadata=as_(name))
            await anext(aiter(stream))
            streams[name, request_id] = stream
        await served.inference.Cancel(pb.CancelRequest(request_id="r"), metadata=as_("bob"))
        assert (await refused(streams["bob", "r"])).reason == "ABORTED"
        assert set(pool.cancelled) == {2}
        answer = await served.admin.Abort(admin_pb2.AbortRequest(request_id="r"), metadata=as_("ops"))
        assert answer.found
        assert (await refused(streams["ann", "r"])).reason == "ABORTED"
        assert set(pool.cancelled) == {1, 2}
        assert {live.request_id for live in served.gateway.tracker} == {"xr", "rr"}


async def test_an_operator_can_end_anybodys_request(guarded: Any, tmp_path: Path) -> None:
    async with guarded(FakePool(), admin_address=f"unix:{tmp_path}/admin.sock") as served:
        stream = served.inference.Generate(pb.GenerateRequest(request_id="r", text="x"), metadata=as_("ann"))
        await anext(aiter(stream))
        answer = await served.admin.Abort(admin_pb2.AbortRequest(request_id="r"), metadata=as_("ops"))
        assert answer.found
        assert (await refused(stream)).reason == "ABORTED"


async def test_a_tenants_limits_stop_it_and_nobody_else(guarded: Any) -> None:
    file = FILE + "[tenants.ann]\nmax_requests = 2\nmax_queued = 1\n"
    pool = FakePool()
    async with guarded(pool, file=file) as served:

        async def begin(name: str) -> Any:
            stream = served.inference.Generate(pb.GenerateRequest(text="x"), metadata=as_(name))
            await anext(aiter(stream))
            return stream

        first = await begin("ann")
        queue_full = await refused(served.inference.Generate(pb.GenerateRequest(text="x"), metadata=as_("ann")))
        pool.runs[0].sink.on_started()
        second = await begin("ann")
        pool.runs[1].sink.on_started()
        full = await refused(served.inference.Generate(pb.GenerateRequest(text="x"), metadata=as_("ann")))
        for refusal, words in ((queue_full, "queued"), (full, "in flight")):
            assert (refusal.code, refusal.reason, refusal.pushback_ms) == (C.RESOURCE_EXHAUSTED, "TENANT_LIMIT", 500)
            assert words in refusal.message
        others = [await begin("bob") for _ in range(3)]
        first.cancel()
        await served.until(lambda: served.gateway.tracker.quotas.counts("ann").num_in_flight == 1)
        third = await begin("ann")
        for stream in (second, third, *others):
            stream.cancel()
        await served.until(lambda: served.gateway.tracker.admission.counts().num_entered == 0)
        assert served.gateway.meters.tenant_refusals == 2
        assert served.gateway.tracker.quotas._held == {}


async def test_limits_count_every_output_of_a_request(guarded: Any) -> None:
    file = FILE + "[tenants.ann]\nmax_requests = 4\n"
    pool = FakePool()
    async with guarded(pool, file=file) as served:

        def ask(num_outputs: int) -> Any:
            request = pb.GenerateRequest(text="x", num_outputs=num_outputs)
            return served.inference.Generate(request, metadata=as_("ann"))

        never = await refused(ask(5))
        assert (never.code, never.reason) == (C.INVALID_ARGUMENT, "EXCEEDS_CAPACITY")
        stream = ask(3)
        await anext(aiter(stream))
        assert (await refused(ask(2))).reason == "TENANT_LIMIT"
        counts = served.gateway.tracker.quotas.counts("ann")
        assert (counts.num_in_flight, counts.num_queued) == (3, 3)
        assert served.gateway.tracker.admission.counts().num_outputs == 3
        pool.runs[1].sink.on_started()
        pool.runs[1].sink.on_started()
        assert served.gateway.tracker.quotas.counts("ann").num_queued == 2
        stream.cancel()
        await served.until(lambda: served.gateway.tracker.quotas.counts("ann").num_in_flight == 0)
        four = ask(4)
        await anext(aiter(four))
        four.cancel()


async def test_workers_hear_of_a_tenant_by_label_and_weight_whatever_its_headers_say(guarded: Any) -> None:
    file = FILE + "[tenants.ann]\nweight = 9\n"
    pool = answers(5)
    async with guarded(pool, file=file) as served:
        for name, more in (("ann", ()), ("bob", ()), ("ann", (("x-tenant", "bob"), ("tenant", "bob")))):
            metadata = (*as_(name), *more)
            complete = pb.CompleteRequest(generate=pb.GenerateRequest(text="x"))
            await served.inference.Complete(complete, metadata=metadata)
        ann, bob, again = [run.request for run in pool.runs]
    assert (ann.weight, bob.weight, again.weight) == (9, 1, 9)
    assert ann.tenant == again.tenant != bob.tenant
    assert not {"ann", "bob", ""} & {ann.tenant, bob.tenant}


async def test_without_keys_everybody_is_one_tenant(serve: Any) -> None:
    pool = answers(5)
    async with serve(pool) as served:
        await served.inference.Complete(pb.CompleteRequest(generate=pb.GenerateRequest(text="x")))
        assert (pool.runs[0].request.tenant, pool.runs[0].request.weight) == ("", 1)


async def test_tokens_are_reserved_refused_with_the_wait_and_refunded(guarded: Any) -> None:
    file = FILE + "[tenants.ann]\ntokens_per_minute = 60\nburst_tokens = 50\n"
    pool = FakePool()
    async with guarded(pool, file=file) as served:

        def ask(max_tokens: int) -> Any:
            request = pb.GenerateRequest(
                token_ids={"ids": [5] * 10}, stop=pb.StopConditions(max_tokens=max_tokens), output={"format": 2}
            )
            return served.inference.Generate(request, metadata=as_("ann"))

        never = await refused(ask(41))
        assert (never.code, never.reason) == (C.INVALID_ARGUMENT, "EXCEEDS_CAPACITY")
        stream = ask(40)
        await anext(aiter(stream))
        soon = await refused(ask(10))
        assert soon.reason == "TENANT_LIMIT"
        assert soon.pushback_ms is not None
        assert 15_000 < soon.pushback_ms <= 20_000
        pool.runs[0].tokens([5] * 5)
        pool.runs[0].finish()
        assert [event.WhichOneof("event") async for event in stream][-1] == "finished"
        await served.until(lambda: served.gateway.tracker.admission.counts().num_entered == 0)
        again = ask(25)  # 10 + 5 were used, 35 are back
        await anext(aiter(again))
        again.cancel()


async def test_what_a_tenant_has_embedded_is_in_its_figures(guarded: Any) -> None:
    pool = FakePool(on_run=lambda run: asyncio.get_running_loop().call_soon(run.embed, [1.0]) and None)
    async with guarded(pool) as served:
        inputs = [pb.EmbedInput(token_ids=common_pb2.TokenIds(ids=range(length))) for length in (2, 3)]
        await served.inference.Embed(pb.EmbedRequest(inputs=inputs), metadata=as_("ann"))
        meters = served.gateway.meters
        assert (meters.tenants["ann"].prompt_tokens, meters.models["tiny"].prompt_tokens) == (5, 5)


async def test_an_embedding_that_is_left_early_is_charged_with_what_workers_were_sent(guarded: Any) -> None:
    file = FILE + "[tenants.ann]\ntokens_per_minute = 60\nburst_tokens = 50\n"
    async with guarded(FakePool(), file=file) as served:
        inputs = [pb.EmbedInput(token_ids=common_pb2.TokenIds(ids=range(20)))]
        for _ in range(2):
            call = served.inference.Embed(pb.EmbedRequest(inputs=inputs), metadata=as_("ann"))
            await served.until(lambda: any(not run.is_over for run in served.pool.runs))
            call.cancel()
            await served.until(lambda: served.gateway.tracker.admission.counts().num_entered == 0)
        again = served.inference.Embed(pb.EmbedRequest(inputs=inputs), metadata=as_("ann"), timeout=9)
        refusal = await refused(again)
        assert (refusal.code, refusal.reason) == (C.RESOURCE_EXHAUSTED, "TENANT_LIMIT")
        assert len(served.pool.runs) == 2
