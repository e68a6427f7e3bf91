"""VllmEngine: Generate, Abort, Embed, and the methods that routers in front of this gateway call."""

import contextlib
import hashlib
import io
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc as vllm_grpc
from smg_grpc_proto.generated import common_pb2 as common

from octavo.gateway.dialects.unserved import check_request_ids, tell_silent
from octavo.gateway.dialects.vllm import info
from octavo.gateway.dialects.vllm.messages import (
    KvBatches,
    PromptScores,
    aborted_early,
    chunk_of,
    complete_of,
    fill_logprobs,
)
from octavo.gateway.dialects.vllm.translate import check_loads, in_callers_names, translate, translate_embed
from octavo.gateway.errors import NamesFields, NotOffered, RequestAborted
from octavo.gateway.peers.control import Control
from octavo.gateway.requests.embedding import Embedder, normalized
from octavo.gateway.requests.input_processor import share_of
from octavo.gateway.requests.submit import Collaborators, Submitter
from octavo.gateway.requests.tracker import TrackedRequest, stream_response, stream_responses
from octavo.gateway.rpc.connections import Context
from octavo.gateway.rpc.interceptor import MODEL_HEADER, RpcScope, current_rpc
from octavo.gateway.streams.output_processor import Piece
from octavo.gateway.streams.stream import OutputStreams
from octavo.gateway.workers.views import WorkerView
from octavo.v1 import inference_pb2 as pb
from octavo.wire.messages import ModelCard

T = TypeVar("T")
QUERY_TIMEOUT_S = 2.0


CHUNK_BYTES = 1024 * 1024  # clients accept messages of up to 4 MiB by default
_ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)  # a fixed date in the archive, so that the same files give the same bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """A tokenizer's files as one zip archive, for clients that tokenize themselves. sha256: of data, in hex."""

    data: bytes
    sha256: str

    def chunks(self) -> Iterator[tuple[bytes, str]]:
        """Yields (bytes, sha256); the digest comes with the last chunk and is empty before."""
        for begin in range(0, len(self.data), CHUNK_BYTES):
            end = begin + CHUNK_BYTES
            yield self.data[begin:end], self.sha256 if end >= len(self.data) else ""


def archive_of(files: Mapping[str, bytes]) -> Archive:
    """A compressed archive of the files; takes a large part of a second for a large vocabulary."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, _ZIP_EPOCH)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, files[name], zipfile.ZIP_DEFLATED, compresslevel=1)
    data = buffer.getvalue()
    return Archive(data=data, sha256=hashlib.sha256(data).hexdigest())


class VllmServicer(vllm_grpc.VllmEngineServicer):  # type: ignore[misc]
    """One per gateway. Methods raise errors, which the interceptor turns into a status."""

    def __init__(
        self,
        collaborators: Collaborators,
        *,
        submitter: Submitter,
        embedder: Embedder,
        control: Control,
        is_ready: Callable[[], bool],
    ) -> None:
        """is_ready: whether a request could be answered now."""
        self._tracker, self._pool, self._models = collaborators.tracker, collaborators.pool, collaborators.models
        self._text, self._prefix_salt = collaborators.text, collaborators.prefix_salt
        self._submitter = submitter
        self._embedder = embedder
        self._control = control
        self._is_ready = is_ready
        self._started_s = time.monotonic()

    # ------------------------------------------------------------ requests

    async def Generate(self, request: vllm.GenerateRequest, context: Context) -> None:
        """Sends chunks of new ids if the request streams, and one Complete for each output."""
        scope = current_rpc.get()
        scope.adopt_request_id(request.request_id)
        translated = await self._translated(lambda: translate(request), request.ByteSize())
        try:
            tracked = await self._submit(translated, scope)
        except RequestAborted:
            await context.send_initial_metadata(())
            for index in range(translated.num_outputs or 1):
                await context.write(aborted_early(index))
            return
        with self._tracker.closing(tracked):
            # Sent at once: headers that wait with the first message for the reader's flow-control window would hold
            # back a status too.
            await context.send_initial_metadata(())
            await (self._stream if request.stream else self._collect)(tracked, context)

    async def _translated(self, work: Callable[[], T], num_bytes: int) -> T:
        share = share_of(current_rpc.get())
        return await self._text.run_by_size(work, num_bytes=num_bytes, share=share)

    async def _submit(self, translated: pb.GenerateRequest, scope: RpcScope) -> TrackedRequest:
        try:
            return await self._submitter.submit(translated, scope, prefix="", timeout_s=scope.wire_timeout_s)
        except NamesFields as error:
            raise in_callers_names(error) from None

    async def _stream(self, tracked: TrackedRequest, context: Context) -> None:
        """Stream the outputs. On Abort, every open output gets what came before the Abort, and an end."""
        num_prompt_tokens = tracked.num_prompt_tokens
        is_open, scores = [True] * len(tracked.streams), PromptScores(tracked)

        def chunk(index: int, piece: Piece) -> vllm.GenerateResponse:
            return chunk_of(piece, num_prompt_tokens, index, scores.take(piece) if index == 0 else None)

        def end(index: int) -> vllm.GenerateResponse:
            is_open[index] = False
            return self._end(tracked, index)

        with contextlib.suppress(RequestAborted):
            if len(tracked.outputs) == 1:
                await stream_response(tracked, context, lambda piece: chunk(0, piece))
            else:
                await stream_responses(tracked, context, chunk, end)
        for index in [index for index, is_it in enumerate(is_open) if is_it]:
            await tracked.write(context, end(index))

    async def _collect(self, tracked: TrackedRequest, context: Context) -> None:
        streams = OutputStreams(tracked.streams)
        pieces: list[list[Piece]] = [[] for _ in tracked.streams]
        with contextlib.suppress(RequestAborted):
            while (news := await streams.next()) is not None:
                index, piece = news
                if piece is not None:
                    pieces[index].append(piece)
                    tracked.count_piece(piece, time.monotonic(), index)
        for index, of_it in enumerate(pieces):
            await tracked.write(context, self._whole(tracked, index, of_it))
        tracked.scope.tokens_delivered = sum(piece.num_tokens for of_it in pieces for piece in of_it)

    def _whole(self, tracked: TrackedRequest, index: int, pieces: list[Piece]) -> vllm.GenerateResponse:
        response, scores = self._end(tracked, index), PromptScores(tracked)
        for piece in pieces:
            response.complete.output_ids.extend(piece.token_ids)
            if piece.logprobs:
                fill_logprobs(response.complete.output_logprobs, piece.logprobs)
            if index == 0 and (whole := scores.take(piece)) is not None:
                response.complete.input_logprobs.CopyFrom(whole)
        return response

    def _end(self, tracked: TrackedRequest, index: int) -> vllm.GenerateResponse:
        response = complete_of(tracked, index)
        reason = response.complete.finish_reason
        current_rpc.get().log_fields["finish_reason"] = reason
        if reason != "abort":
            tracked.count_finished(reason, index)
        return response

    async def Abort(self, request: vllm.AbortRequest, context: Context) -> vllm.AbortResponse:
        """End the caller's requests, at whichever gateway they are; ids that are not in flight are not an error."""
        check_request_ids(request.request_ids)
        tell_silent(context, await self._control.cancel_all(request.request_ids, current_rpc.get().caller))
        return vllm.AbortResponse()

    async def Embed(self, request: vllm.EmbedRequest, context: Context) -> vllm.EmbedResponse:
        """The vector of one prompt."""
        scope = current_rpc.get()
        scope.adopt_request_id(request.request_id)
        translated = await self._translated(lambda: translate_embed(request), request.ByteSize())
        try:
            card, embedded = await self._embedder.embed(translated, scope, timeout_s=scope.wire_timeout_s)
        except NamesFields as error:
            raise in_callers_names(error) from None
        (each,) = embedded
        scope.log_fields |= {"model": card.name, "prompt_tokens": each.num_prompt_tokens}
        values = normalized(each.vector_D).tolist()
        return vllm.EmbedResponse(embedding=values, prompt_tokens=each.num_prompt_tokens, embedding_dim=len(values))

    # ------------------------------------------------------------ the server

    async def HealthCheck(self, request: vllm.HealthCheckRequest, context: Context) -> vllm.HealthCheckResponse:
        """Whether a request could be answered now: by the named model, else by all expected models."""
        name = current_rpc.get().model
        if self._tracker.is_draining:
            return vllm.HealthCheckResponse(healthy=False, message="draining")
        cards, wanted = self._pool.cards(), (name,) if name else self._models.expected
        missing = [each for each in wanted if not self._models.is_ready(each, cards)]
        if missing:
            return vllm.HealthCheckResponse(healthy=False, message=f"no worker is ready for {', '.join(missing)}")
        healthy = bool(name) or self._is_ready()
        return vllm.HealthCheckResponse(healthy=healthy, message="ready" if healthy else "no worker is ready")

    async def GetModelInfo(self, request: vllm.GetModelInfoRequest, context: Context) -> vllm.GetModelInfoResponse:
        """About the model that the metadata or the port names, else the only one."""
        card = self._card()
        return info.model_info(card, self._models.files_of(card))

    async def GetServerInfo(self, request: vllm.GetServerInfoRequest, context: Context) -> vllm.GetServerInfoResponse:
        """About all gateways and the workers behind them."""
        load = await self._control.load()
        tell_silent(context, load.silent)
        return info.server_info(
            self._workers(),
            num_requests=load.num_in_flight,
            is_draining=self._tracker.is_draining,
            uptime_s=time.monotonic() - self._started_s,
        )

    async def GetLoads(self, request: vllm.GetLoadsRequest, context: Context) -> vllm.GetLoadsResponse:
        """The load of all workers as one rank, and the rate at which all gateways send."""
        check_loads(request)
        load = await self._control.load()
        tell_silent(context, load.silent)
        return info.loads(self._workers(), tokens_per_s=load.tokens_per_s)

    async def GetTokenizer(self, request: common.GetTokenizerRequest, context: Context) -> None:
        """Sends the tokenizer's files as a zip archive in chunks, with its digest in the last."""
        files = self._models.files_of(self._card())
        num_bytes, share = sum(map(len, files.values())), share_of(current_rpc.get())
        archive = await self._text.run(lambda: archive_of(files), num_bytes=num_bytes, share=share)
        await context.send_initial_metadata(())
        for data, sha256 in archive.chunks():
            await self._tracker.write(context, common.GetTokenizerChunk(data=data, sha256=sha256))

    async def FlushCache(self, request: common.FlushCacheRequest, context: Context) -> common.FlushCacheResponse:
        """Forget cached prefixes that no request uses. This need not wait until the service is idle, so timeout_s is
        ignored."""
        model = self._card().name if current_rpc.get().model else None
        replies = await self._pool.query(audit=False, flush=True, timeout_s=QUERY_TIMEOUT_S, model=model)
        num_workers, num_blocks = len(self._workers()), sum(reply.num_flushed_blocks for _, reply in replies)
        message = f"{num_blocks} blocks of {len(replies)} of {num_workers} workers"
        return common.FlushCacheResponse(success=len(replies) == num_workers > 0, message=message)

    async def SubscribeKvEvents(self, request: common.SubscribeKvEventsRequest, context: Context) -> None:
        """The caller's own prefixes that the workers hold, as one rank: first all of them, then every change. A number
        to resume from is answered with all of them too, so that no past events need to be kept."""
        card, batches = self._card(), KvBatches()
        self._tracker.check_open()
        subscription = self._pool.follow_blocks(card.name, self._prefix_salt.of(current_rpc.get().caller, ""))
        try:
            await context.send_initial_metadata(())
            while True:
                await self._tracker.write(context, batches.of(await subscription.next()))
        finally:
            subscription.leave()

    async def StartProfile(self, request: common.StartProfileRequest, context: Context) -> common.ProfileResponse:
        """Not offered."""
        raise NotOffered("StartProfile is not offered here")

    async def StopProfile(self, request: common.StopProfileRequest, context: Context) -> common.ProfileResponse:
        """Not offered."""
        raise NotOffered("StopProfile is not offered here")

    def _card(self) -> ModelCard:
        """The card of the model that the metadata or the port names, else the only one; the dialect has no field for
        it."""
        return self._models.card_of(current_rpc.get().model, self._pool, path=MODEL_HEADER)

    def _workers(self) -> list[WorkerView]:
        """All workers, or those of the model that is named."""
        workers = self._pool.workers()
        if not current_rpc.get().model:
            return list(workers)
        name = self._card().name
        return [worker for worker in workers if worker.card.name == name]
