"""Pieces, ends and vectors as messages of octavo.v1."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from octavo.gateway.requests.embedding import Embedded
from octavo.gateway.streams.output_processor import Piece
from octavo.gateway.streams.response import TrackedRequest
from octavo.gateway.streams.stream import OutputStream, OutputStreams
from octavo.gateway.text.tool_calls import CallPiece
from octavo.v1 import common_pb2
from octavo.v1 import inference_pb2 as pb
from octavo.wire.messages import Finished, ModelCard, TokenLogprobs, WireFinishReason

BytesById = Sequence[bytes]
_NO_FIGURES = Finished(handle=0, reason=WireFinishReason.CANCELLED)


def embedding_message(each: Embedded, card: ModelCard, arrived_s: float, *, is_scaled: bool) -> pb.Embedding:
    """arrived_s: of the call, monotonic. is_scaled: to length 1."""
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
            block_seconds=figures.block_seconds,
            migrations=each.num_moves,
        ),
    )


def normalized(vector_D: np.ndarray) -> np.ndarray:
    """float32, of length 1; a vector of zeros stays what it is."""
    length = float(np.linalg.norm(vector_D.astype(np.float64)))
    return vector_D if length == 0.0 else (vector_D / length).astype(np.float32)


def started_event(tracked: TrackedRequest) -> pb.GenerateResponse:
    """The first event."""
    started = pb.Started(
        request_id=tracked.request_id,
        model=tracked.card.name,
        prompt_tokens=tracked.num_prompt_tokens,
        prompt_text=tracked.prompt_text,
        prompt_token_ids=tracked.prompt_ids,
    )
    return pb.GenerateResponse(started=started)


def delta_event(piece: Piece, bytes_by_id: BytesById | None, index: int = 0) -> pb.GenerateResponse:
    """bytes_by_id: for the texts of log-probabilities; None where the caller wants no text. index: of the output."""
    response = pb.GenerateResponse()
    delta = response.delta
    delta.text = piece.text
    if piece.token_ids:
        delta.token_ids.extend(piece.token_ids)
    if piece.tool_calls:
        delta.tool_calls.extend(map(_call_delta, piece.tool_calls))
    if piece.logprobs:
        delta.logprobs.extend([position_logprobs(*position, bytes_by_id) for position in piece.logprobs])
    if piece.prompt_logprobs:
        delta.prompt_logprobs.extend([position_logprobs(*each, bytes_by_id) for each in piece.prompt_logprobs])
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
    """The calls of a complete output, without those that were withdrawn."""
    calls: dict[int, pb.ToolCall] = {}
    for piece in pieces:
        if piece.is_withdrawn:
            del calls[piece.index]
            continue
        if piece.index not in calls:
            calls[piece.index] = pb.ToolCall(id=piece.id, name=piece.name)
        calls[piece.index].arguments_json += piece.arguments
    return list(calls.values())


def position_logprobs(token_id: int, position: TokenLogprobs, bytes_by_id: BytesById | None) -> pb.TokenLogprobs:
    """One position: the chosen token and the most probable ones."""
    top = zip(position.top_ids, position.top_logprobs, strict=True)
    return pb.TokenLogprobs(
        chosen=_token_logprob(token_id, position.logprob, bytes_by_id),
        top=[_token_logprob(top_id, logprob, bytes_by_id) for top_id, logprob in top],
    )


def _token_logprob(token_id: int, logprob: float, bytes_by_id: BytesById | None) -> pb.TokenLogprob:
    text = (
        bytes_by_id[token_id].decode("utf-8", "replace")
        if bytes_by_id is not None and token_id < len(bytes_by_id)
        else ""
    )
    return pb.TokenLogprob(token_id=token_id, logprob=logprob, text=text)


def finished_event(tracked: TrackedRequest, index: int = 0) -> pb.Finished:
    """The end of a complete output, with what is known of it."""
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
    processor, figures = stream.processor, stream.finished or _NO_FIGURES
    if stream.is_partial:
        return pb.FINISH_REASON_DEADLINE
    if processor.match is not None or figures.reason is WireFinishReason.STOP:
        return pb.FINISH_REASON_TOOL_CALLS if processor.num_tool_calls else pb.FINISH_REASON_STOP
    return pb.FINISH_REASON_LENGTH


def _stop(stream: OutputStream, figures: Finished) -> pb.StopMatch | None:
    match = stream.processor.match
    if match is not None:
        return pb.StopMatch(text=match)
    return None if figures.stop_token_id is None else pb.StopMatch(token_id=figures.stop_token_id)


def usage_of(tracked: TrackedRequest, index: int = 0) -> common_pb2.Usage:
    """completion_tokens is what the output has: a worker may have been some tokens ahead of a stop string."""
    stream = tracked.streams[index]
    figures = stream.finished or _NO_FIGURES
    return common_pb2.Usage(
        prompt_tokens=tracked.num_prompt_tokens,
        completion_tokens=stream.processor.num_tokens,
        cached_tokens=figures.cached_tokens,
    )


def receipt_of(tracked: TrackedRequest, index: int = 0) -> common_pb2.Receipt:
    """Where the time went; the worker's part is 0 where its figures did not come."""
    stream = tracked.streams[index]
    figures, first_s = stream.finished or _NO_FIGURES, stream.first_token_s
    return common_pb2.Receipt(
        worker_id=tracked.worker_id(index),
        model_fingerprint=tracked.card.fingerprint,
        gateway_s=tracked.sent_s - tracked.arrived_s,
        queue_s=figures.queue_s,
        prefill_s=figures.prefill_s,
        decode_s=figures.decode_s,
        time_to_first_token_s=first_s - tracked.arrived_s if first_s else 0.0,
        total_s=time.monotonic() - tracked.arrived_s,
        computed_tokens=figures.computed_tokens,
        preemptions=figures.preemptions,
        seed=(tracked.sampling.seed + index) % (1 << 64),
        inter_token_p50_s=figures.inter_token_p50_s,
        inter_token_p99_s=figures.inter_token_p99_s,
        block_seconds=figures.block_seconds,
        migrations=stream.num_moves,
    )


@dataclass(slots=True)
class Collected:
    """One output of a unary answer, gathered piece by piece."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    calls: list[CallPiece] = field(default_factory=list)

    def add(self, piece: Piece, bytes_by_id: BytesById | None) -> None:
        """The next piece. bytes_by_id: for the texts of log-probabilities; None where the caller wants no text."""
        self.texts.append(piece.text)
        self.token_ids += piece.token_ids
        self.calls += piece.tool_calls
        self.logprobs += [position_logprobs(*position, bytes_by_id) for position in piece.logprobs]
        self.prompt_logprobs += [position_logprobs(*position, bytes_by_id) for position in piece.prompt_logprobs]

    def fill(self, target: pb.CompleteResponse | pb.FurtherOutput) -> None:
        """Write the output into the answer."""
        target.text = "".join(self.texts)
        target.token_ids.extend(self.token_ids)
        target.logprobs.extend(self.logprobs)
        target.tool_calls.extend(whole_calls(self.calls))

    def further_output(self, finished: pb.Finished) -> pb.FurtherOutput:
        """As one of the outputs after the first."""
        output = pb.FurtherOutput(finished=finished)
        self.fill(output)
        return output


async def collect(tracked: TrackedRequest, bytes_by_id: BytesById | None) -> list[Collected]:
    """All outputs, once the last has ended. Raises the RequestError that ended one of them."""
    source, wholes = OutputStreams(tracked.streams), [Collected() for _ in tracked.streams]
    while (news := await source.next()) is not None:
        index, piece = news
        if piece is not None:
            wholes[index].add(piece, bytes_by_id)
            tracked.count_piece(piece, time.monotonic())
    return wholes
