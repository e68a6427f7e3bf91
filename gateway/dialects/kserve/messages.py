"""Pieces of outputs as a ModelInferResponse, in the tensors that the caller asked for."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.gateway.dialects.kserve.model import MODEL_VERSION, TEXT_OUTPUT
from octavo.gateway.dialects.kserve.request import TranslatedRequest
from octavo.gateway.dialects.kserve.tensors import Tensor, add_outputs
from octavo.gateway.requests.tracker import TrackedRequest
from octavo.gateway.streams.output_processor import Piece
from octavo.gateway.streams.stream import OutputStream
from octavo.kserve import inference_pb2 as oip
from octavo.wire.messages import TokenLogprobs

FINAL_RESPONSE = "triton_final_response"
_UNFINISHED = "None"  # as Triton's vLLM backend writes it
_DATATYPES = {"num_input_tokens": "UINT32", "num_output_tokens": "UINT32", "cumulative_logprob": "FP32"}


@dataclass(frozen=True, slots=True, eq=False)
class OutputDelta:
    """What is new in one output.

    reason: the finish reason if the output ends with this piece, else empty.
    num_hidden: tokens that no piece carries since they give no text, as an end token; they count with the last piece.
    """

    piece: Piece
    reason: str = ""
    num_hidden: int = 0


class Responses:
    """Makes the responses to one request, in order. bytes_by_id: each token's bytes, to name log-probabilities."""

    def __init__(self, asked: TranslatedRequest, tracked: TrackedRequest, bytes_by_id: Sequence[bytes]) -> None:
        self._asked = asked
        self._tracked = tracked
        self._bytes_by_id = bytes_by_id
        self._cumulative_logprobs = [0.0] * len(tracked.streams)

    def next(self, deltas: Sequence[OutputDelta]) -> oip.ModelInferResponse:
        """The next response: its tensors have one element per output, in order."""
        for index, each in enumerate(deltas):
            self._cumulative_logprobs[index] += sum(position.logprob for _, position in each.piece.logprobs)
        response = self.empty()
        add_outputs(response, [self._tensor(name, deltas) for name in self._asked.outputs])
        return response

    def last(self, end: OutputDelta) -> oip.ModelInferResponse:
        """The response to an end that comes after the last piece: without tensors if the caller takes such a one, and
        nothing that it asked for is new in it."""
        news = {"finish_reason"} | ({"num_output_tokens"} if end.num_hidden else set())
        is_empty = self._asked.wants_empty_final and news.isdisjoint(self._asked.outputs)
        return self.empty() if is_empty else self.next([end])

    def empty(self) -> oip.ModelInferResponse:
        """A response without tensors."""
        asked = self._asked
        return oip.ModelInferResponse(model_name=asked.model, model_version=MODEL_VERSION, id=asked.caller_id)

    def _tensor(self, name: str, deltas: Sequence[OutputDelta]) -> Tensor:
        if name == "num_input_tokens":  # there is one prompt
            values: list[Any] = [self._tracked.num_prompt_tokens]
        else:
            values = [self._value(name, index, each) for index, each in enumerate(deltas)]
        return Tensor(name=name, datatype=_DATATYPES.get(name, "BYTES"), values=values)

    def _value(self, name: str, index: int, delta: OutputDelta) -> Any:
        match name:
            case "finish_reason":
                return delta.reason or _UNFINISHED
            case "num_output_tokens":
                return delta.piece.num_tokens + delta.num_hidden
            case "cumulative_logprob":
                return self._cumulative_logprobs[index]
            case "logprobs":
                return json.dumps([self._position(*each) for each in delta.piece.logprobs])
        assert name == TEXT_OUTPUT
        return delta.piece.text

    def _position(self, token_id: int, position: TokenLogprobs) -> dict[int, dict[str, Any]]:
        """The chosen token, then the most probable ones; only the latter have a known rank."""
        ranks = {top_id: rank for rank, top_id in enumerate(position.top_ids, start=1)}
        known = {token_id: position.logprob} | dict(zip(position.top_ids, position.top_logprobs, strict=True))
        return {
            each: {"logprob": logprob, "rank": ranks.get(each), "decoded_token": self._decoded(each)}
            for each, logprob in known.items()
        }

    def _decoded(self, token_id: int) -> str:
        known = token_id < len(self._bytes_by_id)
        return self._bytes_by_id[token_id].decode("utf-8", "replace") if known else ""


def streamed(response: oip.ModelInferResponse, *, is_final: bool) -> oip.ModelStreamInferResponse:
    """A response in a stream, with the parameter that marks the last one."""
    response.parameters[FINAL_RESPONSE].bool_param = is_final
    return oip.ModelStreamInferResponse(infer_response=response)


def failed(request: oip.ModelInferRequest, message: str) -> oip.ModelStreamInferResponse:
    """The last response to a request that failed, marked as such; its stream stays open."""
    response = oip.ModelInferResponse(model_name=request.model_name, model_version=request.model_version, id=request.id)
    end = streamed(response, is_final=True)
    end.error_message = message
    return end


def reason_of(stream: OutputStream) -> str:
    """Why a complete output ended: "stop" or "length"."""
    if stream.has_stopped:
        return "stop"
    return "length"


def end_of(piece: Piece, stream: OutputStream) -> OutputDelta:
    """The last piece of a complete output."""
    return OutputDelta(piece, reason_of(stream), stream.processor.num_undelivered)
