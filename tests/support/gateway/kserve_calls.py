"""Requests of GRPCInferenceService, readers for their answers, and a worker that answers them."""

import asyncio
import json
import struct
from collections.abc import AsyncIterator
from typing import Any

from octavo.gateway.dialects.kserve.model import OUTPUTS
from octavo.kserve import inference_pb2 as oip
from octavo.kserve import inference_pb2_grpc
from octavo.wire.messages import TokenLogprobs, WireFinishReason
from tests.support.gateway.fake_pool import FakePool, FakeRun


def stub_of(served: Any) -> Any:
    return inference_pb2_grpc.GRPCInferenceServiceStub(served.channel)


def typed(name: str, value: str | bool) -> oip.ModelInferRequest.InferInputTensor:
    if isinstance(value, bool):
        contents, datatype = oip.InferTensorContents(bool_contents=[value]), "BOOL"
    else:
        contents, datatype = oip.InferTensorContents(bytes_contents=[value.encode()]), "BYTES"
    return oip.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=[1], contents=contents)


def request(text: str = "Hello", parameters: dict[str, Any] | None = None, **inputs: str | bool) -> Any:
    """A request with typed contents; parameters become sampling_parameters."""
    if parameters is not None:
        inputs["sampling_parameters"] = json.dumps(parameters)
    tensors = [typed(name, value) for name, value in {"text_input": text, **inputs}.items()]
    return oip.ModelInferRequest(model_name="tiny", id="mine", inputs=tensors)


def values(response: oip.ModelInferResponse) -> dict[str, Any]:
    """The outputs by name, unpacked from their raw contents."""
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
    """A pool that sends these tokens one by one, then the end: a moment later, or together with the last token."""
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
