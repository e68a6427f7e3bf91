"""InferenceService: Generate and its unary form, Embed, Tokenize, Detokenize, Cancel; and their messages."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from google.protobuf.message import Message

from octavo.gateway.peers.control import Control
from octavo.gateway.requests.embedding import Embedded, Embedder, normalized
from octavo.gateway.requests.input_processor import share_of
from octavo.gateway.requests.submit import Collaborators, Submitter
from octavo.gateway.requests.tracker import TrackedRequest, stream_response, stream_responses
from octavo.gateway.rpc.connections import Context
from octavo.gateway.rpc.interceptor import current_rpc
from octavo.gateway.rpc.status import REQUEST_ID_TRAILER
from octavo.gateway.streams.output_processor import Piece
from octavo.gateway.streams.stream import OutputStream, OutputStreams
from octavo.gateway.text.model_text import Bounds
from octavo.gateway.text.pieces import ByteTable
from octavo.gateway.text.tool_calls import CallPiece
from octavo.gateway.validation.fields import check
from octavo.gateway.validation.generate import check_complete, check_embed, check_generate, check_ids, check_tokenize
from octavo.v1 import common_pb2, inference_pb2_grpc
from octavo.v1 import inference_pb2 as pb
from octavo.wire.messages import Finished, ModelCard, TokenLogprobs, WireFinishReason, seed_of_output

_NO_FIGURES = Finished(handle=0, reason=WireFinishReason.CANCELLED)


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """One per server. Methods raise errors; the interceptor turns them into statuses."""

    def __init__(
        self,
        collaborators: Collaborators,
        *,
        submitter: Submitter,
        embedder: Embedder,
        control: Control,
    ) -> None:
        self._tracker, self._pool, self._models = collaborators.tracker, collaborators.pool, collaborators.models
        self._input_processor, self._text = collaborators.input_processor, collaborators.text
        self._max_prompt_bytes = collaborators.limits.max_prompt_bytes
        self._submitter = submitter
        self._embedder = embedder
        self._control = control

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """Stream the outputs: Started, Deltas, a Finished for each."""
        scope = current_rpc.get()
        scope.adopt_request_id(request.request_id)
        await self._check(lambda: check_generate(request), request)
        tracked = await self._submitter.submit(request, scope, prefix="", timeout_s=scope.wire_timeout_s)
        with self._tracker.closing(tracked):
            # Not earlier: a refusal must be a trailers-only response, which client libraries may retry.
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
        """Generate, with all outputs in one message."""
        scope = current_rpc.get()
        scope.adopt_request_id(request.generate.request_id)
        await self._check(lambda: check_complete(request), request)
        timeout_s = scope.wire_timeout_s
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

    def _logprob_table(self, tracked: TrackedRequest) -> ByteTable | None:
        has_none = tracked.sampling.num_logprobs is None and tracked.sampling.num_prompt_logprobs is None
        if has_none or not tracked.stream.processor.gives_text:
            return None
        return self._models.text_of(tracked.card).table

    def _count_finished(self, tracked: TrackedRequest, index: int) -> None:
        reason = pb.FinishReason.Name(reason_of(tracked.streams[index])).removeprefix("FINISH_REASON_").lower()
        tracked.count_finished(reason, index)

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """A vector for each input."""
        scope = current_rpc.get()
        scope.adopt_request_id(request.request_id)
        await self._check(lambda: check_embed(request), request)
        card, embedded = await self._embedder.embed(request, scope, timeout_s=scope.wire_timeout_s)
        scope.log_fields |= {"model": card.name, "inputs": len(embedded)}
        await context.send_initial_metadata(((REQUEST_ID_TRAILER, scope.request_id),))
        is_scaled = request.normalize if request.HasField("normalize") else True
        return pb.EmbedResponse(
            request_id=scope.request_id,
            model=card.name,
            embeddings=[embedding_message(each, card, scope.started_s, is_scaled=is_scaled) for each in embedded],
        )

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Text or chat to ids, exactly as Generate would."""
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
        """End one of the caller's own requests."""
        scope = current_rpc.get()
        scope.adopt_request_id(request.request_id)
        check(request)
        outcome = await self._control.cancel(request.request_id, scope.caller)
        return pb.CancelResponse(found=outcome.num_ended > 0, num_unreachable_gateways=len(outcome.silent))

    def _card(self, name: str) -> ModelCard:
        return self._models.card_of(name or current_rpc.get().model, self._pool)

    async def _check(self, check_it: Callable[[], None], request: Message) -> None:
        """Run a check, off the event loop if the request is large."""
        share = share_of(current_rpc.get())
        await self._text.run_by_size(check_it, num_bytes=request.ByteSize(), share=share)


# ---------------------------------------------------------------- messages


def embedding_message(each: Embedded, card: ModelCard, arrived_s: float, *, is_scaled: bool) -> pb.Embedding:
    """arrived_s: start of the call, monotonic. is_scaled: scale the vector to length 1."""
    figures = each.figures
    return pb.Embedding(
        values=(normalized(each.vector_D) if is_scaled else each.vector_D).tolist(),
        usage=common_pb2.Usage(prompt_tokens=each.num_prompt_tokens, cached_tokens=figures.cached_tokens),
        receipt=common_pb2.Receipt(
            worker_id=each.worker_id,
            model_fingerprint=card.fingerprint,
            gateway_s=each.sent_s - arrived_s,
            queue_s=figures.queue_s,
            prefill_s=figures.prefill_s,
            total_s=each.ended_s - arrived_s,
            computed_tokens=figures.computed_tokens,
            preemptions=figures.preemptions,
            swaps=figures.swaps,
            block_seconds=figures.block_seconds,
            migrations=len(each.moves),
            tensor_parallel_size=card.tensor_parallel_size,
        ),
    )


def started_event(tracked: TrackedRequest) -> pb.GenerateResponse:
    """The first event of a stream."""
    started = pb.Started(
        request_id=tracked.request_id,
        model=tracked.card.name,
        prompt_tokens=tracked.num_prompt_tokens,
        prompt_text=tracked.prompt_text,
        prompt_token_ids=tracked.prompt_ids,
    )
    return pb.GenerateResponse(started=started)


def delta_event(piece: Piece, table: ByteTable | None, index: int = 0) -> pb.GenerateResponse:
    """table: for the texts of log-probabilities; None if the caller wants no text. index: the output's."""
    response = pb.GenerateResponse()
    delta = response.delta
    delta.text = piece.text
    if piece.token_ids:
        delta.token_ids.extend(piece.token_ids)
    if piece.tool_calls:
        delta.tool_calls.extend(map(_call_delta, piece.tool_calls))
    if piece.logprobs:
        delta.logprobs.extend([position_logprobs(*position, table) for position in piece.logprobs])
    if piece.prompt_logprobs:
        delta.prompt_logprobs.extend([position_logprobs(*each, table) for each in piece.prompt_logprobs])
    if index:
        delta.output_index = index
    return response


def _call_delta(piece: CallPiece) -> pb.ToolCallDelta:
    return pb.ToolCallDelta(
        call_index=piece.index,
        id=piece.id,
        name=piece.name,
        arguments_json=piece.arguments,
        is_withdrawn=piece.is_withdrawn,
    )


def whole_calls(pieces: Iterable[CallPiece]) -> list[pb.ToolCall]:
    """The calls of a complete output, without withdrawn ones."""
    calls: dict[int, pb.ToolCall] = {}
    for piece in pieces:
        if piece.is_withdrawn:
            del calls[piece.index]
            continue
        if piece.index not in calls:
            calls[piece.index] = pb.ToolCall(id=piece.id, name=piece.name)
        calls[piece.index].arguments_json += piece.arguments
    return list(calls.values())


def position_logprobs(token_id: int, position: TokenLogprobs, table: ByteTable | None) -> pb.TokenLogprobs:
    """Log-probabilities at one position: of the chosen token and of the most probable ones."""
    top = zip(position.top_ids, position.top_logprobs, strict=True)
    return pb.TokenLogprobs(
        chosen=_token_logprob(token_id, position.logprob, table),
        top=[_token_logprob(top_id, logprob, table) for top_id, logprob in top],
    )


def _token_logprob(token_id: int, logprob: float, table: ByteTable | None) -> pb.TokenLogprob:
    raw, is_special = table.row(token_id) if table is not None else (b"", False)
    try:
        return pb.TokenLogprob(token_id=token_id, logprob=logprob, text=raw.decode(), is_special=is_special)
    except UnicodeDecodeError:  # a part of a character
        return pb.TokenLogprob(token_id=token_id, logprob=logprob, text=raw.decode("utf-8", "replace"), raw=raw)


def finished_event(tracked: TrackedRequest, index: int = 0) -> pb.Finished:
    """The end of a complete output, with all that is known of it."""
    stream = tracked.streams[index]
    figures = stream.finished or _NO_FIGURES
    return pb.Finished(
        reason=reason_of(stream),
        stop=_stop(stream, figures),
        usage=usage_of(tracked, index),
        receipt=receipt_of(tracked, index),
        output_index=index,
    )


def reason_of(stream: OutputStream) -> "pb.FinishReason.ValueType":
    """Why a complete output ended."""
    if stream.is_partial:
        return pb.FINISH_REASON_DEADLINE
    if stream.has_stopped:
        return pb.FINISH_REASON_TOOL_CALLS if stream.processor.num_tool_calls else pb.FINISH_REASON_STOP
    return pb.FINISH_REASON_LENGTH


def _stop(stream: OutputStream, figures: Finished) -> pb.StopMatch | None:
    match = stream.processor.match
    if match is not None:
        return pb.StopMatch(text=match)
    return None if figures.stop_token_id is None else pb.StopMatch(token_id=figures.stop_token_id)


def usage_of(tracked: TrackedRequest, index: int = 0) -> common_pb2.Usage:
    """completion_tokens counts what the output has: the worker may have been a few tokens past a stop string."""
    stream = tracked.streams[index]
    figures = stream.finished or _NO_FIGURES
    return common_pb2.Usage(
        prompt_tokens=tracked.num_prompt_tokens,
        completion_tokens=stream.processor.num_tokens,
        cached_tokens=figures.cached_tokens,
    )


def receipt_of(tracked: TrackedRequest, index: int = 0) -> common_pb2.Receipt:
    """Where the time went. The worker's figures are 0 if they did not come."""
    stream = tracked.streams[index]
    figures, first_s = stream.finished or _NO_FIGURES, stream.first_token_s
    return common_pb2.Receipt(
        worker_id=tracked.worker_id(index),
        model_fingerprint=tracked.card.fingerprint,
        gateway_s=tracked.sent_s - tracked.scope.started_s,
        queue_s=figures.queue_s,
        prefill_s=figures.prefill_s,
        decode_s=figures.decode_s,
        time_to_first_token_s=first_s - tracked.scope.started_s if first_s else 0.0,
        total_s=time.monotonic() - tracked.scope.started_s,
        computed_tokens=figures.computed_tokens,
        preemptions=figures.preemptions,
        swaps=figures.swaps,
        seed=seed_of_output(tracked.sampling.seed, index),
        inter_token_p50_s=figures.inter_token_p50_s,
        inter_token_p99_s=figures.inter_token_p99_s,
        block_seconds=figures.block_seconds,
        migrations=len(stream.moves),
        tensor_parallel_size=tracked.card.tensor_parallel_size,
    )


@dataclass(slots=True)
class Collected:
    """One output of a unary answer, collected piece by piece."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    calls: list[CallPiece] = field(default_factory=list)

    def add(self, piece: Piece, table: ByteTable | None) -> None:
        """Add the next piece. table: for the texts of log-probabilities; None if the caller wants no text."""
        self.texts.append(piece.text)
        self.token_ids += piece.token_ids
        self.calls += piece.tool_calls
        self.logprobs += [position_logprobs(*position, table) for position in piece.logprobs]
        self.prompt_logprobs += [position_logprobs(*position, table) for position in piece.prompt_logprobs]

    def fill(self, target: pb.CompleteResponse | pb.FurtherOutput) -> None:
        """Write the output into the response."""
        target.text = "".join(self.texts)
        target.token_ids.extend(self.token_ids)
        target.logprobs.extend(self.logprobs)
        target.tool_calls.extend(whole_calls(self.calls))

    def further_output(self, finished: pb.Finished) -> pb.FurtherOutput:
        """The output as one of those after the first."""
        output = pb.FurtherOutput(finished=finished)
        self.fill(output)
        return output


async def collect(tracked: TrackedRequest, table: ByteTable | None) -> list[Collected]:
    """All outputs, once the last one has ended. Raises the RequestError that ended one of them."""
    source, wholes = OutputStreams(tracked.streams), [Collected() for _ in tracked.streams]
    while (news := await source.next()) is not None:
        index, piece = news
        if piece is not None:
            wholes[index].add(piece, table)
            tracked.count_piece(piece, time.monotonic(), index)
    return wholes
