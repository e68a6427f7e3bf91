"""Every method of every service, with random requests: each call has one end, a status that is documented, and what is
refused is named as the caller calls it."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from octavo.wire.messages import TokenLogprobs
from tests.support.gateway.fake_pool import FakePool, FakeRun
from tests.support.gateway.random_messages import RandomMessages, names_a_field
from tests.support.gateway.rpc_errors import refusal_of

_C = grpc.StatusCode
DOCUMENTED = {_C.OK, _C.INVALID_ARGUMENT, _C.NOT_FOUND, _C.ALREADY_EXISTS, _C.RESOURCE_EXHAUSTED}
DOCUMENTED |= {_C.FAILED_PRECONDITION, _C.UNIMPLEMENTED, _C.ABORTED}
GENERATING = ("Generate", "GenerateStream", "Complete", "ModelInfer", "ModelStreamInfer", "Embed")
ENDING = ("Drain", "Shutdown", "Scale", "ScaleGateways")  # end the service, or ask the supervisor that there is not
KSERVE = (
    "inputs",
    "outputs",
    "parameters",
    "sampling_parameters",
    "model_name",
    "model_version",
    "id",
    "raw_input_contents",
)
MORE = {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


def answer(run: FakeRun) -> None:
    """All that is asked for, at once."""
    asked = run.request.sampling
    if run.request.pooling is not None:
        return run.embed([1.0, -2.0])
    sink: Any = run.sink
    if asked.num_prompt_logprobs is not None and run.handle == run.request.handle:
        sink.on_prompt_logprobs([TokenLogprobs(-1.0, (9,), (-0.5,))] * (len(run.prompt_ids) - 1))
    for token_id in (70, 71)[: asked.max_tokens]:
        run.tokens([token_id], None if asked.num_logprobs is None else [TokenLogprobs(-0.25, (70,), (-0.25,))])
    return run.finish()


async def services(channel: grpc.aio.Channel) -> list[ServiceDescriptor]:
    """All that the port has, by its own word."""
    request = reflection_pb2.ServerReflectionRequest(list_services="")

    async def one() -> AsyncIterator[Any]:
        yield request

    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(one())
    told = await call.read()
    names = {each.name for each in told.list_services_response.service} | MORE
    return [descriptor_pool.Default().FindServiceByName(name) for name in sorted(names)]


async def ends(channel: grpc.aio.Channel, method: MethodDescriptor, request: Message) -> grpc.aio.AioRpcError | None:
    """The call's error; None for OK, and for a stream that goes on until somebody leaves it."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    parse = message_factory.GetMessageClass(method.output_type).FromString
    kinds = {(False, False): channel.unary_unary, (False, True): channel.unary_stream}
    kinds[(True, True)] = channel.stream_stream
    make: Any = kinds[(method.client_streaming, method.server_streaming)]

    async def one() -> AsyncIterator[bytes]:
        yield request.SerializeToString()

    call = make(path, None, parse)(one() if method.client_streaming else request.SerializeToString())
    try:
        async with asyncio.timeout(0.1 if method.name in ("Watch", "WatchLoad", "SubscribeKvEvents") else 30):
            if method.server_streaming:
                check_stream(method, request, [each async for each in call])
            else:
                await call
    except grpc.aio.AioRpcError as error:
        return error
    except TimeoutError:
        assert method.name in ("Watch", "WatchLoad", "SubscribeKvEvents"), (path, request)
        call.cancel()
    return None


def check_stream(method: MethodDescriptor, request: Any, events: list[Any]) -> None:
    """Each output has one end."""
    match method.full_name:
        case "octavo.v1.InferenceService.Generate":
            wanted = request.num_outputs or 1
            found = [each.finished.output_index for each in events if each.HasField("finished")]
        case "openengine.v1.Inference.Generate" if not events[-1].HasField("error"):
            wanted = request.sampling.num_sequences or 1
            found = [each.finished.output_index for each in events if each.HasField("finished")]
        case "vllm.Inference.GenerateStream":
            wanted = request.sampling.num_sequences or 1
            found = [each.outputs.index for each in events if each.outputs.HasField("finish_info")]
        case "vllm.grpc.engine.VllmEngine.Generate":
            wanted = request.sampling_params.n or 1
            found = [each.complete.index for each in events if each.HasField("complete")]
        case _:
            return
    assert sorted(found) == list(range(wanted)), (method.full_name, request)


def check_error(method: MethodDescriptor, request: Message, error: grpc.aio.AioRpcError) -> None:
    refusal = refusal_of(error)
    told = (method.full_name, refusal, str(request)[:2000])
    assert refusal.code in DOCUMENTED, told
    assert refusal.message, told
    if refusal.reason == "INVALID_FIELD":
        assert refusal.fields, told
    for path in refusal.fields:
        is_kserves = (
            method.input_type.name == "ModelInferRequest" and path.partition(".")[0].partition("[")[0] in KSERVE
        )
        assert is_kserves or path.startswith("x-model") or names_a_field(path, method.input_type), (path, *told)


@pytest.mark.parametrize(("seed", "edges"), [(1, 0.0), (2, 0.03), (3, 0.2)])
async def test_whatever_is_asked_has_one_end_that_names_what_is_wrong(
    serve: Any, tmp_path: Path, seed: int, edges: float
) -> None:
    random, codes = RandomMessages(seed, edges=edges), Counter[grpc.StatusCode]()
    with structlog.testing.capture_logs() as logs:
        async with serve(FakePool(on_run=answer), admin_address=f"unix:{tmp_path}/admin.sock") as served:
            channels = (served.channel, served.admin_channel)
            found = [(channel, each) for channel in channels for each in await services(channel)]
            assert {each.full_name for _, each in found} >= {"openengine.v1.Control", "octavo.v1.AdminService"}
            for channel, service in found:
                for method in service.methods:
                    if method.name in ENDING:
                        continue
                    for _ in range(40 if method.name in GENERATING else 3):
                        request = random.fill(message_factory.GetMessageClass(method.input_type)())
                        error = await ends(channel, method, request)
                        codes[error.code() if error else _C.OK] += 1
                        if error:
                            check_error(method, request, error)
            await served.until(lambda: not len(served.gateway.tracker))
    assert not [each for each in logs if each["log_level"] == "error"]
    assert codes[_C.OK] > 60, codes
    assert codes[_C.INVALID_ARGUMENT] > 60, codes
