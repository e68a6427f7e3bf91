"""GRPCInferenceService over a real channel to a gateway without workers."""

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from octavo.kserve import inference_pb2 as oip
from octavo.kserve import inference_pb2_grpc

from gateway.config import Dialects
from gateway.dialects.kserve_model import INPUTS, OUTPUTS
from gateway.text.model_text import ModelText
from gateway.workers.views import WorkerState
from tests.support.fake_pool import FakePool, FakeRun, busy, worker_view
from tests.support.rpc_errors import refused
from wire.messages import Sampling, TokenLogprobs, WireFinishReason


def stub_of(served: Any) -> Any:
    return inference_pb2_grpc.GRPCInferenceServiceStub(served.channel)


def typed(name: str, value: str | bool) -> oip.ModelInferRequest.InferInputTensor:
    if isinstance(value, bool):
        contents, datatype = oip.InferTensorContents(bool_contents=[value]), "BOOL"
    else:
        contents, datatype = oip.InferTensorContents(bytes_contents=[value.encode()]), "BYTES"
    return oip.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=[1], contents=contents)


def request(text: str = "Hello", parameters: dict[str, Any] | None = None, **inputs: str | bool) -> Any:
    """Typed contents; parameters become sampling_parameters."""
    if parameters is not None:
        inputs["sampling_parameters"] = json.dumps(parameters)
    tensors = [typed(name, value) for name, value in {"text_input": text, **inputs}.items()]
    return oip.ModelInferRequest(model_name="tiny", id="mine", inputs=tensors)


def values(response: oip.ModelInferResponse) -> dict[str, Any]:
    """Outputs by name, unpacked from their raw form."""
    found: dict[str, Any] = {}
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        assert list(tensor.shape) == [1], tensor.name
        assert tensor.datatype == OUTPUTS[tensor.name]
        if tensor.datatype == "BYTES":
            assert struct.unpack_from("<I", raw) == (len(raw) - 4,)
            found[tensor.name] = raw[4:].decode()
        else:
            (found[tensor.name],) = struct.unpack({"UINT32": "<I", "FP32": "<f"}[tensor.datatype], raw)
    return found


def speaking(*ids: int, pause_s: float = 0.005, ends_with_last: bool = False) -> FakePool:
    """These tokens one by one, then the end: a moment later, or together with the last."""
    tasks: list[asyncio.Task[None]] = []

    async def speak(run: FakeRun) -> None:
        wants = run.request.sampling.num_logprobs is not None
        for index, token_id in enumerate(ids):
            logprobs = [TokenLogprobs(-0.25, (token_id, 9), (-0.25, -2.0))] if wants else None
            run.tokens([token_id], logprobs)
            if not (ends_with_last and index == len(ids) - 1):
                await asyncio.sleep(pause_s)
        run.finish(WireFinishReason.LENGTH)

    return FakePool(on_run=lambda run: tasks.append(asyncio.create_task(speak(run))))


async def stream(served: Any, *requests: Any, metadata: Any = None) -> list[oip.ModelStreamInferResponse]:
    async def send() -> AsyncIterator[Any]:
        for each in requests:
            yield each

    return [answer async for answer in stub_of(served).ModelStreamInfer(send(), metadata=metadata)]


@pytest.fixture
def ids(tiny_text: ModelText) -> Callable[[str], list[int]]:
    return lambda text: tiny_text.encode(text, max_bytes=1000).ids_T.tolist()


# ---------------------------------------------------------------- one response


async def test_one_response_holds_the_prompt_and_the_whole_output(serve: Any, ids: Any) -> None:
    async with serve(speaking(*ids("world"))) as served:
        response = await stub_of(served).ModelInfer(request("Hello "))
        (run,) = served.pool.runs
    assert values(response) == {"text_output": "Hello world"}
    assert (response.model_name, response.model_version, response.id) == ("tiny", "1", "mine")
    assert run.request.prompt_ids.tolist() == ids("Hello ")


async def test_unset_parameters_are_neutral_and_sixteen_tokens(serve: Any, ids: Any) -> None:
    async with serve(speaking(*ids("x"))) as served:
        await stub_of(served).ModelInfer(request(parameters={"seed": 7, "temperature": None}))
        (run,) = served.pool.runs
    assert run.request.sampling == Sampling(temperature=1.0, top_p=1.0, top_k=0, seed=7, max_tokens=16)


async def test_every_served_parameter_reaches_the_worker(serve: Any, ids: Any) -> None:
    parameters = {
        "temperature": 0.5, "top_p": 0.25, "top_k": -1, "min_p": 0.125, "seed": -5, "repetition_penalty": 1.5,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "max_tokens": 9, "min_tokens": 2, "stop": "zzz",
        "stop_token_ids": [44], "ignore_eos": True, "skip_special_tokens": False, "logprobs": 2, "n": 1,
    }  # fmt: skip
    async with serve(speaking(*ids("x"))) as served:
        await stub_of(served).ModelInfer(request(parameters=parameters))
        (run,) = served.pool.runs
    assert run.request.sampling == Sampling(
        temperature=0.5, top_p=0.25, min_p=0.125, seed=2**64 - 5, repetition_penalty=1.5, presence_penalty=0.5,
        frequency_penalty=-0.5, max_tokens=9, min_tokens=2, stop_token_ids=(44,), ignore_eos=True, num_logprobs=2,
    )  # fmt: skip


async def test_parameters_of_the_request_count_where_the_tensor_is_silent(serve: Any, ids: Any) -> None:
    asked = request(parameters={"temperature": 0})
    asked.parameters["max_tokens"].int64_param = 5
    asked.parameters["top_p"].double_param = 0.5
    async with serve(speaking(*ids("x"))) as served:
        await stub_of(served).ModelInfer(asked)
        (run,) = served.pool.runs
    sampling = run.request.sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.top_p) == (0, 5, 0.5)


async def test_raw_inputs_mean_what_typed_ones_mean(serve: Any, ids: Any) -> None:
    tensor = oip.ModelInferRequest.InferInputTensor
    raw = oip.ModelInferRequest(
        model_name="tiny",
        inputs=[
            tensor(name="text_input", datatype="BYTES", shape=[1]),
            tensor(name="exclude_input_in_output", datatype="BOOL", shape=[1]),
        ],
        raw_input_contents=[struct.pack("<I", 5) + b"Hello", b"\x01"],
    )
    async with serve(speaking(*ids("world"))) as served:
        assert values(await stub_of(served).ModelInfer(raw)) == {"text_output": "world"}
        assert served.pool.runs[0].request.prompt_ids.tolist() == ids("Hello")


async def test_further_outputs_come_where_asked_for(serve: Any, ids: Any) -> None:
    world = ids("world")
    asked = request(
        "Hello", {"max_tokens": 4}, return_finish_reason=True, return_logprobs=True, return_num_input_tokens=False
    )
    asked.outputs.add(name="num_output_tokens")
    asked.outputs.add(name="num_input_tokens")
    asked.outputs.add(name="cumulative_logprob")
    async with serve(speaking(*world)) as served:
        got = values(await stub_of(served).ModelInfer(asked))
    logprobs = json.loads(got.pop("logprobs"))
    assert got == {
        "num_output_tokens": len(world),
        "num_input_tokens": len(ids("Hello")),
        "cumulative_logprob": -0.25 * len(world),
        "finish_reason": "length",
    }
    assert [list(position) for position in logprobs] == [[str(each), "9"] for each in world]
    assert logprobs[0]["9"]["rank"] == 2


async def test_a_stop_string_ends_the_output(serve: Any, ids: Any) -> None:
    async with serve(speaking(*ids("one two three"))) as served:
        asked = request("a", {"stop": ["two"]}, return_finish_reason=True, exclude_input_in_output=True)
        assert values(await stub_of(served).ModelInfer(asked)) == {"text_output": "one ", "finish_reason": "stop"}


async def test_several_outputs_are_elements_of_each_tensor(serve: Any, ids: Any) -> None:
    def speak(run: FakeRun) -> None:
        run.tokens(ids("world" if run.handle == 1 else "Hello"))
        run.finish(WireFinishReason.STOP if run.handle == 2 else WireFinishReason.LENGTH)

    asked = request("> ", {"n": 2}, return_finish_reason=True, return_num_input_tokens=True)
    async with serve(FakePool(on_run=speak)) as served:
        response = await stub_of(served).ModelInfer(asked)
        refusal = await stream(served, request(parameters={"n": 2}, stream=True))
        assert served.gateway.meters.of_model("tiny").finished == {"length": 1, "stop": 1}
    raw = dict(zip([tensor.name for tensor in response.outputs], response.raw_output_contents, strict=True))
    assert [list(tensor.shape) for tensor in response.outputs] == [[2], [2], [1]]
    assert raw["text_output"] == struct.pack("<I", 7) + b"> world" + struct.pack("<I", 7) + b"> Hello"
    assert raw["finish_reason"] == struct.pack("<I", 6) + b"length" + struct.pack("<I", 4) + b"stop"
    assert "sampling_parameters.n: must be 1 for a stream" in refusal[0].error_message


# ---------------------------------------------------------------- streams


@pytest.mark.parametrize("ends_with_last", [False, True])
async def test_a_stream_gives_pieces_and_marks_the_last(serve: Any, ids: Any, ends_with_last: bool) -> None:
    async with serve(speaking(*ids("Hello world"), ends_with_last=ends_with_last)) as served:
        answers = await stream(served, request(stream=True, return_finish_reason=True))
    got = [values(answer.infer_response) for answer in answers]
    finals = [answer.infer_response.parameters["triton_final_response"].bool_param for answer in answers]
    assert "".join(each["text_output"] for each in got) == "Hello world"
    assert finals == [False] * (len(answers) - 1) + [True]
    assert [each["finish_reason"] for each in got] == ["None"] * (len(answers) - 1) + ["length"]
    assert got[-1]["text_output"] == (got[-1]["text_output"] if ends_with_last else "")
    assert {answer.infer_response.id for answer in answers} == {"mine"}


async def test_an_empty_final_response_comes_where_asked_for(serve: Any, ids: Any) -> None:
    asked = request(stream=True)
    asked.parameters["triton_enable_empty_final_response"].bool_param = True
    async with serve(speaking(*ids("Hello"))) as served:
        *_, last = await stream(served, asked)
    assert last.infer_response.parameters["triton_final_response"].bool_param
    assert len(last.infer_response.outputs) == 0


async def test_requests_of_one_stream_are_answered_side_by_side_and_fail_alone(serve: Any, ids: Any) -> None:
    first, second, third = request(stream=True), request(), request(parameters={"temperature": -1})
    first.id, second.id, third.id = "1", "1", "3"  # ids are the caller's business
    async with serve(speaking(*ids("Hello world"))) as served:
        answers = await stream(served, first, third, second)
        await served.until(lambda: served.gateway.desk.admission.counts().num_entered == 0)
    errors = [answer for answer in answers if answer.error_message]
    assert [(each.infer_response.id, each.error_message) for each in errors] == [
        ("3", "[INVALID_ARGUMENT] INVALID_FIELD: sampling_parameters.temperature: must be in [0, 100], not -1")
    ]
    texts = [values(answer.infer_response)["text_output"] for answer in answers if not answer.error_message]
    assert "HelloHello world" in texts
    assert "".join(text for text in texts if text != "HelloHello world") == "Hello world"


async def test_a_status_instead_of_a_message_where_asked_for(serve: Any) -> None:
    async with serve() as served:

        async def send() -> AsyncIterator[Any]:
            yield request(parameters={"top_p": 2})

        call = stub_of(served).ModelStreamInfer(send(), metadata=(("triton_grpc_error", "true"),))
        refusal = await refused(call)
    assert (refusal.code, refusal.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ("sampling_parameters.top_p",))


async def test_a_caller_that_leaves_frees_all_requests_of_its_stream(serve: Any) -> None:
    async with serve(FakePool()) as served:

        async def send() -> AsyncIterator[Any]:
            yield request(stream=True)
            yield request(stream=True)
            await asyncio.Event().wait()

        call = stub_of(served).ModelStreamInfer(send())
        reading = asyncio.ensure_future(call.read())
        await served.until(lambda: len(served.pool.runs) == 2)
        call.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await served.until(lambda: sorted(served.pool.cancelled) == [1, 2])
        await served.until(lambda: served.gateway.desk.admission.counts().num_entered == 0)


async def test_a_lost_worker_is_an_error_of_its_request(serve: Any) -> None:
    async with serve(FakePool(on_run=lambda run: run.lose("WORKER_LOST", "worker w0 died"))) as served:
        (answer,) = await stream(served, request(stream=True))
        refusal = await refused(stub_of(served).ModelInfer(request()))
    assert answer.error_message == "[UNAVAILABLE] WORKER_LOST: worker w0 died"
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "WORKER_LOST")


async def test_a_timeout_in_microseconds_ends_a_request(serve: Any) -> None:
    asked = request()
    asked.parameters["timeout"].int64_param = 20_000_000
    async with serve(FakePool(on_run=lambda run: run.finish())) as served:
        await stub_of(served).ModelInfer(asked)
        (run,) = served.pool.runs
    assert 15 < run.request.timeout_s < 20


# ---------------------------------------------------------------- refusals


def tensor(name: str, datatype: str = "BYTES", shape: tuple[int, ...] = (1,), **fields: Any) -> Any:
    return oip.ModelInferRequest(
        model_name="tiny",
        inputs=[oip.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=shape, **fields)],
    )


def with_output(**fields: Any) -> Any:
    asked = request()
    asked.outputs.add(**fields)
    return asked


def with_parameter(name: str, **value: Any) -> Any:
    asked = request(parameters={"max_tokens": 4})
    asked.parameters[name].CopyFrom(oip.InferParameter(**value))
    return asked


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (oip.ModelInferRequest(model_name="tiny"), "inputs.text_input"),
        (request(image="x"), "inputs.image"),
        (request(""), "inputs.text_input"),
        (tensor("text_input", "FP32"), "inputs.text_input.datatype"),
        (tensor("text_input", shape=(2,)), "inputs.text_input.shape"),
        (tensor("text_input"), "inputs.text_input.contents"),
        (
            tensor("text_input", parameters={"shared_memory_region": oip.InferParameter(string_param="r")}),
            "inputs.text_input.parameters.shared_memory_region",
        ),
        (request(stream=True), "inputs.stream"),
        (request(parameters={"best_of": 2}), "sampling_parameters.best_of"),
        (request(parameters={"use_beam_search": True}), "sampling_parameters.use_beam_search"),
        (request(parameters={"temperature": "hot"}), "sampling_parameters.temperature"),
        (request(parameters={"max_tokens": 1.5}), "sampling_parameters.max_tokens"),
        (request(parameters={"top_k": -2}), "sampling_parameters.top_k"),
        (request(parameters={"stop": 7}), "sampling_parameters.stop"),
        (request(parameters={"stop": [""]}), "sampling_parameters.stop[0]"),
        (request(parameters={"ignore_eos": 1}), "sampling_parameters.ignore_eos"),
        (request(parameters={"structured_outputs": {"structural_tag": "x"}}), "sampling_parameters.structured_outputs"),
        (request(parameters={"structured_outputs": {}}), "sampling_parameters.structured_outputs"),
        (request(sampling_parameters="{"), "inputs.sampling_parameters"),
        (request(sampling_parameters="[]"), "inputs.sampling_parameters"),
        (request(sampling_parameters="[" * 100_000), "inputs.sampling_parameters"),
        (with_output(name="embedding"), "outputs.embedding"),
        (
            with_output(name="text_output", parameters={"classification": oip.InferParameter(int64_param=1)}),
            "outputs.text_output.parameters.classification",
        ),
        (with_parameter("max_tokens", int64_param=3), "parameters.max_tokens"),
        (with_parameter("sequence_id", int64_param=3), "sampling_parameters.sequence_id"),
        (with_parameter("priority", uint64_param=3), "sampling_parameters.priority"),
        (with_parameter("timeout", int64_param=-3), "parameters.timeout"),
        (with_parameter("top_p"), "parameters.top_p"),
    ],
)
async def test_what_is_not_served_is_refused_under_the_callers_name(serve: Any, asked: Any, field: str) -> None:
    async with serve() as served:
        refusal = await refused(stub_of(served).ModelInfer(asked))
    assert (refusal.code, refusal.reason, refusal.fields) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_FIELD",
        (field,),
    )


@pytest.mark.parametrize("raw", [b"", b"\x05\0\0\0Hell", b"\x05\0\0\0Hello!", b"\xff\xff\xff\xff"])
async def test_raw_contents_that_are_no_single_element_are_refused(serve: Any, raw: bytes) -> None:
    asked = tensor("text_input")
    asked.raw_input_contents.append(raw)
    async with serve() as served:
        assert (await refused(stub_of(served).ModelInfer(asked))).fields == ("inputs.text_input",)
        asked.raw_input_contents.append(b"")
        assert (await refused(stub_of(served).ModelInfer(asked))).fields == ("raw_input_contents",)


async def test_a_stream_never_begins_with_its_prompt(serve: Any) -> None:
    async with serve() as served:
        (answer,) = await stream(served, request(stream=True, exclude_input_in_output=False))
    assert "inputs.exclude_input_in_output" in answer.error_message


@pytest.mark.parametrize(("name", "version"), [("other", ""), ("tiny", "2")])
async def test_unknown_models_and_versions_are_not_found(serve: Any, name: str, version: str) -> None:
    asked = request()
    asked.model_name, asked.model_version = name, version
    async with serve() as served:
        stub = stub_of(served)
        calls = [stub.ModelInfer(asked), stub.ModelMetadata(oip.ModelMetadataRequest(name=name, version=version))]
        calls.append(stub.ModelConfig(oip.ModelConfigRequest(name=name, version=version)))
        assert [(await refused(call)).code for call in calls] == [grpc.StatusCode.NOT_FOUND] * 3
        ready = await stub.ModelReady(oip.ModelReadyRequest(name=name, version=version))
    assert not ready.ready


async def test_a_full_worker_is_exhausted_and_can_be_retried(serve: Any) -> None:
    async with serve(FakePool(refuse=[busy()])) as served:
        refusal = await refused(stub_of(served).ModelInfer(request()))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert refusal.pushback_ms is not None


# ---------------------------------------------------------------- server and models


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
