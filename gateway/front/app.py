"""The HTTP application: routes, keys, streams that end when their callers disconnect, errors as JSON objects."""

import asyncio
import base64
import json
import math
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.client.aio import AsyncTextStream
from octavo.client.embeddings import EmbedFields, embed_request
from octavo.client.errors import OctavoError, Overloaded, Unavailable
from octavo.client.options import call_metadata
from octavo.client.requests import generate_request
from octavo.gateway.front.calls import (
    EMBED_BATCH,
    Metadata,
    Service,
    collect,
    of_one_input,
    of_one_stop,
    refusing,
    room_for,
)
from octavo.gateway.front.chat import Envelope, chat_chunks, whole_chat
from octavo.gateway.front.completions import (
    EchoedPrompt,
    collect_all,
    completion_chunks,
    first_token,
    gather_all,
    whole_completion,
)
from octavo.gateway.front.errors import ApiError, api_error
from octavo.gateway.front.fields import B, ChatBody, CompletionBody, EmbeddingBody, GenerateBody, inputs_of, parse
from octavo.v1 import inference_pb2, model_pb2

log = structlog.get_logger(__name__)
T = TypeVar("T")
Chunks = AsyncIterator[dict[str, Any]]
_BROWSERS = {b"origin", b"sec-fetch-site"}
_CLOSED = 499  # the caller has disconnected, so nobody reads this status
RETRY_AFTER_S = 1.0  # if the service does not say
BODY_TIMEOUT_S = 60.0
MAX_KEY_LEN = 4096  # more would exceed a gateway's metadata limit, and no gateway has such a key
MAX_SPAN_LEN = 512  # the length of `tracestate` that W3C Trace Context asks for; longer ones are dropped


def make_app(targets: Sequence[str], *, max_body_bytes: int) -> Starlette:
    """The application in front of a service's gateways."""
    front = _Front(max_body_bytes)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        front.service = Service(targets)
        try:
            yield
        finally:
            await front.service.close()

    routes = [
        Route("/v1/chat/completions", front.chat, methods=["POST"]),
        Route("/v1/completions", front.completions, methods=["POST"]),
        Route("/v1/embeddings", front.embeddings, methods=["POST"]),
        Route("/v1/models", front.models, methods=["GET"]),
        Route("/v1/models/{name:path}", front.model, methods=["GET"]),
        Route("/health", front.health, methods=["GET"]),
    ]
    handlers: dict[Any, Callable[[Request, Exception], Response]] = {
        ApiError: _on_error,
        OctavoError: _on_error,
        HTTPException: _on_http_error,
        ClientDisconnect: lambda request, error: Response(status_code=_CLOSED),
        Exception: _on_defect,
    }
    app = Starlette(
        routes=routes, exception_handlers=handlers, lifespan=lifespan, middleware=[Middleware(_ProgramsOnly)]
    )
    app.router.redirect_slashes = False  # an unknown path gets an error object, not a redirect
    return app


class _ProgramsOnly:
    """Refuses requests that a browser sends. Otherwise any page that a user visits could call a service on loopback
    and, by DNS rebinding, even read its answers. Pages can let their server ask."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _BROWSERS & {name for name, _ in scope["headers"]}:
            told = ApiError(403, "pages of browsers are not answered: let their server ask", type="permission_error")
            await JSONResponse(told.body(), status_code=told.status)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class _Front:
    """The handlers. service: set while the application runs."""

    def __init__(self, max_body_bytes: int) -> None:
        self.service: Service
        self._max_body_bytes = max_body_bytes

    async def chat(self, request: Request) -> Response:
        """Continues a conversation."""
        body = await self._parsed(ChatBody, request)
        fields, envelope = body.fields(), _envelope("chatcmpl", body.model)
        with refusing(request.state.given):
            wanted = generate_request(**{**fields, "request_id": envelope.id})
        stream = self.service.stream(wanted, _metadata(request))
        has_logprobs = bool(body.logprobs)
        if body.stream:
            chunks = chat_chunks(envelope, stream, has_logprobs=has_logprobs, has_usage=_has_usage(body))
            return await _streamed(request, envelope, chunks, [stream])
        outputs = await _unless_gone(request, collect(stream))
        return _whole(whole_chat(envelope.answered_by(stream), outputs, has_logprobs=has_logprobs))

    async def completions(self, request: Request) -> Response:
        """Continues one or several prompts."""
        body = await self._parsed(CompletionBody, request)
        given, envelope = body.fields(), _envelope("cmpl", body.model)
        if not given:
            raise ApiError(400, "prompt: there is none", param="prompt")
        metadata = _metadata(request)
        ids = [envelope.id, *(f"{envelope.id}-{number}" for number in range(1, len(given)))]
        request.state.prompts = ids if len(ids) > 1 else ()
        with refusing(request.state.given):
            wanted = [
                generate_request(**{**fields, "request_id": each}) for fields, each in zip(given, ids, strict=True)
            ]
        begin = self.service.prompt_alone if body.max_tokens == 0 else self.service.stream
        room = room_for(body.n or 1)
        streams = [begin(each, metadata, room) for each in wanted]
        has_logprobs = body.logprobs is not None
        has_special = body.skip_special_tokens is False
        echoed = None
        if body.echo and has_logprobs:
            in_prompt = has_special or "text" in given[0]  # a text is echoed unchanged
            echoed = partial(self._echoed, metadata=metadata, has_special=in_prompt)
        if body.stream:
            chunks = completion_chunks(
                envelope,
                streams,
                has_logprobs=has_logprobs,
                has_special=has_special,
                has_usage=_has_usage(body),
                echoed=echoed,
            )
            return await _streamed(request, envelope, chunks, streams)
        outputs = await _unless_gone(request, collect_all(streams))
        prompts = await gather_all(map(echoed, streams)) if echoed else [None] * len(streams)
        answered = envelope.answered_by(streams[0])
        whole = whole_completion(answered, outputs, prompts, has_logprobs=has_logprobs, has_special=has_special)
        return _whole(whole)

    async def _echoed(self, stream: AsyncTextStream, metadata: Metadata, *, has_special: bool) -> EchoedPrompt:
        """The prompt of a stream; to be called once all its log-probabilities have arrived. Raises OctavoError."""
        assert stream.started is not None
        ids, model = stream.started.prompt_token_ids[:1], stream.started.model
        alone = await self.service.text_of(ids, model, metadata)
        first = first_token(alone, stream.outputs[0].text, stream.prompt_logprobs)
        if not has_special:
            first.is_special = not await self.service.text_of(ids, model, metadata, skip_special_tokens=True)
        return EchoedPrompt(first=first, positions=stream.prompt_logprobs, has_special=has_special)

    async def embeddings(self, request: Request) -> Response:
        """One vector for each input."""
        body = await self._parsed(EmbeddingBody, request)
        inputs = inputs_of(body.input)
        if not inputs:
            raise ApiError(400, "input: there is none", param="input")
        names = ("truncate_prompt_tokens", "priority", "cache_salt")
        fields = EmbedFields(**body.model_dump(exclude_none=True, include=set(names)))  # type: ignore[typeddict-item]
        if body.model:
            fields["model"] = body.model
        batches = [inputs[start : start + EMBED_BATCH] for start in range(0, len(inputs), EMBED_BATCH)]
        with refusing(request.state.given):
            requests = [embed_request(batch, **fields) for batch in batches]
        try:
            answers = await _unless_gone(request, self.service.embed(requests, _metadata(request)))
        except OctavoError as error:
            raise of_one_input(error) if inputs[0] is body.input else error from None
        return JSONResponse(_embeddings(body, answers))

    async def models(self, request: Request) -> Response:
        """The models that are served."""
        found = await self.service.models(_metadata(request))
        return JSONResponse({"object": "list", "data": [_model(each) for each in found]})

    async def model(self, request: Request) -> Response:
        """One model. Raises ApiError (404) if it is not served."""
        name = request.path_params["name"]
        for each in await self.service.models(_metadata(request)):
            if each.name == name:
                return JSONResponse(_model(each))
        raise ApiError(404, f"the model {name!r} does not exist", param="model", code="model_not_found")

    async def health(self, request: Request) -> Response:
        """For probes: shows only that this process answers."""
        return PlainTextResponse("ok\n")

    async def _parsed(self, kind: type[B], request: Request) -> B:
        """The parsed body. Keeps the names of the fields that are set, so that errors use the caller's names. Raises
        ApiError."""
        body = parse(kind, await self._body(request))
        request.state.given = frozenset(body.model_fields_set)
        request.state.has_one_stop = isinstance(body, GenerateBody) and isinstance(body.stop, str)
        return body

    async def _body(self, request: Request) -> bytes:
        # The server has refused what is no number. Whoever sends slowly, or not at all, need not be waited for.
        self._check_length(int(request.headers.get("content-length", 0)))
        pieces, num_bytes = [], 0
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for piece in request.stream():
                    num_bytes += len(piece)
                    self._check_length(num_bytes)
                    pieces.append(piece)
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {BODY_TIMEOUT_S:g} s", type="timeout_error") from None
        return b"".join(pieces)

    def _check_length(self, num_bytes: int) -> None:
        if num_bytes > self._max_body_bytes:
            raise ApiError(413, f"the body has more than {self._max_body_bytes:,} bytes")


def _envelope(prefix: str, model: str) -> Envelope:
    return Envelope(id=f"{prefix}-{uuid4().hex}", created=int(time.time()), model=model)


def _metadata(request: Request) -> Metadata:
    """The caller's key, by either of the headers that gateways know, and trace context as gRPC metadata; None if there
    are neither. Raises ApiError (401) for a key that cannot be sent."""
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    key = key.strip() if kind.lower() == "bearer" else request.headers.get("x-api-key", "").strip()
    if len(key) > MAX_KEY_LEN:
        why = f"an API key has at most {MAX_KEY_LEN:,} characters"
        raise ApiError(401, why, type="authentication_error", code="invalid_api_key")
    given = ((name, request.headers.get(name, "")) for name in ("traceparent", "tracestate"))
    spans = tuple((name, value) for name, value in given if 0 < len(value) <= MAX_SPAN_LEN and _is_plain(value))
    try:
        return (call_metadata(key) or ()) + spans or None
    except ValueError as error:
        raise ApiError(401, str(error), type="authentication_error", code="invalid_api_key") from None


def _is_plain(value: str) -> bool:
    return value.isascii() and value.isprintable()


def _has_usage(body: ChatBody | CompletionBody) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def _whole(answer: dict[str, Any]) -> Response:
    return JSONResponse(answer, headers={"x-request-id": answer["id"]})


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of the work. If the caller disconnects first, the work is cancelled, which frees its memory at the
    next step, and ClientDisconnect is raised."""

    async def hang_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(hang_up())
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _streamed(
    request: Request, envelope: Envelope, chunks: Chunks, streams: Sequence[AsyncTextStream]
) -> Response:
    """The chunks as server-sent events. A request refused before its first token gets an error status, not a stream."""
    try:
        begun = await _unless_gone(request, _first(chunks))
    except BaseException:
        for stream in streams:
            stream.cancel()
        raise

    async def events() -> AsyncIterator[bytes]:
        try:
            async with aclosing(chunks):  # type: ignore[type-var]
                if begun is not None:
                    yield _event(begun)
                async for chunk in chunks:
                    yield _event(chunk)
        except OctavoError as error:
            yield _event(_told(request, error).body())
        except Exception as error:
            yield _event(_defect(request, error).body())
        finally:
            for stream in streams:
                stream.cancel()
        # Sent after an error as well, as vLLM does: clients that read lines wait for it. Events have no name: some
        # clients, one for Go among them, recognise an error only by its `data:`.
        yield b"data: [DONE]\n\n"

    headers = {"x-request-id": envelope.id, "cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(events(), media_type="text/event-stream", headers=headers)


async def _first(chunks: Chunks) -> dict[str, Any] | None:
    return await anext(chunks, None)


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _embeddings(body: EmbeddingBody, answers: Sequence[inference_pb2.EmbedResponse]) -> dict[str, Any]:
    vectors = [vector for answer in answers for vector in answer.embeddings]
    size = len(vectors[0].values)
    if body.dimensions not in (None, size):
        why = f"dimensions: vectors of this model have {size}, and are not made shorter"
        raise ApiError(400, why, param="dimensions")
    num_tokens = sum(vector.usage.prompt_tokens for vector in vectors)
    is_base64 = body.encoding_format == "base64"
    return {
        "object": "list",
        "model": answers[0].model,
        "data": [
            {"object": "embedding", "index": index, "embedding": _base64(vector) if is_base64 else list(vector.values)}
            for index, vector in enumerate(vectors)
        ],
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def _base64(vector: inference_pb2.Embedding) -> str:
    """The vector as base64 of little-endian float32."""
    return base64.b64encode(struct.pack(f"<{len(vector.values)}f", *vector.values)).decode()


def _model(info: model_pb2.ModelInfo) -> dict[str, Any]:
    return {"id": info.name, "object": "model", "created": 0, "owned_by": "octavo", "max_model_len": info.max_model_len}


def _told(request: Request, error: OctavoError) -> ApiError:
    """The error with the caller's names of fields."""
    if getattr(request.state, "has_one_stop", False):
        error = of_one_stop(error)
    prompts = getattr(request.state, "prompts", ())
    number = prompts.index(error.request_id) if error.request_id in prompts else None
    return api_error(error, getattr(request.state, "given", ()), number)


def _on_error(request: Request, error: Exception) -> Response:
    told = _told(request, error) if isinstance(error, OctavoError) else error
    assert isinstance(told, ApiError)
    headers: dict[str, str] = {"www-authenticate": "Bearer"} if told.status == 401 else {}
    if isinstance(error, OctavoError):
        # OpenAI's clients retry after 409, 429 and 5xx unless x-should-retry says otherwise.
        is_for_later = isinstance(error, Overloaded | Unavailable)
        wait_s = math.ceil(error.retry_after_s or RETRY_AFTER_S)
        headers |= {"retry-after": str(wait_s)} if is_for_later else {"x-should-retry": "false"}
        headers |= {"x-request-id": error.request_id} if error.request_id else {}
    return JSONResponse(told.body(), status_code=told.status, headers=headers)


def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = {404: f"there is no {request.url.path} here", 405: f"{request.method} is not for {request.url.path}"}
    told = ApiError(error.status_code, what.get(error.status_code, error.detail))
    return JSONResponse(told.body(), status_code=told.status, headers=error.headers)


def _on_defect(request: Request, error: Exception) -> Response:
    told = _defect(request, error)
    return JSONResponse(told.body(), status_code=told.status)


def _defect(request: Request, error: Exception) -> ApiError:
    log.error("defect", path=request.url.path, exc_info=error)
    return ApiError(500, "something broke in the server", type="server_error", code="internal_error")
