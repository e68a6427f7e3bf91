"""Pieces and ends of outputs as messages of VllmEngine."""

from smg_grpc_proto import vllm_engine_pb2 as vllm  # type: ignore[import-untyped]

from gateway.live import LiveRequest
from gateway.output import Piece
from wire.messages import TokenLogprobs, WireFinishReason

Positions = list[tuple[int, TokenLogprobs]]


def chunk_of(piece: Piece, num_prompt_tokens: int) -> vllm.GenerateResponse:
    """New tokens only; completion_tokens counts these alone, clients add them up."""
    response = vllm.GenerateResponse()
    chunk = response.chunk
    chunk.token_ids.extend(piece.token_ids)
    chunk.prompt_tokens = num_prompt_tokens
    chunk.completion_tokens = len(piece.token_ids)
    if piece.logprobs:
        fill_logprobs(chunk.output_logprobs, piece.logprobs)
    return response


def fill_logprobs(target: vllm.OutputLogProbs, positions: Positions) -> None:
    """One entry per token; of the most probable ones where some were asked for."""
    for token_id, position in positions:
        target.token_ids.append(token_id)
        target.token_logprobs.append(position.logprob)
        if position.top_ids:
            target.top_logprobs.add(values=position.top_logprobs, token_ids=position.top_ids)


def complete_of(live: LiveRequest, reason: str, token_ids: list[int], positions: Positions) -> vllm.GenerateResponse:
    """The end. token_ids, positions: the whole output for callers that did not stream, empty for those that did.

    cached_tokens is 0 where the worker's figures did not come.
    """
    stream = live.stream
    response = vllm.GenerateResponse(
        complete=vllm.GenerateComplete(
            output_ids=token_ids,
            finish_reason=reason,
            prompt_tokens=live.num_prompt_tokens,
            completion_tokens=stream.assembler.num_tokens,
            cached_tokens=stream.finished.cached_tokens if stream.finished else 0,
        )
    )
    if positions:
        fill_logprobs(response.complete.output_logprobs, positions)
    _fill_match(response.complete, live)
    return response


def aborted_early() -> vllm.GenerateResponse:
    """The end of a request that was aborted before a worker had it."""
    return vllm.GenerateResponse(complete=vllm.GenerateComplete(finish_reason="abort"))


def reason_of(live: LiveRequest) -> str:
    """Of a complete output: stop or length."""
    finished = live.stream.finished
    if live.stream.assembler.match is not None or (finished and finished.reason is WireFinishReason.STOP):
        return "stop"
    return "length"


def _fill_match(complete: vllm.GenerateComplete, live: LiveRequest) -> None:
    """What the caller's own stop conditions matched; the model's end tokens are none of them."""
    match, finished = live.stream.assembler.match, live.stream.finished
    if match is not None:
        complete.matched_stop_str = match
    elif finished is not None and finished.stop_token_id in live.sampling.stop_token_ids:
        complete.matched_token_id = finished.stop_token_id
