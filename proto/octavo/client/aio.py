"""The client for asyncio: one object per server and event loop."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
from google.protobuf.message import Message

from octavo.client.embeddings import EmbedFields, EmbedInput, embed_request
from octavo.client.errors import OctavoError
from octavo.client.events import AsyncStreamCall, TextSoFar
from octavo.client.field_values import made
from octavo.client.lifetime import LoopLifetime, needs_loop
from octavo.client.options import call_metadata, call_timeout, open_aio_channel
from octavo.client.requests import GenerateFields, request_of
from octavo.v1 import inference_pb2, inference_pb2_grpc, load_pb2, load_pb2_grpc, model_pb2, model_pb2_grpc


class AsyncTextStream(TextSoFar[AsyncStreamCall]):
    """The output of a request as it arrives: iterate over it for text, or over `deltas()` for everything.

    `started` is set before the first item, `finished` (finish reason, usage, receipt) after the last. If the request
    has several outputs, iterate over `pieces()`; `outputs` holds what has arrived of each so far. Leaving the
    `async with` block, or calling `cancel()`, ends the request on the server.
    """

    def __init__(self, call: AsyncStreamCall, *, num_outputs: int = 1, lifetime: LoopLifetime | None = None) -> None:
        """lifetime: that of the client that made the call."""
        super().__init__(call, num_outputs=num_outputs)
        self._lifetime = lifetime or LoopLifetime()
        self._error: OctavoError | None = None

    async def deltas(self) -> AsyncIterator[inference_pb2.Delta]:
        """Yields each new piece of output. Raises OctavoError if the call fails."""
        if self._error is not None:
            raise self._error
        try:
            with self._lifetime.reading():
                async for response in self._call:
                    delta = self._events.take(response)
                    if delta is not None:
                        yield delta
        except OctavoError as error:
            self._error = error  # the call raises it only once
            raise
        self._events.end()

    async def pieces(self) -> AsyncIterator[tuple[int, str]]:
        """Yields (output index, next piece of its text). Raises OctavoError if the call fails."""
        async for delta in self.deltas():
            if delta.text:
                yield delta.output_index, delta.text

    def __aiter__(self) -> AsyncIterator[str]:
        self._events.check_single()
        return (delta.text async for delta in self.deltas() if delta.text)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.cancel()


class AsyncClient:
    """Calls one Octavo server. Create it inside the event loop that uses it.

    target: "host:port", any gRPC target, or comma-separated gateway addresses, called in turn. credentials: for TLS
    (see `tls_credentials`); None: plain text, which exposes an api_key on the network. options: gRPC channel options.
    timeout_s of a call is its deadline, which the server enforces too; None: no limit. A call that fails raises
    OctavoError.
    """

    def __init__(
        self,
        target: str = "127.0.0.1:50051",
        *,
        credentials: grpc.ChannelCredentials | None = None,
        api_key: str | None = None,
        options: Sequence[tuple[str, str | int]] = (),
    ) -> None:
        self.target = target
        self._lifetime = LoopLifetime()
        self._metadata = call_metadata(api_key)
        try:
            self._channel = open_aio_channel(target, credentials, options)
        except RuntimeError:  # there is no event loop
            raise needs_loop() from None
        self._inference = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._models = model_pb2_grpc.ModelServiceStub(self._channel)
        self._load = load_pb2_grpc.LoadServiceStub(self._channel)

    def stream(
        self,
        request: inference_pb2.GenerateRequest | None = None,
        *,
        timeout_s: float | None = None,
        **fields: Unpack[GenerateFields],
    ) -> AsyncTextStream:
        """Stream a generation: `async for text in client.stream(text="Once upon a time", max_tokens=50)`.

        Takes a request or its fields (`GenerateFields`), not both.
        """
        request = request_of(request, fields)
        call = self._begin(self._inference.Generate, request, timeout_s)
        return AsyncTextStream(call, num_outputs=request.num_outputs or 1, lifetime=self._lifetime)

    async def complete(
        self,
        request: inference_pb2.GenerateRequest | None = None,
        *,
        timeout_s: float | None = None,
        **fields: Unpack[GenerateFields],
    ) -> inference_pb2.CompleteResponse:
        """Generate, and return the whole answer in one message. Takes a request or its fields, as `stream` does."""
        wrapped = inference_pb2.CompleteRequest(generate=request_of(request, fields))
        answer: inference_pb2.CompleteResponse = await self._call(self._inference.Complete, wrapped, timeout_s)
        return answer

    async def embed(
        self,
        inputs: Sequence[EmbedInput],
        *,
        timeout_s: float | None = None,
        **fields: Unpack[EmbedFields],
    ) -> inference_pb2.EmbedResponse:
        """One vector per input: `[each.values for each in (await client.embed(["a", "b"])).embeddings]`."""
        request = embed_request(inputs, **fields)
        answer: inference_pb2.EmbedResponse = await self._call(self._inference.Embed, request, timeout_s)
        return answer

    async def cancel(self, request_id: str, *, timeout_s: float | None = 10.0) -> inference_pb2.CancelResponse:
        """End one of the caller's own requests, whichever connection it was made on.

        `found` of the result says whether it was in flight. If `num_unreachable_gateways` is not 0, the request may
        still be running on one of those: cancel again.
        """
        request = made(inference_pb2.CancelRequest(), request_id=request_id)
        answer: inference_pb2.CancelResponse = await self._call(self._inference.Cancel, request, timeout_s)
        return answer

    async def models(self, *, timeout_s: float | None = 10.0) -> list[model_pb2.ModelInfo]:
        """The models that are served, with their request limits."""
        return list((await self._call(self._models.ListModels, model_pb2.ListModelsRequest(), timeout_s)).models)

    async def watch_load(
        self,
        *,
        interval_s: float | None = None,
        max_requests: int = 0,
        max_block_cells: int = 0,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[load_pb2.WatchLoadResponse, None]:
        """Yields snapshots of what the service is doing: `async for snapshot in client.watch_load(max_requests=50)`.

        The first snapshot comes at once, then the newest every interval_s seconds (None: the server's default of one
        second). Closing the generator ends the call. max_requests: how many requests in flight to list at most.
        max_block_cells: size limit of each worker's block map, in cells; 0: no map. If the service uses API keys, this
        call needs one with the scope `admin`. Raises OctavoError; Unavailable if the service drains.
        """
        request = made(
            load_pb2.WatchLoadRequest(),
            interval_s=interval_s,
            max_requests=max_requests,
            max_block_cells=max_block_cells,
        )
        call = self._begin(self._load.WatchLoad, request, timeout_s)
        try:
            with self._lifetime.reading():
                async for snapshot in call:
                    yield snapshot
        finally:
            call.cancel()

    async def tokenize(self, text: str, *, model: str = "", timeout_s: float | None = 10.0) -> list[int]:
        """The token ids of a text."""
        request = made(inference_pb2.TokenizeRequest(), model=model, text=text)
        return list((await self._call(self._inference.Tokenize, request, timeout_s)).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "", timeout_s: float | None = 10.0) -> str:
        """The text of token ids."""
        request = made(inference_pb2.DetokenizeRequest(), model=model, token_ids=token_ids)
        answer: inference_pb2.DetokenizeResponse = await self._call(self._inference.Detokenize, request, timeout_s)
        return answer.text

    def _begin(self, method: Callable[..., Any], request: Message, timeout_s: float | None) -> Any:
        with self._lifetime.calling():
            return method(request, timeout=call_timeout(timeout_s), metadata=self._metadata)

    async def _call(self, method: Callable[..., Any], request: Message, timeout_s: float | None) -> Any:
        call = self._begin(method, request, timeout_s)
        with self._lifetime.calling():
            return await call

    async def close(self) -> None:
        """Close the connection. Running calls raise Cancelled, later ones ClientUnusable. Idempotent."""
        self._lifetime.is_closed = True
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()
