"""/v1/completions: one or several prompts, whole or as a stream. Output i of prompt p is choice p * n + i."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from octavo.client.aio import AsyncTextStream
from octavo.client.events import OutputSoFar
from octavo.gateway.front.answers import TextOffsets, bytes_of, completion_logprobs, reason_of, usage_of
from octavo.gateway.front.calls import collect
from octavo.gateway.front.chat import Envelope
from octavo.v1 import inference_pb2

T = TypeVar("T")
QUEUE_SIZE = 64  # chunks that wait for a slow reader; when it is full, the streams wait


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoedPrompt:
    """A prompt that the answer begins with, and its log-probabilities. first: its first token, which has none, since
    nothing predicts it. positions: those of the other tokens. has_special: its text includes its special tokens."""

    first: inference_pb2.TokenLogprob
    positions: Sequence[inference_pb2.TokenLogprobs]
    has_special: bool = False

    def logprobs(self, offsets: TextOffsets) -> dict[str, Any]:
        """The log-probabilities as an answer has them. offsets: of the text that begins with this prompt."""
        start = offsets.next(self.first, has_special=self.has_special)
        head = {"tokens": [self.first.text], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [start]}
        whole = _joined(head, completion_logprobs(self.positions, offsets, has_special=self.has_special))
        offsets.end_text()
        return whole


def first_token(
    alone: str, echoed: str, positions: Sequence[inference_pb2.TokenLogprobs]
) -> inference_pb2.TokenLogprob:
    """The first token of a text. If it ends within a character, its bytes are what the tokens after it leave of that
    character.

    alone: its text, decoded on its own. echoed: a text that begins with it. positions: those of the tokens after it.
    """
    before = alone.removesuffix("\ufffd")  # an earlier U+FFFD cannot be completed by what follows
    if before == alone:
        return inference_pb2.TokenLogprob(text=alone)
    character = echoed[len(before) : len(before) + 1].encode()
    following = b"".join(bytes_of(position.chosen) for position in positions[: len(character)])
    num_bytes = next(size for size in range(1, 5) if following.startswith(character[size:]))
    return inference_pb2.TokenLogprob(text=alone, raw=before.encode() + character[:num_bytes])


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    return {name: first[name] + second[name] for name in first}


Echoed = Callable[[AsyncTextStream], Awaitable[EchoedPrompt]]


async def collect_all(streams: Sequence[AsyncTextStream]) -> list[list[OutputSoFar]]:
    """All outputs of all prompts. Raises the first OctavoError, which ends the other requests."""
    return await gather_all(map(collect, streams))


async def gather_all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results. Raises the first exception and cancels the others."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def whole_completion(
    envelope: Envelope,
    requests: Sequence[Sequence[OutputSoFar]],
    prompts: Sequence[EchoedPrompt | None],
    *,
    has_logprobs: bool,
    has_special: bool,
) -> dict[str, Any]:
    """The answer in one object. prompts: the requests' prompts, for log-probabilities that begin with them; else None.
    has_special: outputs include their special tokens."""
    outputs = [(prompt, output) for prompt, outputs in zip(prompts, requests, strict=True) for output in outputs]
    choices = [
        {
            "index": index,
            "text": output.text,
            "logprobs": _logprobs(prompt, output, has_special=has_special) if has_logprobs else None,
            "finish_reason": reason_of(output),
        }
        for index, (prompt, output) in enumerate(outputs)
    ]
    return envelope.of("text_completion", choices=choices, usage=usage_of(requests))


def _logprobs(prompt: EchoedPrompt | None, output: OutputSoFar, *, has_special: bool) -> dict[str, Any]:
    offsets = TextOffsets()
    if prompt is None:
        return completion_logprobs(output.logprobs, offsets, has_special=has_special)
    head = prompt.logprobs(offsets)
    return _joined(head, completion_logprobs(output.logprobs, offsets, has_special=has_special))


async def completion_chunks(
    envelope: Envelope,
    streams: Sequence[AsyncTextStream],
    *,
    has_logprobs: bool,
    has_special: bool,
    has_usage: bool,
    echoed: Echoed | None = None,
) -> AsyncIterator[dict[str, Any]]:
    """Chunks of all prompts as they arrive. has_special: outputs include their special tokens. echoed: gives the prompt
    of a stream once all the prompt's log-probabilities have arrived. They come first, for each output, in a chunk
    without text."""
    num_outputs = len(streams[0].outputs) if streams else 0
    usage = {"usage": None} if has_usage else {}

    async def chunks_of(stream: AsyncTextStream, first_index: int) -> AsyncGenerator[dict[str, Any], None]:
        choices = _choices_of(stream, has_logprobs=has_logprobs, has_special=has_special, echoed=echoed)
        async for choice in choices:
            choice["index"] += first_index
            yield envelope.answered_by(stream).of("text_completion", choices=[choice], **usage)

    async with aclosing(_merged([chunks_of(each, n * num_outputs) for n, each in enumerate(streams)])) as merged:
        async for chunk in merged:
            yield chunk
    if has_usage:
        used = usage_of([stream.outputs for stream in streams])
        yield envelope.answered_by(streams[0]).of("text_completion", choices=[], usage=used)


async def _choices_of(
    stream: AsyncTextStream, *, has_logprobs: bool, has_special: bool, echoed: Echoed | None
) -> AsyncIterator[dict[str, Any]]:
    """Choices of one prompt as they arrive, with their output index. Output that arrives before the prompt's
    log-probabilities are complete waits for them."""
    offsets = [TextOffsets() for _ in stream.outputs]
    held, awaits_prompt = list[inference_pb2.Delta](), echoed is not None
    async for each in stream.deltas():
        held.append(each)
        assert stream.started is not None
        if echoed is not None and awaits_prompt:
            if len(stream.prompt_logprobs) + 1 < stream.started.prompt_tokens:
                continue
            prompt, awaits_prompt = await echoed(stream), False
            for index, each_offsets in enumerate(offsets):
                yield _choice(index, "", prompt.logprobs(each_offsets))
        for delta in held:
            index, logprobs = delta.output_index, None
            if has_logprobs and delta.logprobs:
                logprobs = completion_logprobs(delta.logprobs, offsets[index], has_special=has_special)
            yield _choice(index, delta.text, logprobs)
        held.clear()
    for index, output in enumerate(stream.outputs):
        yield _choice(index, "", None, reason_of(output))


def _choice(index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


@dataclass(frozen=True, slots=True)
class _Ended:
    """Marks the end of a source, or its failure."""

    error: Exception | None = None


async def _merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """The items of all sources as they arrive. Raises the first exception of a source. All sources are closed at the
    end, whatever happens."""
    queue: asyncio.Queue[T | _Ended] = asyncio.Queue(QUEUE_SIZE)

    async def read(source: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(source):
                async for item in source:
                    await queue.put(item)
        except Exception as error:
            await queue.put(_Ended(error))
        else:
            await queue.put(_Ended())

    tasks = [asyncio.create_task(read(source)) for source in sources]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if not isinstance(item, _Ended):
                yield item
            elif item.error is not None:
                raise item.error
            else:
                num_open -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
