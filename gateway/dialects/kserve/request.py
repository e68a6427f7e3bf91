"""Translates a ModelInferRequest into the equivalent octavo.v1 request and what its responses must contain. Pure.

As in Triton's vLLM backend, `text_input` is the prompt, and `sampling_parameters` is a JSON object with the names of
vLLM's SamplingParams; these names may be among the request's own parameters instead.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.gateway.dialects.kserve.model import (
    EXCLUDE_INPUT,
    INPUTS,
    MODEL_VERSION,
    OUTPUTS,
    SAMPLING,
    STREAM,
    TEXT_INPUT,
    TEXT_OUTPUT,
)
from octavo.gateway.dialects.kserve.sampling import apply_sampling, in_vllm_names
from octavo.gateway.dialects.kserve.tensors import scalar_inputs
from octavo.gateway.dialects.unserved import unserved
from octavo.gateway.errors import InvalidRequest, ModelNotFound, NamesFields
from octavo.gateway.validation.fields import raise_if_any
from octavo.gateway.validation.generate import check_generate
from octavo.kserve import inference_pb2 as oip
from octavo.v1 import inference_pb2 as pb

EMPTY_FINAL = "triton_enable_empty_final_response"
_TIMEOUT = "timeout"  # Triton's, in microseconds
_MICROSECONDS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslatedRequest:
    """A translated request. generate: checked. prefix_text: the prompt if the output begins with it, else empty.
    outputs: tensor names, in order. caller_id: the id that the responses carry. wants_empty_final: the last response
    may have no tensors."""

    generate: pb.GenerateRequest
    streams: bool
    prefix_text: str
    outputs: tuple[str, ...]
    model: str
    caller_id: str
    wants_empty_final: bool
    timeout_s: float | None


def translate(request: oip.ModelInferRequest) -> TranslatedRequest:
    """Translate and check a request. Raises InvalidRequest that names the caller's tensors and parameters,
    ModelNotFound for an unknown version."""
    check_version(request.model_version)
    raise_if_any(unserved(request, {}))
    if not (request.id.isascii() and request.id.isprintable()):
        raise InvalidRequest.of("id", "must be printable ASCII")
    inputs = scalar_inputs(request, INPUTS)
    parameters = {name: _value_of(name, each) for name, each in request.parameters.items()}
    wants_empty_final = parameters.pop(EMPTY_FINAL, False)
    if not isinstance(wants_empty_final, bool):
        raise InvalidRequest.of(f"parameters.{EMPTY_FINAL}", "must be true or false")
    timeout_s = _timeout_s(parameters.pop(_TIMEOUT, None))
    outputs = _outputs(request, inputs)
    prompt = _text(inputs, TEXT_INPUT)
    streams = bool(inputs.get(STREAM, False))
    generate = _generate(request.model_name, prompt, _sampling(inputs, parameters), outputs)
    if streams and generate.num_outputs > 1:
        raise InvalidRequest.of(f"{SAMPLING}.n", "must be 1 for a stream")
    return TranslatedRequest(
        generate=generate,
        streams=streams,
        prefix_text="" if _excludes_input(inputs, streams) else prompt,
        outputs=outputs,
        model=request.model_name,
        caller_id=request.id,
        wants_empty_final=wants_empty_final,
        timeout_s=timeout_s,
    )


def check_version(version: str) -> None:
    """Raises ModelNotFound unless it is the only version, or empty."""
    if version not in ("", MODEL_VERSION):
        raise ModelNotFound(f"models here have only version {MODEL_VERSION}")


def in_callers_names(error: NamesFields) -> NamesFields:
    """The error with the field paths of this dialect."""
    return error.with_paths(_path)


def _path(path: str) -> str:
    if path in ("text", "input"):
        return f"inputs.{TEXT_INPUT}"
    if path in ("timeout_s", "model"):
        return {"timeout_s": f"parameters.{_TIMEOUT}", "model": "model_name"}[path]
    return f"{SAMPLING}.{in_vllm_names(path)}"


def _generate(model: str, prompt: str, values: Mapping[str, Any], outputs: tuple[str, ...]) -> pb.GenerateRequest:
    generate = pb.GenerateRequest(model=model, text=prompt)
    apply_sampling(generate, values, prefix=f"{SAMPLING}.")
    generate.output.format = pb.OUTPUT_FORMAT_TEXT
    wants_logprobs = "cumulative_logprob" in outputs or "logprobs" in outputs
    if wants_logprobs and not generate.output.HasField("logprobs"):
        generate.output.logprobs = 0
    try:
        check_generate(generate)
    except InvalidRequest as error:
        if isinstance(values.get("stop"), str):  # not given as a list
            error = error.with_paths(lambda path: "stop.strings" if path == "stop.strings[0]" else path)
        raise in_callers_names(error) from None
    return generate


def _text(inputs: Mapping[str, bytes | bool], name: str) -> str:
    value = inputs.get(name)
    if not isinstance(value, bytes):
        raise InvalidRequest.of(f"inputs.{name}", "must be given")
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise InvalidRequest.of(f"inputs.{name}", "is not UTF-8") from None


def _sampling(inputs: Mapping[str, bytes | bool], parameters: dict[str, Any]) -> dict[str, Any]:
    if SAMPLING not in inputs:
        return parameters
    try:
        values = json.loads(_text(inputs, SAMPLING) or "{}")
    except (ValueError, RecursionError):
        raise InvalidRequest.of(f"inputs.{SAMPLING}", "is no JSON") from None
    if not isinstance(values, dict):
        raise InvalidRequest.of(f"inputs.{SAMPLING}", "must be a JSON object")
    for name in parameters.keys() & values.keys():
        if parameters[name] != values[name]:
            raise InvalidRequest.of(f"parameters.{name[:64]}", f"is another in inputs.{SAMPLING}")
    return parameters | values


def _excludes_input(inputs: Mapping[str, bytes | bool], streams: bool) -> bool:
    """Whether the output leaves out the prompt. If unset, a stream excludes it and a single response begins with it, as
    in Triton's backend."""
    excludes = inputs.get(EXCLUDE_INPUT, streams)
    if streams and not excludes:
        raise InvalidRequest.of(f"inputs.{EXCLUDE_INPUT}", "must not be false for a stream")
    return bool(excludes)


def _outputs(request: oip.ModelInferRequest, inputs: Mapping[str, bytes | bool]) -> tuple[str, ...]:
    """The output names: those that are named, else the text; and those that `return_…` inputs ask for."""
    named = list(dict.fromkeys(each.name for each in request.outputs))
    for each in request.outputs:
        if each.name not in OUTPUTS:
            raise InvalidRequest.of(f"outputs.{each.name[:64]}", "is no output of this model")
        for parameter in each.parameters:
            raise InvalidRequest.of(f"outputs.{each.name}.parameters.{parameter[:64]}", "is not supported")
    asked = [name.removeprefix("return_") for name, value in inputs.items() if name.startswith("return_") and value]
    return tuple(dict.fromkeys([*(named or [TEXT_OUTPUT]), *asked]))


def _value_of(name: str, parameter: oip.InferParameter) -> Any:
    kind = parameter.WhichOneof("parameter_choice")
    if kind is None:
        raise InvalidRequest.of(f"parameters.{name[:64]}", "has no value")
    return getattr(parameter, kind)


def _timeout_s(value: Any) -> float | None:
    if value is None or value == 0:  # Triton's "none" is 0
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidRequest.of(f"parameters.{_TIMEOUT}", "must be a number of microseconds")
    return value / _MICROSECONDS
