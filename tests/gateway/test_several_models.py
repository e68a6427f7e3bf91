"""Two models behind one gateway: health, names that are not ready yet, callers whose contract has no name for them."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.gateway.workers.views import WorkerState, WorkerView
from octavo.kserve import inference_pb2 as oip
from octavo.kserve import inference_pb2_grpc as oip_grpc
from octavo.v1 import common_pb2, inference_pb2_grpc, model_pb2
from octavo.v1 import inference_pb2 as pb
from tests.support.gateway import kserve_calls
from tests.support.gateway.fake_pool import FakePool, FakeRun, model_card, worker_view
from tests.support.gateway.rpc_errors import refused

C = grpc.StatusCode
IDS = common_pb2.TokenIds(ids=[4])
ALL = "octavo.v1.InferenceService"
ONE, TWO = f"{ALL}/one", f"{ALL}/two"
STATES = health_pb2.HealthCheckResponse


def views(*names: str) -> list[WorkerView]:
    return [worker_view(f"worker of {name}", card=model_card(name)) for name in names]


def pool_of(*names: str) -> FakePool:
    def run(run: FakeRun) -> None:
        run.tokens([70])
        run.finish()

    return FakePool(views=views(*names), on_run=run)


async def health(served: Any, *services: str) -> list[str]:
    """States by name; NOT_FOUND for what is no service."""
    stub, found = health_pb2_grpc.HealthStub(served.channel), []
    await served.gateway.readiness.publish()
    for service in services:
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            found.append(STATES.ServingStatus.Name(answer.status))
        except grpc.aio.AioRpcError as error:
            found.append(error.code().name)
    return found


async def test_health_is_that_of_all_expected_models_and_each_has_its_own(serve: Any) -> None:
    async with serve(pool_of("one"), expected_models=("one", "two")) as served:
        asked = ("", ALL, "octavo.v1.ModelService", ONE, TWO, f"{ALL}/three")
        assert await health(served, *asked) == [
            "SERVING", "NOT_SERVING", "NOT_SERVING", "SERVING", "NOT_SERVING", "NOT_FOUND",
        ]  # fmt: skip
        served.pool.set_views(*views("one", "two"))
        assert await health(served, ALL, ONE, TWO) == ["SERVING"] * 3
        served.pool.set_views(*views("two"))
        assert await health(served, ALL, ONE, TWO) == ["NOT_SERVING", "NOT_SERVING", "SERVING"]
        served.pool.set_views(*views("one", "two"))
        served.gateway.begin_drain(0)
        assert await health(served, ALL, ONE, TWO) == ["NOT_SERVING"] * 3


async def test_where_no_model_is_expected_any_is_enough_and_each_has_its_own_health_all_the_same(serve: Any) -> None:
    async with serve(pool_of("one")) as served:
        assert await health(served, ALL, ONE, TWO) == ["SERVING", "SERVING", "NOT_FOUND"]
        served.gateway.models.on_model(model_card("two"), {})
        served.pool.set_views(*views("two"))
        assert await health(served, ALL, ONE, TWO) == ["SERVING", "NOT_SERVING", "SERVING"]


async def test_a_watcher_of_a_model_is_told_when_it_becomes_ready(serve: Any) -> None:
    async with asyncio.timeout(60), serve(pool_of("one"), expected_models=("one", "two")) as served:
        watch = health_pb2_grpc.HealthStub(served.channel).Watch(health_pb2.HealthCheckRequest(service=TWO))
        assert (await watch.read()).status == STATES.NOT_SERVING
        served.pool.set_views(*views("one", "two"))
        assert (await watch.read()).status == STATES.SERVING
        watch.cancel()


def calls_of(served: Any, model: str) -> dict[str, Any]:
    """Every call that names a model."""
    generate = pb.GenerateRequest(model=model, token_ids=IDS)
    kserve = oip_grpc.GRPCInferenceServiceStub(served.channel)
    return {
        "Generate": served.inference.Generate(generate),
        "Complete": served.inference.Complete(pb.CompleteRequest(generate=generate)),
        "Embed": served.inference.Embed(pb.EmbedRequest(model=model, inputs=[pb.EmbedInput(token_ids=IDS)])),
        "Tokenize": served.inference.Tokenize(pb.TokenizeRequest(model=model, text="x")),
        "Detokenize": served.inference.Detokenize(pb.DetokenizeRequest(model=model, token_ids=[4])),
        "GetModel": served.models.GetModel(model_pb2.GetModelRequest(model=model)),
        "ModelMetadata": kserve.ModelMetadata(oip.ModelMetadataRequest(name=model)),
    }


REGISTERED = worker_view("w2", state=WorkerState.REGISTERED, card=model_card("two"))
DRAINING = worker_view("w2", state=WorkerState.DRAINING, card=model_card("two"))


@pytest.mark.parametrize(
    ("expected", "further"),
    [(("one", "two"), []), ((), [REGISTERED]), ((), [DRAINING])],
    ids=["expected", "registered", "draining"],
)
async def test_a_model_that_is_not_ready_is_unavailable_and_an_unknown_one_is_not_found(
    serve: Any, expected: tuple[str, ...], further: list[WorkerView]
) -> None:
    pool = pool_of("one")
    pool.views += further
    async with serve(pool, expected_models=expected) as served:
        for method, call in calls_of(served, "two").items():
            refusal = await refused(call)
            assert (method, refusal.code, refusal.reason) == (method, C.UNAVAILABLE, "NO_WORKER")
            assert refusal.pushback_ms is not None
            assert "'two' is not ready" in refusal.message
        for method, call in calls_of(served, "three").items():
            refusal = await refused(call)
            assert (method, refusal.code, refusal.reason) == (method, C.NOT_FOUND, "MODEL_NOT_FOUND")


async def test_before_any_worker_came_unknown_names_are_not_found_where_the_models_are_known(serve: Any) -> None:
    async with serve(FakePool(views=[]), expected_models=("one",)) as served:
        call = served.inference.Generate(pb.GenerateRequest(model="three", token_ids=IDS))
        assert (await refused(call)).reason == "MODEL_NOT_FOUND"
        assert (await refused(served.inference.Generate(pb.GenerateRequest(token_ids=IDS)))).reason == "NO_WORKER"


async def test_a_request_without_a_name_does_not_depend_on_which_model_was_first(serve: Any) -> None:
    async with serve(pool_of("one"), expected_models=("one", "two")) as served:
        refusal = await refused(served.inference.Generate(pb.GenerateRequest(token_ids=IDS)))
        assert (refusal.code, refusal.fields) == (C.INVALID_ARGUMENT, ("model",))
        assert "one, two" in refusal.message


# ---------------------------------------------------------------- by metadata


def named(model: str) -> tuple[tuple[str, str], ...]:
    return (("x-model", model),)


async def test_metadata_names_the_model_where_the_request_does_not(serve: Any) -> None:
    async with serve(pool_of("one", "two")) as served:
        complete = served.inference.Complete
        plain = pb.CompleteRequest(generate=pb.GenerateRequest(token_ids=IDS))
        assert (await complete(plain, metadata=named("two"))).model == "two"
        both = pb.CompleteRequest(generate=pb.GenerateRequest(model="one", token_ids=IDS))
        assert (await complete(both, metadata=named("two"))).model == "one"
        assert (await refused(complete(plain, metadata=named("three")))).code is C.NOT_FOUND
        two = await refused(complete(plain, metadata=(*named("one"), *named("two"))))
        assert (two.code, two.fields) == (C.INVALID_ARGUMENT, ("x-model",))
        assert (await refused(complete(plain, metadata=named("x" * 257)))).fields == ("x-model",)
        assert (await complete(both, metadata=(*named("one"), *named("one")))).model == "one"


async def test_metadata_names_the_model_of_kserves_requests_in_a_stream_too(serve: Any) -> None:
    asked, stream = kserve_calls.request(), kserve_calls.stream
    asked.model_name = ""
    async with serve(pool_of("one", "two")) as served:
        whole = await kserve_calls.stub_of(served).ModelInfer(asked, metadata=named("two"))
        (answer,) = await stream(served, asked, metadata=named("two"))
        assert (answer.infer_response.model_name, answer.error_message) == (whole.model_name, "") == ("two", "")
        (answer,) = await stream(served, asked)
    assert "model_name: must be set, several are served: one, two" in answer.error_message


async def test_vllms_callers_choose_between_models_by_metadata(serve: Any, vllm_stub: Callable[[Any], Any]) -> None:
    from smg_grpc_proto.generated import common_pb2 as smg_common  # type: ignore[import-untyped]

    from tests.support.gateway.vllm_calls import request, vllm

    two = worker_view("w2", card=model_card("two", max_model_len=128), num_running=3)
    pool = pool_of("one")
    pool.views.append(two)
    async with serve(pool) as served:
        stub = vllm_stub(served.channel)
        for index, model in enumerate(("one", "two", "one")):
            answers = [answer async for answer in stub.Generate(request(), metadata=named(model))]
            assert answers[-1].complete.finish_reason == "length"
            assert pool.runs[index].worker.card.name == model
        info = await stub.GetModelInfo(vllm.GetModelInfoRequest(), metadata=named("two"))
        assert (info.served_model_name, info.max_context_length) == ("two", 128)
        chunks = [each async for each in stub.GetTokenizer(smg_common.GetTokenizerRequest(), metadata=named("two"))]
        assert chunks
        running = []
        for metadata in (named("one"), named("two"), None):
            (load,) = (await stub.GetLoads(vllm.GetLoadsRequest(), metadata=metadata)).loads
            running.append((load.num_running_reqs, load.max_running_requests))
        assert running == [(0, 4), (3, 4), (3, 8)]
        await stub.FlushCache(smg_common.FlushCacheRequest(), metadata=named("two"))
        assert pool.queries[-1]["model"] == "two"
        for call in (stub.Generate(request()), stub.GetModelInfo(vllm.GetModelInfoRequest())):
            refusal = await refused(call)
            assert (refusal.code, refusal.fields) == (C.INVALID_ARGUMENT, ("x-model",))
            assert "one, two" in refusal.message
        assert (await refused(stub.Generate(request(), metadata=named("three")))).code is C.NOT_FOUND


async def test_vllms_health_is_that_of_the_model_that_is_named(serve: Any, vllm_stub: Callable[[Any], Any]) -> None:
    from tests.support.gateway.vllm_calls import vllm

    async with serve(pool_of("one"), expected_models=("one", "two")) as served:
        stub = vllm_stub(served.channel)

        async def healthy(metadata: Any = None) -> bool:
            return bool((await stub.HealthCheck(vllm.HealthCheckRequest(), metadata=metadata)).healthy)

        assert [await healthy(), await healthy(named("one")), await healthy(named("two"))] == [False, True, False]
        assert (await stub.HealthCheck(vllm.HealthCheckRequest())).message == "no worker is ready for two"
        served.pool.set_views(*views("one", "two"))
        assert [await healthy(), await healthy(named("one")), await healthy(named("two"))] == [True] * 3
        served.gateway.begin_drain(0)
        assert not await healthy(named("one"))


# ---------------------------------------------------------------- by listener


async def test_a_listener_of_a_model_serves_callers_who_can_name_none(
    serve: Any, vllm_stub: Callable[[Any], Any], tmp_path: Path
) -> None:
    from tests.support.gateway.vllm_calls import request, vllm

    addresses = tuple((name, f"unix:{tmp_path}/{name}.sock") for name in ("one", "two"))
    async with serve(pool_of("one", "two"), model_addresses=addresses, expected_models=("one", "two")) as served:
        assert served.gateway.listeners.model_addresses == dict(addresses)
        for name, address in addresses:
            async with grpc.aio.insecure_channel(address) as channel:
                stub = vllm_stub(channel)
                answers = [answer async for answer in stub.Generate(request())]
                assert answers[-1].complete.finish_reason == "length"
                assert served.pool.runs[-1].worker.card.name == name
                assert (await stub.GetModelInfo(vllm.GetModelInfoRequest())).served_model_name == name
                (load,) = (await stub.GetLoads(vllm.GetLoadsRequest())).loads
                assert load.max_running_requests == 4
                complete = inference_pb2_grpc.InferenceServiceStub(channel).Complete
                plain = pb.CompleteRequest(generate=pb.GenerateRequest(token_ids=IDS))
                assert (await complete(plain)).model == name
                assert (await complete(plain, metadata=named("one"))).model == "one"
        served.pool.set_views(*views("one"))
        async with grpc.aio.insecure_channel(addresses[1][1]) as channel:
            stub = vllm_stub(channel)
            assert not (await stub.HealthCheck(vllm.HealthCheckRequest())).healthy
            refusal = await refused(stub.Generate(request()))
            assert (refusal.code, refusal.reason) == (C.UNAVAILABLE, "NO_WORKER")
