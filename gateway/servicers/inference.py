"""InferenceService: Generate and its unary form, Embed, Tokenize, Detokenize, Cancel."""

from collections.abc import Callable
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import Message

from octavo.gateway.models import ServedModels
from octavo.gateway.peers.control import Control
from octavo.gateway.requests.embedding import Embedder
from octavo.gateway.requests.input_processor import InputProcessor, share_of
from octavo.gateway.requests.submit import Submitter
from octavo.gateway.requests.tracker import RequestTracker
from octavo.gateway.rpc.scope import current_rpc
from octavo.gateway.rpc.status import REQUEST_ID_TRAILER
from octavo.gateway.servicers.messages import (
    collect,
    delta_event,
    embedding_message,
    finished_event,
    reason_of,
    started_event,
)
from octavo.gateway.streams.response import TrackedRequest, stream_response, stream_responses
from octavo.gateway.text.model_text import Bounds
from octavo.gateway.text.service import TextService
from octavo.gateway.validation.fields import check
from octavo.gateway.validation.generate import check_complete, check_embed, check_generate, check_ids, check_tokenize
from octavo.gateway.workers.pool import WorkerPool
from octavo.v1 import inference_pb2 as pb
from octavo.v1 import inference_pb2_grpc
from octavo.wire.messages import ModelCard

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """One per gateway. Methods raise what went wrong; the guard makes the status."""

    def __init__(
        self,
        *,
        tracker: RequestTracker,
        submitter: Submitter,
        embedder: Embedder,
        input_processor: InputProcessor,
        text: TextService,
        models: ServedModels,
        pool: WorkerPool,
        control: Control,
        max_prompt_bytes: int,
    ) -> None:
        """max_prompt_bytes: of a text to tokenize, or to make of tokens."""
        self._tracker = tracker
        self._submitter = submitter
        self._embedder = embedder
        self._input_processor = input_processor
        self._text = text
        self._models = models
        self._pool = pool
        self._control = control
        self._max_prompt_bytes = max_prompt_bytes

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """Stream the outputs: Started, Deltas, a Finished for each."""
        scope = current_rpc.get()
        scope.name_by(request.request_id)
        await self._check(lambda: check_generate(request), request)
        tracked = await self._submitter.submit(request, scope, prefix="", timeout_s=context.time_remaining())
        with self._tracker.closing(tracked):
            # Only now: a refusal stays a trailers-only response, which the client's library may retry.
            await context.send_initial_metadata(((REQUEST_ID_TRAILER, tracked.request_id),))
            await tracked.write(context, started_event(tracked))
            await (self._stream if len(tracked.outputs) == 1 else self._stream_all)(tracked, context)

    async def _stream(self, tracked: TrackedRequest, context: Context) -> None:
        table = self._logprob_table(tracked)
        await stream_response(tracked, context, lambda piece: delta_event(piece, table))
        await tracked.write(context, pb.GenerateResponse(finished=finished_event(tracked)))
        self._count_finished(tracked, 0)

    async def _stream_all(self, tracked: TrackedRequest, context: Context) -> None:
        table = self._logprob_table(tracked)

        def end(index: int) -> pb.GenerateResponse:
            self._count_finished(tracked, index)
            return pb.GenerateResponse(finished=finished_event(tracked, index))

        await stream_responses(tracked, context, lambda index, piece: delta_event(piece, table, index), end)

    async def Complete(self, request: pb.CompleteRequest, context: Context) -> pb.CompleteResponse:
        """The same in one message."""
        scope = current_rpc.get()
        scope.name_by(request.generate.request_id)
        await self._check(lambda: check_complete(request), request)
        timeout_s = context.time_remaining()
        tracked = await self._submitter.submit(request.generate, scope, prefix="generate.", timeout_s=timeout_s)
        with self._tracker.closing(tracked):
            response = await self._collect(tracked)
            await context.send_initial_metadata(((REQUEST_ID_TRAILER, tracked.request_id),))
            scope.tokens_delivered = tracked.num_tokens
            for index in range(len(tracked.streams)):
                self._count_finished(tracked, index)
            return response

    async def _collect(self, tracked: TrackedRequest) -> pb.CompleteResponse:
        wholes = await collect(tracked, self._logprob_table(tracked))
        response = pb.CompleteResponse(
            request_id=tracked.request_id,
            model=tracked.card.name,
            prompt_text=tracked.prompt_text,
            prompt_token_ids=tracked.prompt_ids,
            prompt_logprobs=wholes[0].prompt_logprobs,
            further_outputs=[each.further_output(finished_event(tracked, i)) for i, each in enumerate(wholes) if i],
        )
        wholes[0].fill(response)
        response.finished.CopyFrom(finished_event(tracked))
        return response

    def _logprob_table(self, tracked: TrackedRequest) -> tuple[bytes, ...] | None:
        has_none = tracked.sampling.num_logprobs is None and tracked.sampling.num_prompt_logprobs is None
        if has_none or not tracked.stream.processor.gives_text:
            return None
        return self._models.text_of(tracked.card).table.all_bytes

    def _count_finished(self, tracked: TrackedRequest, index: int) -> None:
        reason = pb.FinishReason.Name(reason_of(tracked.streams[index])).removeprefix("FINISH_REASON_").lower()
        tracked.count_finished(reason, index)

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """A vector for each input."""
        scope = current_rpc.get()
        scope.name_by(request.request_id)
        await self._check(lambda: check_embed(request), request)
        card, embedded = await self._embedder.embed(request, scope, timeout_s=context.time_remaining())
        scope.log_fields |= {"model": card.name, "inputs": len(embedded)}
        await context.send_initial_metadata(((REQUEST_ID_TRAILER, scope.request_id),))
        is_scaled = request.normalize if request.HasField("normalize") else True
        return pb.EmbedResponse(
            request_id=scope.request_id,
            model=card.name,
            embeddings=[embedding_message(each, card, scope.started_s, is_scaled=is_scaled) for each in embedded],
        )

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Text or chat to ids, as Generate would."""
        await self._check(lambda: check_tokenize(request), request)
        self._tracker.check_open()
        text = self._models.text_of(self._card(request.model))
        share, bounds = share_of(current_rpc.get()), Bounds(max_bytes=self._max_prompt_bytes)
        encoded = await self._input_processor.encode(request, text, bounds, share)
        return await self._text.run_by_size(
            lambda: pb.TokenizeResponse(token_ids=encoded.ids_T.tolist(), text=encoded.text),
            num_bytes=encoded.ids_T.nbytes,
            share=share,
        )

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """Ids to text."""
        self._tracker.check_open()
        card = self._card(request.model)
        text, max_bytes = self._models.text_of(card), self._max_prompt_bytes

        def detokenize() -> pb.DetokenizeResponse:
            check(request)
            ids_T = check_ids(request.token_ids, card.vocab_size, "token_ids")
            decode = text.decode_visible if request.skip_special_tokens else text.decode_all
            return pb.DetokenizeResponse(text=decode(ids_T, max_bytes=max_bytes))

        return await self._text.run(detokenize, num_bytes=len(request.token_ids), share=share_of(current_rpc.get()))

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        """End a request of the caller's own."""
        scope = current_rpc.get()
        scope.name_by(request.request_id)
        check(request)
        outcome = await self._control.cancel(request.request_id, scope.caller)
        return pb.CancelResponse(found=outcome.num_ended > 0, num_unreachable_gateways=len(outcome.silent))

    def _card(self, name: str) -> ModelCard:
        return self._models.card_of(name or current_rpc.get().model, self._pool)

    async def _check(self, check_it: Callable[[], None], request: Message) -> None:
        """Large requests are checked off the event loop."""
        share = share_of(current_rpc.get())
        await self._text.run_by_size(check_it, num_bytes=request.ByteSize(), share=share)
