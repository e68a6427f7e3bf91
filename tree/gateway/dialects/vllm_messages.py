"""Pieces and ends of outputs as messages of VllmEngine."""

from collections.abc import Sequence

from smg_grpc_proto import vllm_engine_pb2 as vllm  # type: ignore[import-untyped]

from gateway.live import LiveRequest
from gateway.output import Piece
from gateway.stream import OutputStream, StreamState
from wire.messages import TokenLogprobs, WireFinishReason

Positions = list[tuple[int, TokenLogprobs]]


class PromptScores:
    """The prompt's log-probabilities, which come in pieces with output 0 and go out whole, in one message."""

    def __init__(self, live: LiveRequest) -> None:
        self._prompt_ids = live.prompt_ids
        self._num_missing = live.num_prompt_tokens - 1 if live.sampling.num_prompt_logprobs is not None else -1
        self._positions = Positions()

    def take(self, piece: Piece) -> vllm.InputLogProbs | None:
        """All of them, once: with the piece that brings the last. A prompt of one token has none but its place."""
        if self._num_missing < 0:
            return None
        self._positions += piece.prompt_logprobs
        self._num_missing -= len(piece.prompt_logprobs)
        if self._num_missing:
            return None
        self._num_missing = -1
        return input_logprobs(self._prompt_ids, self._positions)


def input_logprobs(prompt_ids: Sequence[int], positions: Positions) -> vllm.InputLogProbs:
    """One entry per token of the prompt; the first has no value."""
    message = vllm.InputLogProbs(token_ids=prompt_ids)
    message.token_logprobs.add()
    has_top = any(position.top_ids for _, position in positions)
    if has_top:
        message.top_logprobs.add()
    for _, position in positions:
        message.token_logprobs.add(value=position.logprob)
        if has_top:
            message.top_logprobs.add(values=position.top_logprobs, token_ids=position.top_ids)
    return message


def chunk_of(
    piece: Piece, num_prompt_tokens: int, index: int = 0, scores: vllm.InputLogProbs | None = None
) -> vllm.GenerateResponse:
    """New tokens only; completion_tokens counts these alone, clients add them up. index: of the output."""
    response = vllm.GenerateResponse()
    chunk = response.chunk
    chunk.token_ids.extend(piece.token_ids)
    chunk.prompt_tokens = num_prompt_tokens
    chunk.completion_tokens = len(piece.token_ids)
    if index:
        chunk.index = index
    if piece.logprobs:
        fill_logprobs(chunk.output_logprobs, piece.logprobs)
    if scores is not None:
        chunk.input_logprobs.CopyFrom(scores)
    return response


def fill_logprobs(target: vllm.OutputLogProbs, positions: Positions) -> None:
    """One entry per token; of the most probable ones where some were asked for."""
    for token_id, position in positions:
        target.token_ids.append(token_id)
        target.token_logprobs.append(position.logprob)
        if position.top_ids:
            target.top_logprobs.add(values=position.top_logprobs, token_ids=position.top_ids)


def complete_of(live: LiveRequest, index: int = 0) -> vllm.GenerateResponse:
    """The end of an output; aborted, where it has not ended by itself.

    cached_tokens is 0 where the worker's figures did not come.
    """
    stream = live.streams[index]
    response = vllm.GenerateResponse(
        complete=vllm.GenerateComplete(
            finish_reason=reason_of(stream),
            prompt_tokens=live.num_prompt_tokens,
            completion_tokens=stream.assembler.num_tokens,
            cached_tokens=stream.finished.cached_tokens if stream.finished else 0,
            index=index,
        )
    )
    _fill_match(response.complete, stream, live)
    return response


def aborted_early() -> vllm.GenerateResponse:
    """The end of a request that was aborted before a worker had it."""
    return vllm.GenerateResponse(complete=vllm.GenerateComplete(finish_reason="abort"))


def reason_of(stream: OutputStream) -> str:
    """stop, length, or abort."""
    finished = stream.finished
    if stream.state is not StreamState.ENDED:
        return "abort"
    if stream.assembler.match is not None or (finished and finished.reason is WireFinishReason.STOP):
        return "stop"
    return "length"


def _fill_match(complete: vllm.GenerateComplete, stream: OutputStream, live: LiveRequest) -> None:
    """What the caller's own stop conditions matched; the model's end tokens are none of them."""
    match, finished = stream.assembler.match, stream.finished
    if match is not None:
        complete.matched_stop_str = match
    elif finished is not None and finished.stop_token_id in live.sampling.stop_token_ids:
        complete.matched_token_id = finished.stop_token_id
