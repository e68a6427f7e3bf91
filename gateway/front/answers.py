"""What answers of all kinds share: reasons, usage, log-probabilities. Pure."""

from collections.abc import Sequence
from typing import Any

from octavo.client.events import OutputSoFar
from octavo.v1 import inference_pb2

_REASONS = {
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
    inference_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
    inference_pb2.FINISH_REASON_DEADLINE: "length",
}


def reason_of(output: OutputSoFar) -> str | None:
    """None while the output goes on."""
    return None if output.finished is None else _REASONS.get(output.finished.reason, "stop")


def usage_of(requests: Sequence[Sequence[OutputSoFar]]) -> dict[str, Any]:
    """Of several requests with their outputs: a prompt counts once, however many outputs it has, and what was cached of
    it is what the first one found: the others share its prompt."""
    prompt = completion = cached = 0
    for outputs in requests:
        ends = [output.finished for output in outputs if output.finished is not None]
        prompt += max((end.usage.prompt_tokens for end in ends), default=0)
        cached += outputs[0].finished.usage.cached_tokens if outputs[0].finished is not None else 0
        completion += sum(end.usage.completion_tokens for end in ends)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def chat_logprobs(positions: Sequence[inference_pb2.TokenLogprobs]) -> dict[str, Any]:
    """Of chats: an entry for each token."""
    return {
        "content": [
            _token(position.chosen) | {"top_logprobs": [_token(top) for top in position.top]} for position in positions
        ],
        "refusal": None,
    }


def _token(token: inference_pb2.TokenLogprob) -> dict[str, Any]:
    is_whole = "\ufffd" not in token.text
    return {
        "token": token.text,
        "logprob": token.logprob,
        "bytes": list(token.text.encode()) if is_whole else None,
    }


def num_characters(positions: Sequence[inference_pb2.TokenLogprobs]) -> int:
    """Of their tokens' texts."""
    return sum(len(position.chosen.text) for position in positions)


def completion_logprobs(positions: Sequence[inference_pb2.TokenLogprobs], offset: int) -> dict[str, Any]:
    """Of completions: parallel lists. offset: of the first token in the text."""
    offsets = []
    for position in positions:
        offsets.append(offset)
        offset += len(position.chosen.text)
    return {
        "tokens": [position.chosen.text for position in positions],
        "token_logprobs": [position.chosen.logprob for position in positions],
        "top_logprobs": [_by_text(position.top) for position in positions],
        "text_offset": offsets,
    }


def _by_text(tokens: Sequence[inference_pb2.TokenLogprob]) -> dict[str, float]:
    """tokens: best first. Several may have one text (U+FFFD, for parts of characters), which then is the best one's."""
    return {token.text: token.logprob for token in reversed(tokens)}
