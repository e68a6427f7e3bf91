"""What GRPCInferenceService does not serve is refused under the name that its caller knows."""

import contextlib
from typing import Any

import grpc
import pytest

from octavo.gateway.dialects.kserve.request import translate
from octavo.gateway.errors import InvalidRequest
from octavo.kserve import inference_pb2 as oip
from tests.support.gateway.fake_pool import FakePool, busy
from tests.support.gateway.kserve_calls import request, stream, stub_of
from tests.support.gateway.rpc_errors import refused


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
        (request(parameters={"max_tokens": "1.5"}), "sampling_parameters.max_tokens"),
        (request(parameters={"temperature": "nan"}), "sampling_parameters.temperature"),
        (request(parameters={"logit_bias": {"5": "much"}}), "sampling_parameters.logit_bias"),
        (request(parameters={"top_k": -2}), "sampling_parameters.top_k"),
        (request(parameters={"stop": 7}), "sampling_parameters.stop"),
        (request(parameters={"stop": [""]}), "sampling_parameters.stop[0]"),
        (request(parameters={"stop": ""}), "sampling_parameters.stop"),
        (request(parameters={"allowed_token_ids": []}), "sampling_parameters.allowed_token_ids"),
        (request(parameters={"ignore_eos": 1}), "sampling_parameters.ignore_eos"),
        (request(parameters={"structured_outputs": {"structural_tag": "x"}}), "sampling_parameters.structured_outputs"),
        (request(parameters={"structured_outputs": {}}), "sampling_parameters.structured_outputs"),
        (request(parameters={"structured_outputs": {"json": "{"}}), "sampling_parameters.structured_outputs.json"),
        (
            request(parameters={"structured_outputs": {"grammar": "x"}}),
            "sampling_parameters.structured_outputs.grammar",
        ),
        (request(parameters={"guided_decoding": {"choice": [""]}}), "sampling_parameters.structured_outputs.choice[0]"),
        (request(parameters={"seed": 2**64}), "sampling_parameters.seed"),
        (request(parameters={"\ud800": 1}), "sampling_parameters.\\ud800"),
        (request(parameters={"structured_outputs": {"\udfff": 1}}), "sampling_parameters.structured_outputs"),
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
        (
            with_parameter("triton_enable_empty_final_response", string_param="false"),
            "parameters.triton_enable_empty_final_response",
        ),
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


@pytest.mark.parametrize(
    ("place", "path"),
    [
        ((), "#99"),
        (("inputs", 0), "inputs[0].#99"),
        (("inputs", 0, "contents"), "inputs[0].contents.#99"),
        (("outputs", 0), "outputs[0].#99"),
    ],
)
def test_fields_that_the_contract_does_not_have_are_refused_at_every_depth(
    place: tuple[str | int, ...], path: str
) -> None:
    message = asked = with_output(name="text_output")
    for each in place:
        message = message[each] if isinstance(each, int) else getattr(message, each)
    message.MergeFromString(b"\x98\x06\x01")  # number 99
    with pytest.raises(InvalidRequest) as caught:
        translate(asked)
    assert [each.field for each in caught.value.violations] == [path]


def test_json_that_can_be_read_and_not_be_written_is_the_callers_fault() -> None:
    """At each depth around that at which one of both gives up."""
    for depth in range(900, 1000):
        text = '{"structured_outputs": {"json": ' + "[" * depth + "]" * depth + "}}"
        with contextlib.suppress(InvalidRequest):
            translate(request(sampling_parameters=text))


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


async def test_more_outputs_than_a_worker_can_hold_are_refused_by_the_callers_name(serve: Any) -> None:
    async with serve() as served:
        refusal = await refused(stub_of(served).ModelInfer(request(parameters={"n": 9})))
    assert refusal.reason == "EXCEEDS_CAPACITY"
    assert refusal.message == "sampling_parameters.n: 9 are more than the 8 that a worker runs and queues"
