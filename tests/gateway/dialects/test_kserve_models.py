"""What GRPCInferenceService tells about itself and its models."""

from typing import Any

import grpc

from octavo.gateway.config import Dialects
from octavo.gateway.dialects.kserve.model import INPUTS, OUTPUTS
from octavo.gateway.workers.views import WorkerState
from octavo.kserve import inference_pb2 as oip
from tests.support.gateway.fake_pool import worker_view
from tests.support.gateway.kserve_calls import stub_of
from tests.support.gateway.rpc_errors import refused


async def test_readiness_follows_workers_and_draining(serve: Any) -> None:
    async with serve() as served:
        stub, model = stub_of(served), oip.ModelReadyRequest(name="tiny", version="1")

        async def ready() -> tuple[bool, bool, bool]:
            return (
                (await stub.ServerLive(oip.ServerLiveRequest())).live,
                (await stub.ServerReady(oip.ServerReadyRequest())).ready,
                (await stub.ModelReady(model)).ready,
            )

        assert await ready() == (True, True, True)
        served.pool.set_views(worker_view(state=WorkerState.DRAINING))
        assert await ready() == (True, False, False)


async def test_metadata_and_configuration_name_the_same_tensors(serve: Any) -> None:
    async with serve() as served:
        stub = stub_of(served)
        server = await stub.ServerMetadata(oip.ServerMetadataRequest())
        model = await stub.ModelMetadata(oip.ModelMetadataRequest(name="tiny"))
        config = (await stub.ModelConfig(oip.ModelConfigRequest(name="tiny"))).config
    assert server.name == "octavo"
    assert (model.name, list(model.versions)) == ("tiny", ["1"])
    assert {each.name: each.datatype for each in model.inputs} == INPUTS
    assert {each.name: each.datatype for each in model.outputs} == OUTPUTS
    assert [each.name for each in config.input if not each.optional] == ["text_input"]
    assert [each.name for each in config.output] == list(OUTPUTS)
    assert config.model_transaction_policy.decoupled


async def test_without_dialects_the_service_is_not_there(serve: Any) -> None:
    async with serve(dialects=Dialects.NONE) as served:
        refusal = await refused(stub_of(served).ServerLive(oip.ServerLiveRequest()))
    assert refusal.code is grpc.StatusCode.UNIMPLEMENTED
