"""vllm.Inference and vllm.Control. Methods raise errors, which the interceptor turns into a status."""

import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

from octavo.gateway.dialects.unserved import check_request_ids, tell_silent
from octavo.gateway.dialects.vllm_native.messages import (
    Responses,
    aborted_early,
    merge,
    model_info,
    reason_of,
    server_info,
)
from octavo.gateway.dialects.vllm_native.translate import (
    check_known,
    check_one_output,
    check_rank,
    in_callers_names,
    translate,
)
from octavo.gateway.errors import NamesFields, NotEnabled, NotOffered, RequestAborted, RequestError
from octavo.gateway.peers.control import Control
from octavo.gateway.requests.input_processor import share_of
from octavo.gateway.requests.submit import Collaborators, Submitter
from octavo.gateway.requests.tracker import TrackedRequest
from octavo.gateway.rpc.connections import Context
from octavo.gateway.rpc.interceptor import MODEL_HEADER, current_rpc
from octavo.gateway.streams.stream import OutputStreams
from octavo.vllm import vllm_pb2 as vllm
from octavo.vllm import vllm_pb2_grpc

# Methods that are not offered here, with the error of each: NotEnabled for what vLLM offers only if started with it,
# NotOffered for what every vLLM server offers (pausing, the version of its weights).
_NOT_OFFERED: dict[str, type[RequestError]] = {
    **dict.fromkeys(("LoadLora", "UnloadLora", "ListLoras", "Sleep", "WakeUp"), NotEnabled),
    **dict.fromkeys(("InitWeightTransferEngine", "StartWeightUpdate", "UpdateWeights"), NotEnabled),
    **dict.fromkeys(("StartDraftWeightUpdate", "FinishWeightUpdate"), NotEnabled),
    **dict.fromkeys(("PauseGeneration", "ResumeGeneration"), NotOffered),
    **dict.fromkeys(("UpdateWeightVersion", "GetWeightVersion"), NotOffered),
}


class VllmInference(vllm_pb2_grpc.InferenceServicer):
    """Generate and GenerateStream."""

    def __init__(self, collaborators: Collaborators, *, submitter: Submitter) -> None:
        self._tracker, self._text = collaborators.tracker, collaborators.text
        self._submitter = submitter

    async def Generate(self, request: vllm.GenerateRequest, context: Context) -> vllm.GenerateResponse:
        """One output, in one response."""
        check_one_output(request)
        try:
            tracked = await self._submit(request, context)
        except RequestAborted:
            return aborted_early(0)
        with self._tracker.closing(tracked):
            whole = vllm.GenerateResponse()
            async for part in self._responses(tracked, request.response):
                merge(whole, part)
            tracked.scope.tokens_delivered = tracked.num_tokens
            return whole

    async def GenerateStream(self, request: vllm.GenerateRequest, context: Context) -> None:
        """Sends the prompt's figures, new output as it arrives, and an end for each output."""
        try:
            tracked = await self._submit(request, context)
        except RequestAborted:
            await context.send_initial_metadata(())
            for index in range(request.sampling.num_sequences or 1):
                await context.write(aborted_early(index))
            return
        with self._tracker.closing(tracked):
            await context.send_initial_metadata(())
            async for part in self._responses(tracked, request.response):
                await tracked.write(context, part)
                tracked.scope.tokens_delivered += part.outputs.num_tokens

    async def _submit(self, request: vllm.GenerateRequest, context: Context) -> TrackedRequest:
        scope = current_rpc.get()
        scope.adopt_request_id(request.request_id)
        check_rank(context.invocation_metadata() or ())
        translated = await self._text.run_by_size(
            lambda: translate(request), num_bytes=request.ByteSize(), share=share_of(scope)
        )
        try:
            return await self._submitter.submit(translated, scope, prefix="", timeout_s=scope.wire_timeout_s)
        except NamesFields as error:
            raise in_callers_names(error) from None

    async def _responses(
        self, tracked: TrackedRequest, options: vllm.ResponseOptions
    ) -> AsyncIterator[vllm.GenerateResponse]:
        """The responses as they come. On Abort, every open output gets what came before the Abort, and an end. Text
        that becomes final only at an output's end is sent with the end: readers expect no text without tokens."""
        responses, open_outputs = Responses(tracked, options), dict.fromkeys(range(len(tracked.outputs)), "")
        if (prompt := responses.prompt()) is not None:
            yield prompt
        with contextlib.suppress(RequestAborted):
            streams = OutputStreams(tracked.streams)
            while (news := await streams.next()) is not None:
                index, piece = news
                if piece is None:
                    yield self._end(tracked, responses, index, open_outputs.pop(index))
                    continue
                if index == 0 and (prompt := responses.prompt(piece)) is not None:
                    yield prompt
                if not piece.num_tokens:
                    open_outputs[index] += piece.text
                    continue
                now_s = time.monotonic()
                yield responses.piece(piece, index)
                tracked.count_piece(piece, now_s, index)
        for index, rest in open_outputs.items():
            yield self._end(tracked, responses, index, rest)

    def _end(self, tracked: TrackedRequest, responses: Responses, index: int, rest: str) -> vllm.GenerateResponse:
        reason = reason_of(tracked.streams[index])
        name = vllm.FinishInfo.FinishReason.Name(reason).lower()
        tracked.scope.log_fields["finish_reason"] = name
        if reason != vllm.FinishInfo.ABORTED:
            tracked.count_finished(name, index)
        return responses.end(index, rest)


class VllmControl(vllm_pb2_grpc.ControlServicer):
    """What trainers and routers call."""

    def __init__(self, collaborators: Collaborators, *, control: Control) -> None:
        self._models, self._pool = collaborators.models, collaborators.pool
        self._control = control
        for method, kind in _NOT_OFFERED.items():
            setattr(self, method, _refusing(method, kind))

    async def GetServerInfo(self, request: vllm.GetServerInfoRequest, context: Context) -> vllm.ServerInfo:
        """All workers behind this gateway, reported as one rank."""
        check_known(request)
        return server_info(self._pool.workers(), instance_id=self._control.peers.gateway_id)

    async def GetModelInfo(self, request: vllm.GetModelInfoRequest, context: Context) -> vllm.ModelInfo:
        """About the model that the metadata or the port names, else the only one."""
        check_known(request)
        card = self._models.card_of(current_rpc.get().model, self._pool, path=MODEL_HEADER)
        return model_info(card, has_text=bool(self._models.token_texts(card)))

    async def Shutdown(self, request: vllm.ShutdownRequest, context: Context) -> vllm.ShutdownResponse:
        """Every gateway drains, then the service ends."""
        check_known(request)
        tell_silent(context, (await self._control.drain(None)).silent)
        return vllm.ShutdownResponse()

    async def Abort(self, request: vllm.AbortRequest, context: Context) -> vllm.AbortResponse:
        """End the caller's requests, at whichever gateway they are."""
        check_known(request)
        check_request_ids(request.request_ids)
        tell_silent(context, await self._control.cancel_all(request.request_ids, current_rpc.get().caller))
        return vllm.AbortResponse()

    async def GetKvEventSources(
        self, request: vllm.GetKvEventSourcesRequest, context: Context
    ) -> vllm.GetKvEventSourcesResponse:
        """Returns no sources: there are none."""
        check_known(request)
        return vllm.GetKvEventSourcesResponse()

    async def IsPaused(self, request: vllm.IsPausedRequest, context: Context) -> vllm.IsPausedResponse:
        """Never paused: a service that takes no new requests is draining, and then ends."""
        check_known(request)
        return vllm.IsPausedResponse(paused=False)

    async def IsSleeping(self, request: vllm.IsSleepingRequest, context: Context) -> vllm.IsSleepingResponse:
        """Never sleeping."""
        check_known(request)
        return vllm.IsSleepingResponse(sleeping=False)


def _refusing(method: str, kind: type[RequestError]) -> Any:
    async def refuse(request: Any, context: Context) -> None:
        raise kind(f"{method} is not offered here")

    return refuse
