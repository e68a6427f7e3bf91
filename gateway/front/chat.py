"""/v1/chat/completions: whole, and as a stream of chunks.

A tool call is sent once it is complete: text that begins like a call may turn out not to be one, and this interface
cannot withdraw it.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.client.aio import AsyncTextStream
from octavo.client.events import OutputSoFar
from octavo.gateway.front.answers import chat_logprobs, reason_of, usage_of
from octavo.v1 import inference_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """The fields that every object of an answer begins with. created: seconds since 1970."""

    id: str
    created: int
    model: str

    def answered_by(self, stream: AsyncTextStream) -> "Envelope":
        """The envelope with the name of the model that answered, which the caller may have left out."""
        return self if stream.started is None else replace(self, model=stream.started.model)

    def of(self, kind: str, **fields: Any) -> dict[str, Any]:
        """An object of this kind."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, **fields}


def whole_chat(envelope: Envelope, outputs: Sequence[OutputSoFar], *, has_logprobs: bool) -> dict[str, Any]:
    """The answer in one object."""
    choices = [_choice(index, output, has_logprobs=has_logprobs) for index, output in enumerate(outputs)]
    return envelope.of("chat.completion", choices=choices, usage=usage_of([outputs]))


def _choice(index: int, output: OutputSoFar, *, has_logprobs: bool) -> dict[str, Any]:
    calls = [_call(call) for call in output.tool_calls]
    message: dict[str, Any] = {"role": "assistant", "content": output.text or (None if calls else ""), "refusal": None}
    return {
        "index": index,
        "message": message | ({"tool_calls": calls} if calls else {}),
        "logprobs": chat_logprobs(output.logprobs) if has_logprobs else None,
        "finish_reason": reason_of(output),
    }


def _call(call: inference_pb2.ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}


async def chat_chunks(
    envelope: Envelope, stream: AsyncTextStream, *, has_logprobs: bool, has_usage: bool
) -> AsyncIterator[dict[str, Any]]:
    """Chunks as the output arrives: the role first, the finish reason last, then the usage if it is asked for."""
    usage = {"usage": None} if has_usage else {}

    def chunk(index: int, delta: dict[str, Any], **fields: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} | fields
        return envelope.answered_by(stream).of("chat.completion.chunk", choices=[choice], **usage)

    unopened = list(range(len(stream.outputs)))
    ends = _Ends(stream.outputs)

    def openings() -> list[dict[str, Any]]:
        """Opening chunks, sent only once the service has answered: a refused request must not begin a stream."""
        opened = [chunk(index, {"role": "assistant", "content": "", "refusal": None}) for index in unopened]
        unopened.clear()
        return opened

    async for delta in stream.deltas():
        for opening in openings():
            yield opening
        positions = chat_logprobs(delta.logprobs) if has_logprobs and delta.logprobs else None
        if delta.text or positions:
            yield chunk(delta.output_index, {"content": delta.text}, logprobs=positions)
        for index, reason in ends.new():
            yield _last(chunk, index, stream.outputs[index], reason)
    for opening in openings():
        yield opening
    for index, reason in ends.new():
        yield _last(chunk, index, stream.outputs[index], reason)
    if has_usage:
        yield envelope.answered_by(stream).of("chat.completion.chunk", choices=[], usage=usage_of([stream.outputs]))


def _last(chunk: Any, index: int, output: OutputSoFar, reason: str) -> dict[str, Any]:
    calls = [{"index": number} | _call(call) for number, call in enumerate(output.tool_calls)]
    made: dict[str, Any] = chunk(index, {"tool_calls": calls} if calls else {}, finish_reason=reason)
    return made


@dataclass(slots=True)
class _Ends:
    """Finds outputs that have ended, each once."""

    outputs: Sequence[OutputSoFar]
    told: set[int] = field(default_factory=set)

    def new(self) -> list[tuple[int, str]]:
        found = []
        for index, output in enumerate(self.outputs):
            reason = reason_of(output)
            if reason is not None and index not in self.told:
                self.told.add(index)
                found.append((index, reason))
        return found
