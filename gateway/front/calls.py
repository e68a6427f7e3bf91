"""The service behind: its gateways, and calls of one caller with the caller's own key."""

import asyncio
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle

import grpc

from octavo.client.aio import AsyncTextStream
from octavo.client.errors import OctavoError, error_from
from octavo.client.events import OutputSoFar
from octavo.client.options import open_aio_channel
from octavo.gateway.front.errors import ApiError, word_of
from octavo.v1 import inference_pb2, inference_pb2_grpc, model_pb2, model_pb2_grpc

EMBED_BATCH = 256  # inputs that one call takes
Metadata = tuple[tuple[str, str], ...] | None


@contextmanager
def refusing(given: Collection[str]) -> Iterator[None]:
    """Makes what no request can hold an ApiError that names the field. given: names of those that the caller set."""
    try:
        yield
    except (TypeError, ValueError) as error:
        field, _, why = str(error).partition(": ")
        param = word_of(field, given)
        raise ApiError(400, f"the request cannot be made: {param}: {why}", param=param) from None


class Service:
    """Channels to every gateway, taken in turns. Make and close it on one event loop."""

    def __init__(self, targets: Sequence[str], credentials: grpc.ChannelCredentials | None = None) -> None:
        self._channels = [open_aio_channel(target, credentials) for target in targets]
        self._turns = cycle(self._channels)

    async def close(self) -> None:
        """What is in flight ends."""
        await asyncio.gather(*(channel.close() for channel in self._channels))

    def stream(self, request: inference_pb2.GenerateRequest, metadata: Metadata) -> AsyncTextStream:
        """A request that begins."""
        call = inference_pb2_grpc.InferenceServiceStub(next(self._turns)).Generate(request, metadata=metadata)
        return AsyncTextStream(call, num_outputs=request.num_outputs or 1)

    async def models(self, metadata: Metadata) -> list[model_pb2.ModelInfo]:
        """What is served. Raises OctavoError."""
        stub = model_pb2_grpc.ModelServiceStub(next(self._turns))
        try:
            answer = await stub.ListModels(model_pb2.ListModelsRequest(), metadata=metadata, timeout=10.0)
        except grpc.RpcError as error:
            raise error_from(error) from None
        return list(answer.models)

    async def text_of(
        self, token_ids: Sequence[int], model: str, metadata: Metadata, *, skip_special_tokens: bool = False
    ) -> str:
        """Where they decode alone. Raises OctavoError."""
        request = inference_pb2.DetokenizeRequest(
            model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
        )
        stub = inference_pb2_grpc.InferenceServiceStub(next(self._turns))
        try:
            answer: inference_pb2.DetokenizeResponse = await stub.Detokenize(request, metadata=metadata, timeout=10.0)
        except grpc.RpcError as error:
            raise error_from(error) from None
        return answer.text

    async def embed(
        self, requests: Sequence[inference_pb2.EmbedRequest], metadata: Metadata
    ) -> list[inference_pb2.EmbedResponse]:
        """The answers, in order. Raises OctavoError, whose fields count the inputs of all requests together."""
        stub = inference_pb2_grpc.InferenceServiceStub(next(self._turns))
        answers, num_inputs = list[inference_pb2.EmbedResponse](), 0
        for request in requests:
            try:
                answers.append(await stub.Embed(request, metadata=metadata))
            except grpc.RpcError as error:
                raise _counted_behind(num_inputs, error_from(error)) from None
            num_inputs += len(request.inputs)
        return answers


def _counted_behind(num_inputs: int, error: OctavoError) -> OctavoError:
    """The same error of a request whose inputs come behind so many others."""

    def moved(path: str) -> str:
        return re.sub(r"^inputs\[(\d+)\]", lambda found: f"inputs[{int(found[1]) + num_inputs}]", path)

    error.message = moved(error.message)
    error.violations = tuple(replace(each, field=moved(each.field)) for each in error.violations)
    return error


async def collect(stream: AsyncTextStream) -> list[OutputSoFar]:
    """All outputs, whole. Raises OctavoError; ends the request where its caller leaves."""
    async with stream:
        async for _ in stream.deltas():
            pass
    return stream.outputs
