"""What an output has so far as a ModelInferResponse, in the tensors that the caller asked for."""

import json
from collections.abc import Sequence
from typing import Any

from octavo.kserve import inference_pb2 as oip

from gateway.dialects.kserve_model import MODEL_VERSION, TEXT_OUTPUT
from gateway.dialects.kserve_request import Asked
from gateway.dialects.kserve_tensors import Tensor, add_outputs
from gateway.live import LiveRequest
from gateway.output import Piece
from wire.messages import TokenLogprobs, WireFinishReason

FINAL_RESPONSE = "triton_final_response"
_UNFINISHED = "None"  # as Triton's vLLM backend writes it
_DATATYPES = {"num_input_tokens": "UINT32", "num_output_tokens": "UINT32", "cumulative_logprob": "FP32"}


class Responses:
    """Makes the responses to one request, one after the other. bytes_by_id: for the texts of log-probabilities."""

    def __init__(self, asked: Asked, live: LiveRequest, bytes_by_id: Sequence[bytes]) -> None:
        self._asked = asked
        self._live = live
        self._bytes_by_id = bytes_by_id
        self._cumulative_logprob = 0.0

    def whole(self, text: str, num_tokens: int, logprobs: list[tuple[int, TokenLogprobs]]) -> oip.ModelInferResponse:
        """The only one."""
        piece = Piece(text=self._asked.prefix_text + text, token_ids=[], logprobs=logprobs, num_tokens=num_tokens)
        return self.next(piece, reason_of(self._live))

    def next(self, piece: Piece, reason: str = "") -> oip.ModelInferResponse:
        """The next piece. reason: why the output ends with it; empty: it does not."""
        self._cumulative_logprob += sum(position.logprob for _, position in piece.logprobs)
        response = empty_response(self._asked)
        add_outputs(response, [self._tensor(name, piece, reason) for name in self._asked.outputs])
        return response

    def _tensor(self, name: str, piece: Piece, reason: str) -> Tensor:
        return Tensor(name=name, datatype=_DATATYPES.get(name, "BYTES"), values=[self._value(name, piece, reason)])

    def _value(self, name: str, piece: Piece, reason: str) -> Any:
        match name:
            case "finish_reason":
                return reason or _UNFINISHED
            case "num_input_tokens":
                return self._live.num_prompt_tokens
            case "num_output_tokens":
                return piece.num_tokens
            case "cumulative_logprob":
                return self._cumulative_logprob
            case "logprobs":
                return json.dumps([self._position(*each) for each in piece.logprobs])
        assert name == TEXT_OUTPUT
        return piece.text

    def _position(self, token_id: int, position: TokenLogprobs) -> dict[int, dict[str, Any]]:
        """The chosen token, then the most probable ones; a rank is known of these only."""
        ranks = {top_id: rank for rank, top_id in enumerate(position.top_ids, start=1)}
        known = {token_id: position.logprob} | dict(zip(position.top_ids, position.top_logprobs, strict=True))
        return {
            each: {"logprob": logprob, "rank": ranks.get(each), "decoded_token": self._decoded(each)}
            for each, logprob in known.items()
        }

    def _decoded(self, token_id: int) -> str:
        known = token_id < len(self._bytes_by_id)
        return self._bytes_by_id[token_id].decode("utf-8", "replace") if known else ""


def empty_response(asked: Asked) -> oip.ModelInferResponse:
    """A response without tensors."""
    return oip.ModelInferResponse(model_name=asked.model, model_version=MODEL_VERSION, id=asked.caller_id)


def streamed(response: oip.ModelInferResponse, *, is_final: bool) -> oip.ModelStreamInferResponse:
    """A response in a stream, with the mark by which callers know the last one."""
    response.parameters[FINAL_RESPONSE].bool_param = is_final
    return oip.ModelStreamInferResponse(infer_response=response)


def failed(request: oip.ModelInferRequest, message: str) -> oip.ModelStreamInferResponse:
    """The end of a request that went wrong; its stream goes on."""
    return oip.ModelStreamInferResponse(
        error_message=message,
        infer_response=oip.ModelInferResponse(model_name=request.model_name, id=request.id),
    )


def reason_of(live: LiveRequest) -> str:
    """Why a complete output ended: stop or length."""
    finished = live.stream.finished
    if live.stream.assembler.match is not None or (finished and finished.reason is WireFinishReason.STOP):
        return "stop"
    return "length"
