"""InferenceService: Generate and its unary twin, Embed, Tokenize, Detokenize, Cancel."""

import asyncio
from collections.abc import Callable

import grpc
from google.protobuf.message import Message

from octavo.gateway.peers.control import Control
from octavo.gateway.requests.embedding import Embedder
from octavo.gateway.requests.submit import Opener
from octavo.gateway.requests.tracker import Desk, LiveRequest
from octavo.gateway.rpc.scope import RpcScope, current_rpc
from octavo.gateway.rpc.status import REQUEST_ID_TRAILER
from octavo.gateway.servicers.messages import (
    collect,
    delta_event,
    embedding_message,
    finished_event,
    reason_of,
    started_event,
)
from octavo.gateway.streams.response import close, count_finished, error_behind, pump, pump_all, write
from octavo.gateway.text.model_text import Bounds
from octavo.gateway.validation.fields import check
from octavo.gateway.validation.generate import check_complete, check_embed, check_generate, check_ids, check_tokenize
from octavo.v1 import inference_pb2 as pb
from octavo.v1 import inference_pb2_grpc

Context = grpc.aio.ServicerContext


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """One per gateway. Methods raise what went wrong; the guard makes the status."""

    def __init__(self, desk: Desk, control: Control) -> None:
        self._desk = desk
        self._control = control
        self._opener = Opener(desk)
        self._embedder = Embedder(desk)

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """Stream the outputs: Started, Deltas, a Finished for each."""
        scope = current_rpc.get()
        scope.name_by(request.request_id)
        await self._check(lambda: check_generate(request), request)
        live = await self._opener.open(request, scope, prefix="", timeout_s=context.time_remaining())
        try:
            # Only now: a refusal stays a trailers-only response, which the client's library may retry.
            await context.send_initial_metadata(((REQUEST_ID_TRAILER, live.request_id),))
            await write(live, context, started_event(live))
            await (self._stream_all if live.further else self._stream)(live, scope, context)
        except asyncio.CancelledError:
            raise error_behind(live) from None
        finally:
            close(self._desk, live, scope)

    async def _stream(self, live: LiveRequest, scope: RpcScope, context: Context) -> None:
        meters, table = self._desk.meters.of_model(live.card.name), self._logprob_table(live)
        await pump(live, scope, context, meters, lambda piece: delta_event(piece, table))
        await write(live, context, pb.GenerateResponse(finished=finished_event(live)))
        self._count_finished(live, 0)

    async def _stream_all(self, live: LiveRequest, scope: RpcScope, context: Context) -> None:
        meters, table = self._desk.meters.of_model(live.card.name), self._logprob_table(live)

        def end(index: int) -> pb.GenerateResponse:
            self._count_finished(live, index)
            return pb.GenerateResponse(finished=finished_event(live, index))

        await pump_all(live, scope, context, meters, lambda index, piece: delta_event(piece, table, index), end)

    async def Complete(self, request: pb.CompleteRequest, context: Context) -> pb.CompleteResponse:
        """The same in one message."""
        scope = current_rpc.get()
        scope.name_by(request.generate.request_id)
        await self._check(lambda: check_complete(request), request)
        live = await self._opener.open(request.generate, scope, prefix="generate.", timeout_s=context.time_remaining())
        try:
            response = await self._collect(live)
            await context.send_initial_metadata(((REQUEST_ID_TRAILER, live.request_id),))
            scope.tokens_delivered = live.num_tokens
            for index in range(len(live.streams)):
                self._count_finished(live, index)
            return response
        except asyncio.CancelledError:
            raise error_behind(live) from None
        finally:
            close(self._desk, live, scope)

    async def _collect(self, live: LiveRequest) -> pb.CompleteResponse:
        wholes = await collect(live, self._desk.meters.of_model(live.card.name), self._logprob_table(live))
        response = pb.CompleteResponse(
            request_id=live.request_id,
            model=live.card.name,
            prompt_text=live.prompt_text,
            prompt_token_ids=live.prompt_ids,
            prompt_logprobs=wholes[0].prompt_logprobs,
            further_outputs=[each.further_output(finished_event(live, i)) for i, each in enumerate(wholes) if i],
        )
        wholes[0].fill(response)
        response.finished.CopyFrom(finished_event(live))
        return response

    def _logprob_table(self, live: LiveRequest) -> tuple[bytes, ...] | None:
        has_none = live.sampling.num_logprobs is None and live.sampling.num_prompt_logprobs is None
        if has_none or not live.stream.assembler.gives_text:
            return None
        return self._desk.models.text_of(live.card).table.all_bytes

    def _count_finished(self, live: LiveRequest, index: int) -> None:
        reason = pb.FinishReason.Name(reason_of(live.streams[index])).removeprefix("FINISH_REASON_").lower()
        count_finished(self._desk.meters.of_model(live.card.name), live, reason, index)

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
        self._desk.check_open()
        desk = self._desk
        text = desk.models.text_of(desk.card_of(request.model, current_rpc.get()))
        share, bounds = desk.share_of(current_rpc.get()), Bounds(max_bytes=desk.limits.max_prompt_bytes)
        encoded = await desk.prompts.encode(request, text, bounds, share)
        return await desk.text.run_by_size(
            lambda: pb.TokenizeResponse(token_ids=encoded.ids_T.tolist(), text=encoded.text),
            num_bytes=encoded.ids_T.nbytes,
            share=share,
        )

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """Ids to text."""
        self._desk.check_open()
        desk = self._desk
        card = desk.card_of(request.model, current_rpc.get())
        text, max_bytes = desk.models.text_of(card), desk.limits.max_prompt_bytes

        def detokenize() -> pb.DetokenizeResponse:
            check(request)
            ids_T = check_ids(request.token_ids, card.vocab_size, "token_ids")
            decode = text.decode_visible if request.skip_special_tokens else text.decode_all
            return pb.DetokenizeResponse(text=decode(ids_T, max_bytes=max_bytes))

        return await desk.text.run(detokenize, num_bytes=len(request.token_ids), share=desk.share_of(current_rpc.get()))

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        """End a request of the caller's own."""
        scope = current_rpc.get()
        scope.name_by(request.request_id)
        check(request)
        outcome = await self._control.cancel(request.request_id, scope.caller)
        return pb.CancelResponse(found=outcome.num_ended > 0, num_unreachable_gateways=len(outcome.silent))

    async def _check(self, check_it: Callable[[], None], request: Message) -> None:
        """Large requests are checked off the event loop."""
        share = self._desk.share_of(current_rpc.get())
        await self._desk.text.run_by_size(check_it, num_bytes=request.ByteSize(), share=share)
