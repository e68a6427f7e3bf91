"""The service behind the front: channels to its gateways, and calls made with the caller's own key."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count

import grpc

from octavo.client.aio import AsyncTextStream
from octavo.client.errors import OctavoError, error_from
from octavo.client.events import AsyncStreamCall, OutputSoFar
from octavo.client.options import open_aio_channel, service_config
from octavo.gateway.front.errors import ApiError, word_of
from octavo.v1 import inference_pb2, inference_pb2_grpc, model_pb2, model_pb2_grpc

EMBED_BATCH = 256  # inputs that one Embed call takes
# RESOURCE_EXHAUSTED is left to the callers to retry, who are told when: a tenant's limit may ask for a wait of minutes.
_CHANNEL_OPTIONS = (("grpc.service_config", service_config("UNAVAILABLE")),)
OUTPUTS_AT_ONCE = 512  # of one body; by default a worker runs 256 and queues 1,024
Metadata = tuple[tuple[str, str], ...] | None
Room = asyncio.Semaphore | None
"""Limits how many requests of one body run at once; None: no limit, for a single request."""


def room_for(num_outputs: int) -> Room:
    """The limit for the requests of one body, each with this many outputs."""
    return asyncio.Semaphore(max(1, OUTPUTS_AT_ONCE // num_outputs))


@contextmanager
def refusing(given: Collection[str]) -> Iterator[None]:
    """Turns the TypeError or ValueError of a value that no request can hold into an ApiError that names the field.
    given: names of the fields that the caller set."""
    try:
        yield
    except (TypeError, ValueError) as error:
        field, _, why = str(error).partition(": ")
        param = word_of(field, given)
        raise ApiError(400, f"the request cannot be made: {param}: {why}", param=param) from None


class _InTurn:
    """An AsyncStreamCall that begins once the body's other calls leave room for it."""

    def __init__(self, room: asyncio.Semaphore, begin: Callable[[], AsyncStreamCall]) -> None:
        self._room = room
        self._begin = begin
        self._call: AsyncStreamCall | None = None

    def cancel(self) -> bool:
        """Cancel the call if it has begun; a call that has not begun is never awaited afterwards."""
        return self._call is not None and self._call.cancel()

    async def __aiter__(self) -> AsyncIterator[inference_pb2.GenerateResponse]:
        async with self._room:
            self._call = self._begin()
            async for response in self._call:
                yield response


class _WithoutTokens:
    """An AsyncStreamCall of a request for no tokens. The service generates at least one, which is left out."""

    def __init__(
        self, call: AsyncStreamCall, num_outputs: int, echo: Callable[[inference_pb2.Started], Awaitable[str]] | None
    ) -> None:
        """echo: gives the text of every output; None: outputs have no text."""
        self._call = call
        self._num_outputs = num_outputs
        self._echo = echo

    def cancel(self) -> bool:
        """Cancel the call."""
        return self._call.cancel()

    async def __aiter__(self) -> AsyncIterator[inference_pb2.GenerateResponse]:
        started = None
        async for response in self._call:
            if response.HasField("started"):
                started = response.started
                yield response
                continue
            if started is not None and self._echo is not None:  # at the first token, when other outputs begin too
                text, started = await self._echo(started), None
                for index in range(self._num_outputs):
                    yield inference_pb2.GenerateResponse(delta=inference_pb2.Delta(output_index=index, text=text))
            if response.HasField("finished"):
                response.finished.reason = inference_pb2.FINISH_REASON_LENGTH
                response.finished.usage.completion_tokens = 0
                yield response
            elif scores := response.delta.prompt_logprobs:
                yield inference_pb2.GenerateResponse(delta=inference_pb2.Delta(prompt_logprobs=scores))


class Service:
    """Channels to all gateways, used in turn. Create and close it on the same event loop."""

    def __init__(self, targets: Sequence[str], credentials: grpc.ChannelCredentials | None = None) -> None:
        self._channels = [open_aio_channel(target, credentials, _CHANNEL_OPTIONS) for target in targets]
        self._turns = count()

    def _gateway(self) -> grpc.aio.Channel:
        """The channel whose turn it is, or the next one after it that is connected; if none is, the former."""
        turn = next(self._turns) % len(self._channels)
        in_order = self._channels[turn:] + self._channels[:turn]
        ready = (each for each in in_order if each.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY)
        return next(ready, in_order[0])

    async def close(self) -> None:
        """Close all channels; calls in flight end."""
        await asyncio.gather(*(channel.close() for channel in self._channels))

    def stream(self, request: inference_pb2.GenerateRequest, metadata: Metadata, room: Room = None) -> AsyncTextStream:
        """Start a request, once `room` allows it."""
        return AsyncTextStream(self._generate(request, metadata, room), num_outputs=request.num_outputs or 1)

    def prompt_alone(
        self, request: inference_pb2.GenerateRequest, metadata: Metadata, room: Room = None
    ) -> AsyncTextStream:
        """Start a request for no tokens: its outputs contain the prompt, if it asks for the echo, and nothing else.
        Changes `request`."""
        output, is_text = request.output, request.HasField("text")
        has_echo, output.echo, output.return_prompt, request.stop.max_tokens = output.echo, False, True, 1
        is_visible = output.skip_special_tokens if output.HasField("skip_special_tokens") else True

        async def echo(started: inference_pb2.Started) -> str:
            if is_text:
                return started.prompt_text
            ids, model = started.prompt_token_ids, started.model
            return await self.text_of(ids, model, metadata, skip_special_tokens=is_visible)

        num_outputs = request.num_outputs or 1
        alone = _WithoutTokens(self._generate(request, metadata, room), num_outputs, echo if has_echo else None)
        return AsyncTextStream(alone, num_outputs=num_outputs)

    def _generate(self, request: inference_pb2.GenerateRequest, metadata: Metadata, room: Room) -> AsyncStreamCall:
        def begin() -> AsyncStreamCall:
            stub = inference_pb2_grpc.InferenceServiceStub(self._gateway())
            call: AsyncStreamCall = stub.Generate(request, metadata=metadata)
            return call

        return begin() if room is None else _InTurn(room, begin)

    async def models(self, metadata: Metadata) -> list[model_pb2.ModelInfo]:
        """The models that are served. Raises OctavoError."""
        stub = model_pb2_grpc.ModelServiceStub(self._gateway())
        try:
            answer = await stub.ListModels(model_pb2.ListModelsRequest(), metadata=metadata, timeout=10.0)
        except grpc.RpcError as error:
            raise error_from(error) from None
        return list(answer.models)

    async def text_of(
        self, token_ids: Sequence[int], model: str, metadata: Metadata, *, skip_special_tokens: bool = False
    ) -> str:
        """The text of these token ids, decoded on their own. Raises OctavoError."""
        request = inference_pb2.DetokenizeRequest(
            model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
        )
        stub = inference_pb2_grpc.InferenceServiceStub(self._gateway())
        try:
            answer: inference_pb2.DetokenizeResponse = await stub.Detokenize(request, metadata=metadata, timeout=10.0)
        except grpc.RpcError as error:
            raise error_from(error) from None
        return answer.text

    async def embed(
        self, requests: Sequence[inference_pb2.EmbedRequest], metadata: Metadata
    ) -> list[inference_pb2.EmbedResponse]:
        """The answers, in order. Raises OctavoError, whose field paths number the inputs of all requests together."""
        stub = inference_pb2_grpc.InferenceServiceStub(self._gateway())
        answers, num_inputs = list[inference_pb2.EmbedResponse](), 0
        for request in requests:
            try:
                answers.append(await stub.Embed(request, metadata=metadata))
            except grpc.RpcError as error:
                raise _renamed(error_from(error), partial(_counted_behind, num_inputs)) from None
            num_inputs += len(request.inputs)
        return answers


def _renamed(error: OctavoError, path_of: Callable[[str], str]) -> OctavoError:
    """The error, changed to name other fields."""
    error.message = path_of(error.message)
    error.violations = tuple(replace(each, field=path_of(each.field)) for each in error.violations)
    return error


def _counted_behind(num_inputs: int, path: str) -> str:
    """The path, where the request's inputs come after `num_inputs` others."""
    return re.sub(r"^inputs\[(\d+)\]", lambda found: f"inputs[{int(found[1]) + num_inputs}]", path)


def of_one_input(error: OctavoError) -> OctavoError:
    """The error for a request whose caller gave a single input, not a list."""
    return _renamed(error, lambda path: re.sub(r"^inputs\[0\](\.?)", lambda found: "" if found[1] else "inputs", path))


def of_one_stop(error: OctavoError) -> OctavoError:
    """The error for a request whose caller gave a single stop string, not a list."""
    return _renamed(error, lambda path: re.sub(r"^stop\.strings\[0\]", "stop.strings", path))


async def collect(stream: AsyncTextStream) -> list[OutputSoFar]:
    """All outputs, complete. Raises OctavoError. Ends the request if it is cancelled."""
    async with stream:
        async for _ in stream.deltas():
            pass
    return stream.outputs
