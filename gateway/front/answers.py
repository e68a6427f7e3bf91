"""Parts that all kinds of answers share: finish reasons, usage, log-probabilities. Pure."""

from codecs import utf_8_decode
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
    """The finish reason in OpenAI's terms; None while the output is unfinished."""
    return None if output.finished is None else _REASONS.get(output.finished.reason, "stop")


def usage_of(requests: Sequence[Sequence[OutputSoFar]]) -> dict[str, Any]:
    """The usage of several requests, each given by its outputs. A prompt counts once, however many outputs it has. Its
    cached tokens are those of its first output; the others share its prompt."""
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
    """Log-probabilities as /v1/chat/completions has them: an entry for each token."""
    return {
        "content": [
            _token(position.chosen) | {"top_logprobs": [_token(top) for top in position.top]} for position in positions
        ],
        "refusal": None,
    }


def _token(token: inference_pb2.TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(bytes_of(token))}


def bytes_of(token: inference_pb2.TokenLogprob) -> bytes:
    """The bytes of the token: of its text, or of the part of a character that it is."""
    return token.raw or token.text.encode()


class TextOffsets:
    """Start offsets, in characters, of the tokens of a text, which are passed in order. A character counts once its
    last byte has come; invalid bytes count as U+FFFD. Special tokens that are left out of the text have length 0."""

    def __init__(self) -> None:
        self._num_characters = 0
        self._unfinished = b""

    def next(self, token: inference_pb2.TokenLogprob, *, has_special: bool = False) -> int:
        """The offset of this token; if it continues a character, that character's offset. has_special: special tokens
        are in the text."""
        raw, start = b"" if token.is_special and not has_special else bytes_of(token), self._num_characters
        if self._unfinished and not _goes_on(self._unfinished, raw[:1]):
            start += 1  # after the U+FFFD of the unfinished character
        data = self._unfinished + raw
        text, num_used = utf_8_decode(data, "replace", False)
        self._num_characters += len(text)
        self._unfinished = data[num_used:]
        return start

    def end_text(self) -> None:
        """End the text: what follows is a separate text, which cannot complete an unfinished character."""
        self._num_characters += len(self._unfinished.decode("utf-8", "replace"))
        self._unfinished = b""


def _goes_on(unfinished: bytes, byte: bytes) -> bool:
    try:
        utf_8_decode(unfinished + byte, "strict", False)
    except UnicodeDecodeError:
        return False
    return True


def completion_logprobs(
    positions: Sequence[inference_pb2.TokenLogprobs], offsets: TextOffsets, *, has_special: bool = False
) -> dict[str, Any]:
    """Log-probabilities as /v1/completions has them: parallel lists. offsets: those of the text so far. has_special:
    special tokens are in the text."""
    return {
        "tokens": [position.chosen.text for position in positions],
        "token_logprobs": [position.chosen.logprob for position in positions],
        "top_logprobs": [_by_text(position) for position in positions],
        "text_offset": [offsets.next(position.chosen, has_special=has_special) for position in positions],
    }


def _by_text(position: inference_pb2.TokenLogprobs) -> dict[str, float]:
    """{text: log-probability} of the most probable tokens, best first, and of the chosen one, which may not be among
    them. If several have the same text (U+FFFD, for parts of characters), the most probable one counts."""
    known = dict[str, float]()
    for token in (*position.top, position.chosen):
        known.setdefault(token.text, token.logprob)
    return known
