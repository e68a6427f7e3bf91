"""The blocking client: one object per server, safe to share between threads."""

from collections.abc import Callable, Generator, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
from google.protobuf.message import Message

from octavo.client.embeddings import EmbedFields, EmbedInput, embed_request
from octavo.client.events import StreamCall, TextSoFar
from octavo.client.field_values import made
from octavo.client.lifetime import Lifetime
from octavo.client.options import call_metadata, call_timeout, open_channel
from octavo.client.requests import GenerateFields, request_of
from octavo.v1 import inference_pb2, inference_pb2_grpc, load_pb2, load_pb2_grpc, model_pb2, model_pb2_grpc


class TextStream(TextSoFar[StreamCall]):
    """The output of a request as it arrives: iterate over it for text, or over `deltas()` for everything.

    `started` is set before the first item, `finished` (finish reason, usage, receipt) after the last. If the request
    has several outputs, iterate over `pieces()`; `outputs` holds what has arrived of each so far. Leaving the `with`
    block, or calling `cancel()`, ends the request on the server.
    """

    def __init__(self, call: StreamCall, *, num_outputs: int = 1, lifetime: Lifetime | None = None) -> None:
        """lifetime: that of the client that made the call."""
        super().__init__(call, num_outputs=num_outputs)
        self._lifetime = lifetime or Lifetime()

    def deltas(self) -> Iterator[inference_pb2.Delta]:
        """Yields each new piece of output. Raises OctavoError if the call fails."""
        with self._lifetime.reading():
            for response in self._call:
                delta = self._events.take(response)
                if delta is not None:
                    yield delta
        self._events.end()

    def pieces(self) -> Iterator[tuple[int, str]]:
        """Yields (output index, next piece of its text). Raises OctavoError if the call fails."""
        return ((delta.output_index, delta.text) for delta in self.deltas() if delta.text)

    def __iter__(self) -> Iterator[str]:
        self._events.check_single()
        return (delta.text for delta in self.deltas() if delta.text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.cancel()


class Client:
    """Calls one Octavo server.

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
        self._lifetime = Lifetime()
        self._metadata = call_metadata(api_key)
        self._channel = open_channel(target, credentials, options)
        self._inference = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._models = model_pb2_grpc.ModelServiceStub(self._channel)
        self._load = load_pb2_grpc.LoadServiceStub(self._channel)

    def stream(
        self,
        request: inference_pb2.GenerateRequest | None = None,
        *,
        timeout_s: float | None = None,
        **fields: Unpack[GenerateFields],
    ) -> TextStream:
        """Stream a generation: `for text in client.stream(text="Once upon a time", max_tokens=50)`.

        Takes a request or its fields (`GenerateFields`), not both.
        """
        request = request_of(request, fields)
        call = self._call(self._inference.Generate, request, timeout_s)
        return TextStream(call, num_outputs=request.num_outputs or 1, lifetime=self._lifetime)

    def complete(
        self,
        request: inference_pb2.GenerateRequest | None = None,
        *,
        timeout_s: float | None = None,
        **fields: Unpack[GenerateFields],
    ) -> inference_pb2.CompleteResponse:
        """Generate, and return the whole answer in one message. Takes a request or its fields, as `stream` does."""
        wrapped = inference_pb2.CompleteRequest(generate=request_of(request, fields))
        answer: inference_pb2.CompleteResponse = self._call(self._inference.Complete, wrapped, timeout_s)
        return answer

    def embed(
        self,
        inputs: Sequence[EmbedInput],
        *,
        timeout_s: float | None = None,
        **fields: Unpack[EmbedFields],
    ) -> inference_pb2.EmbedResponse:
        """One vector per input: `[each.values for each in client.embed(["a", "b"]).embeddings]`."""
        request = embed_request(inputs, **fields)
        answer: inference_pb2.EmbedResponse = self._call(self._inference.Embed, request, timeout_s)
        return answer

    def cancel(self, request_id: str, *, timeout_s: float | None = 10.0) -> inference_pb2.CancelResponse:
        """End one of the caller's own requests, whichever connection it was made on.

        `found` of the result says whether it was in flight. If `num_unreachable_gateways` is not 0, the request may
        still be running on one of those: cancel again.
        """
        request = made(inference_pb2.CancelRequest(), request_id=request_id)
        answer: inference_pb2.CancelResponse = self._call(self._inference.Cancel, request, timeout_s)
        return answer

    def models(self, *, timeout_s: float | None = 10.0) -> list[model_pb2.ModelInfo]:
        """The models that are served, with their request limits."""
        return list(self._call(self._models.ListModels, model_pb2.ListModelsRequest(), timeout_s).models)

    def watch_load(
        self,
        *,
        interval_s: float | None = None,
        max_requests: int = 0,
        max_block_cells: int = 0,
        timeout_s: float | None = None,
    ) -> Generator[load_pb2.WatchLoadResponse, None, None]:
        """Yields snapshots of what the service is doing: `for snapshot in client.watch_load(max_requests=50)`.

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
        call = self._call(self._load.WatchLoad, request, timeout_s)
        try:
            with self._lifetime.reading():
                yield from call
        finally:
            call.cancel()

    def tokenize(self, text: str, *, model: str = "", timeout_s: float | None = 10.0) -> list[int]:
        """The token ids of a text."""
        request = made(inference_pb2.TokenizeRequest(), model=model, text=text)
        return list(self._call(self._inference.Tokenize, request, timeout_s).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, model: str = "", timeout_s: float | None = 10.0) -> str:
        """The text of token ids."""
        request = made(inference_pb2.DetokenizeRequest(), model=model, token_ids=token_ids)
        answer: inference_pb2.DetokenizeResponse = self._call(self._inference.Detokenize, request, timeout_s)
        return answer.text

    def _call(self, method: Callable[..., Any], request: Message, timeout_s: float | None) -> Any:
        with self._lifetime.calling():
            return method(request, timeout=call_timeout(timeout_s), metadata=self._metadata)

    def close(self) -> None:
        """Close the connection. Running calls raise Cancelled, later ones ClientUnusable. Idempotent."""
        self._lifetime.is_closed = True
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
