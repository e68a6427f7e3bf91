"""Tensors of the Open Inference Protocol: one-element inputs to Python values, outputs to their wire form.

Must not know what the tensors mean.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.gateway.errors import InvalidRequest
from octavo.kserve import inference_pb2 as oip

Input = oip.ModelInferRequest.InferInputTensor
_CONTENTS = {"BYTES": "bytes_contents", "BOOL": "bool_contents"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A one-dimensional output. datatype: BYTES (values are str), BOOL, UINT32 or FP32."""

    name: str
    datatype: str
    values: Sequence[Any]


def scalar_inputs(request: oip.ModelInferRequest, datatypes: dict[str, str]) -> dict[str, bytes | bool]:
    """The value of every input, by name; each has one element. datatypes: known name -> datatype. Raises
    InvalidRequest."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise InvalidRequest.of("raw_input_contents", f"has {len(raw)} entries for {len(request.inputs)} inputs")
    values: dict[str, bytes | bool] = {}
    for index, tensor in enumerate(request.inputs):
        path = f"inputs[{index}]" if len(tensor.name) > 64 or not tensor.name.isprintable() else f"inputs.{tensor.name}"
        if tensor.name in values:
            raise InvalidRequest.of(path, "is given twice")
        _check(tensor, datatypes.get(tensor.name), path)
        values[tensor.name] = _raw(tensor, raw[index], path) if raw else _typed(tensor, path)
    return values


def _check(tensor: Input, datatype: str | None, path: str) -> None:
    if datatype is None:
        raise InvalidRequest.of(path, "is not supported")
    if tensor.datatype != datatype:
        raise InvalidRequest.of(f"{path}.datatype", f"must be {datatype}")
    if any(size != 1 for size in tensor.shape):
        raise InvalidRequest.of(f"{path}.shape", "must be [1]: one request is one prompt")
    for name in tensor.parameters:
        raise InvalidRequest.of(f"{path}.parameters.{name[:64]}", "is not supported")


def _typed(tensor: Input, path: str) -> bytes | bool:
    contents = getattr(tensor.contents, _CONTENTS[tensor.datatype])
    if len(contents) != 1 or len(tensor.contents.ListFields()) != 1:
        raise InvalidRequest.of(f"{path}.contents", f"must have one element, in {_CONTENTS[tensor.datatype]}")
    return contents[0]  # type: ignore[no-any-return]


def _raw(tensor: Input, data: bytes, path: str) -> bytes | bool:
    if tensor.HasField("contents"):
        raise InvalidRequest.of(f"{path}.contents", "must be unset beside raw_input_contents")
    if tensor.datatype == "BOOL":
        if len(data) != 1 or data[0] > 1:
            raise InvalidRequest.of(path, "must be one byte, 0 or 1")
        return bool(data[0])
    if len(data) < 4 or struct.unpack_from("<I", data)[0] != len(data) - 4:
        raise InvalidRequest.of(path, "must be one element: its length as a little-endian uint32, and so many bytes")
    return data[4:]


def add_outputs(response: oip.ModelInferResponse, tensors: Sequence[Tensor]) -> None:
    """Append the tensors to the response, with raw contents as Triton sends them."""
    for tensor in tensors:
        response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=[len(tensor.values)])
        response.raw_output_contents.append(_packed(tensor))


def _packed(tensor: Tensor) -> bytes:
    match tensor.datatype:
        case "BYTES":
            elements = [each.encode() for each in tensor.values]
            return b"".join(struct.pack("<I", len(each)) + each for each in elements)
        case "UINT32":
            return struct.pack(f"<{len(tensor.values)}I", *tensor.values)
        case "FP32":
            return struct.pack(f"<{len(tensor.values)}f", *tensor.values)
        case "BOOL":
            return bytes(tensor.values)
    raise ValueError(tensor.datatype)
