"""GRPCInferenceService: one response or a stream of them, and information about the server and its models."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import grpc
import structlog

from octavo.gateway.dialects.kserve import model
from octavo.gateway.dialects.kserve.messages import OutputDelta, Responses, end_of, failed, reason_of, streamed
from octavo.gateway.dialects.kserve.request import TranslatedRequest, check_version, in_callers_names, translate
from octavo.gateway.errors import InvalidRequest, NamesFields
from octavo.gateway.requests.input_processor import share_of
from octavo.gateway.requests.submit import Collaborators, Submitter
from octavo.gateway.requests.tracker import RequestTracker, TrackedRequest
from octavo.gateway.rpc.connections import Context
from octavo.gateway.rpc.interceptor import RpcScope, current_rpc
from octavo.gateway.rpc.status import is_expected, status_of
from octavo.gateway.streams.output_processor import Piece
from octavo.gateway.streams.stream import OutputStream, OutputStreams, StreamState
from octavo.kserve import inference_pb2 as oip
from octavo.kserve import inference_pb2_grpc
from octavo.wire.messages import ModelCard

log = structlog.get_logger("gateway.request")
MAX_SIDE_BY_SIDE = 256  # requests of one stream; the next is read once one of them has ended
_STATUS_HEADER = ("triton_grpc_error", "true")  # sent by Triton clients that want a status instead of a message


class StreamWriter:
    """Writes the answers of several requests to one stream, one message at a time. is_cut: a message was given up on
    its way, and the library takes no other behind it."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.is_cut = False
        self._turn = asyncio.Lock()

    async def write(self, message: oip.ModelStreamInferResponse) -> None:
        """Write a message; returns when the reader has room for more. Raises CancelledError if the reader is gone."""
        async with self._turn:
            try:
                await self.context.write(message)
            except asyncio.CancelledError:
                self.is_cut = True
                raise
            except (grpc.aio.InternalError, grpc.aio.UsageError):  # what gRPC raises if the RPC is over
                raise asyncio.CancelledError from None


Answer = Callable[[oip.ModelInferRequest, RpcScope, StreamWriter], Awaitable[None]]


class StreamOfRequests:
    """One ModelStreamInfer: many concurrent requests on one RPC, each with its own scope and end. Owns the tasks of its
    requests, which end with it."""

    def __init__(
        self, scope: RpcScope, context: Context, rpcs: Counter[tuple[str, str, str]], tracker: RequestTracker
    ) -> None:
        """rpcs: counts failed requests, by (method, code, reason)."""
        self._scope = scope
        self._rpcs = rpcs
        self._tracker = tracker
        self._writer = StreamWriter(context)
        self._wants_status = _STATUS_HEADER in tuple(context.invocation_metadata() or ())

    async def answer(self, requests: AsyncIterator[oip.ModelInferRequest], answer: Answer) -> None:
        """Answer requests until the caller has sent the last one and all are answered. Raises the error of a request
        only if the caller asked for statuses, or reads nothing any more."""
        room = asyncio.Semaphore(MAX_SIDE_BY_SIDE)
        try:
            async with asyncio.TaskGroup() as tasks:
                async for request in requests:
                    await room.acquire()
                    task = tasks.create_task(self._answer_one(request, answer))
                    task.add_done_callback(lambda _: room.release())
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _answer_one(self, request: oip.ModelInferRequest, answer: Answer) -> None:
        whole = self._scope
        scope = RpcScope(method=whole.method, caller=whole.caller, peer=whole.peer, model=whole.model)
        current_rpc.set(scope)
        try:
            await answer(request, scope, self._writer)
        except Exception as error:
            if self._wants_status or self._writer.is_cut:
                raise
            await self._tell(error, request, scope)
        finally:
            self._scope.tokens_delivered += scope.tokens_delivered

    async def _tell(self, error: Exception, request: oip.ModelInferRequest, scope: RpcScope) -> None:
        status = status_of(error, scope, pushback_ms=0)
        if not is_expected(error):
            log.error("defect", method=scope.method, request_id=scope.request_id, exc_info=error, **scope.log_fields)
        self._rpcs[(scope.method, status.code.name, status.reason)] += 1
        fields = {"code": status.code.name, "reason": status.reason} | scope.log_fields
        log.info("request_failed", request_id=scope.request_id, **fields)
        message = failed(request, f"[{status.code.name}] {status.reason}: {status.message}")
        await self._tracker.write(self._writer, message)


class KserveServicer(inference_pb2_grpc.GRPCInferenceServiceServicer):
    """One per gateway. Methods raise errors, which the interceptor turns into a status."""

    def __init__(self, collaborators: Collaborators, *, submitter: Submitter, is_ready: Callable[[], bool]) -> None:
        """is_ready: whether a request could be answered now."""
        self._tracker, self._pool, self._models = collaborators.tracker, collaborators.pool, collaborators.models
        self._text, self._rpcs = collaborators.text, collaborators.meters.rpcs
        self._submitter = submitter
        self._is_ready = is_ready

    # ------------------------------------------------------------ requests

    async def ModelInfer(self, request: oip.ModelInferRequest, context: Context) -> oip.ModelInferResponse:
        """The whole output in one response."""
        scope = current_rpc.get()
        asked = await self._translate(request)
        if asked.streams:
            raise InvalidRequest.of("inputs.stream", "must be false: streams are answered by ModelStreamInfer")
        tracked = await self._submit(asked, scope)
        with self._tracker.closing(tracked):
            return await self._whole(asked, tracked)

    async def ModelStreamInfer(self, request_iterator: AsyncIterator[oip.ModelInferRequest], context: Context) -> None:
        """Answers requests concurrently as they arrive; an error ends only its own request."""
        stream = StreamOfRequests(current_rpc.get(), context, self._rpcs, self._tracker)
        await context.send_initial_metadata(())  # so that a status can follow even if an answer is not read
        await stream.answer(request_iterator, self._answer)

    async def _answer(self, request: oip.ModelInferRequest, scope: RpcScope, writer: StreamWriter) -> None:
        scope.wire_timeout_s = writer.context.time_remaining()
        asked = await self._translate(request)
        tracked = await self._submit(asked, scope)
        with self._tracker.closing(tracked):
            await (self._stream if asked.streams else self._send_whole)(asked, tracked, writer)

    async def _translate(self, request: oip.ModelInferRequest) -> TranslatedRequest:
        share = share_of(current_rpc.get())
        return await self._text.run_by_size(lambda: translate(request), num_bytes=request.ByteSize(), share=share)

    async def _submit(self, asked: TranslatedRequest, scope: RpcScope) -> TrackedRequest:
        """Submit the request under an id of our own: Triton's clients use one id for several requests at a time."""
        scope.log_fields["caller_id"] = asked.caller_id[:128]
        limits = [each for each in (scope.wire_timeout_s, asked.timeout_s) if each is not None]
        try:
            return await self._submitter.submit(asked.generate, scope, prefix="", timeout_s=min(limits, default=None))
        except NamesFields as error:
            raise in_callers_names(error) from None

    def _responses(self, asked: TranslatedRequest, tracked: TrackedRequest) -> Responses:
        named = replace(asked, model=tracked.card.name)
        return Responses(named, tracked, self._models.text_of(tracked.card).table.all_bytes)

    async def _whole(self, asked: TranslatedRequest, tracked: TrackedRequest) -> oip.ModelInferResponse:
        source = OutputStreams(tracked.streams)
        wholes = [Piece(text=asked.prefix_text, token_ids=[], logprobs=[], num_tokens=0) for _ in tracked.streams]
        while (deltas := await source.next()) is not None:
            index, piece = deltas
            if piece is not None:
                _append(wholes[index], piece)
                tracked.count_piece(piece, time.monotonic(), index)
        tracked.scope.tokens_delivered = tracked.num_tokens
        ends = list(map(end_of, wholes, tracked.streams))
        for index, end in enumerate(ends):
            tracked.count_finished(end.reason, index)
        return self._responses(asked, tracked).next(ends)

    async def _send_whole(self, asked: TranslatedRequest, tracked: TrackedRequest, writer: StreamWriter) -> None:
        response = await self._whole(asked, tracked)
        await tracked.write(writer, streamed(response, is_final=True))

    async def _stream(self, asked: TranslatedRequest, tracked: TrackedRequest, writer: StreamWriter) -> None:
        """One response per piece. The last one is marked as final and has the finish reason; if the end becomes known
        only after the last piece, it gets a response of its own."""
        responses, has_ended = self._responses(asked, tracked), False
        async for piece, has_ended in _pieces(tracked.stream):
            now_s = time.monotonic()
            response = responses.next([end_of(piece, tracked.stream) if has_ended else OutputDelta(piece)])
            await tracked.write(writer, streamed(response, is_final=has_ended))
            tracked.scope.tokens_delivered += piece.num_tokens
            tracked.count_piece(piece, now_s)
        if not has_ended:
            end = end_of(Piece(text="", token_ids=[], logprobs=[], num_tokens=0), tracked.stream)
            await tracked.write(writer, streamed(responses.last(end), is_final=True))
        tracked.count_finished(reason_of(tracked.stream))

    # ------------------------------------------------------------ server and models

    async def ServerLive(self, request: oip.ServerLiveRequest, context: Context) -> oip.ServerLiveResponse:
        """Always live: this process answers."""
        return oip.ServerLiveResponse(live=True)

    async def ServerReady(self, request: oip.ServerReadyRequest, context: Context) -> oip.ServerReadyResponse:
        """Whether a request could be answered now."""
        return oip.ServerReadyResponse(ready=self._is_ready())

    async def ModelReady(self, request: oip.ModelReadyRequest, context: Context) -> oip.ModelReadyResponse:
        """Unknown models and versions are not ready."""
        card = self._pool.cards().get(request.name)
        has_version = request.version in ("", model.MODEL_VERSION)
        is_ready = card is not None and has_version and not self._tracker.is_draining
        return oip.ModelReadyResponse(ready=is_ready and card is not None and self._models.is_loaded(card))

    async def ServerMetadata(self, request: oip.ServerMetadataRequest, context: Context) -> oip.ServerMetadataResponse:
        """The server's name, version and extensions."""
        return model.server_metadata()

    async def ModelMetadata(self, request: oip.ModelMetadataRequest, context: Context) -> oip.ModelMetadataResponse:
        """A model's tensors."""
        return model.model_metadata(self._card(request.name, request.version).name)

    async def ModelConfig(self, request: oip.ModelConfigRequest, context: Context) -> oip.ModelConfigResponse:
        """A model's tensors in Triton's terms."""
        return model.model_config(self._card(request.name, request.version).name)

    def _card(self, name: str, version: str) -> ModelCard:
        check_version(version)
        if not name:
            raise InvalidRequest.of("name", "must be given")
        return self._models.card_of(name, self._pool)


def _append(whole: Piece, piece: Piece) -> None:
    whole.text += piece.text
    whole.logprobs += piece.logprobs
    whole.num_tokens += piece.num_tokens


async def _pieces(stream: OutputStream) -> AsyncIterator[tuple[Piece, bool]]:
    """Yields (piece, whether it is known to be the last); the end may become known only after the last piece."""
    piece = await stream.next()
    while piece is not None:
        if stream.state is StreamState.ENDED:
            following = await stream.next()
            yield piece, following is None
            piece = following
        else:
            yield piece, False
            piece = await stream.next()
