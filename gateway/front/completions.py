"""/v1/completions: one or several prompts, whole and as a stream. Output i of prompt p is choice p * n + i."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from octavo.client.aio import AsyncTextStream
from octavo.client.events import OutputSoFar
from octavo.gateway.front.answers import completion_logprobs, reason_of, usage_of
from octavo.gateway.front.calls import collect
from octavo.gateway.front.chat import Heading

QUEUE_SIZE = 64  # chunks that wait for a slow reader, after which the streams wait


async def collect_all(streams: Sequence[AsyncTextStream]) -> list[list[OutputSoFar]]:
    """All outputs of all prompts. Raises OctavoError: the first one; the other requests end then."""
    tasks = [asyncio.create_task(collect(stream)) for stream in streams]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def whole_completion(
    heading: Heading, requests: Sequence[Sequence[OutputSoFar]], *, has_logprobs: bool
) -> dict[str, Any]:
    """The answer in one object."""
    outputs = [output for outputs in requests for output in outputs]
    choices = [
        {
            "index": index,
            "text": output.text,
            "logprobs": completion_logprobs(output.logprobs, 0) if has_logprobs else None,
            "finish_reason": reason_of(output),
        }
        for index, output in enumerate(outputs)
    ]
    return heading.of("text_completion", choices=choices, usage=usage_of(requests))


async def completion_chunks(
    heading: Heading, streams: Sequence[AsyncTextStream], *, has_logprobs: bool, has_usage: bool
) -> AsyncIterator[dict[str, Any]]:
    """Chunks of all prompts as they come."""
    queue: asyncio.Queue[dict[str, Any] | BaseException | None] = asyncio.Queue(QUEUE_SIZE)
    usage = {"usage": None} if has_usage else {}

    async def read(first_index: int, stream: AsyncTextStream) -> None:
        lengths = [0] * len(stream.outputs)
        async for delta in stream.deltas():
            index = delta.output_index
            logprobs = completion_logprobs(delta.logprobs, lengths[index]) if has_logprobs and delta.logprobs else None
            lengths[index] += len(delta.text)
            choice = {"index": first_index + index, "text": delta.text, "logprobs": logprobs, "finish_reason": None}
            await queue.put(heading.answered_by(stream).of("text_completion", choices=[choice], **usage))
        for index, output in enumerate(stream.outputs):
            choice = {"index": first_index + index, "text": "", "logprobs": None, "finish_reason": reason_of(output)}
            await queue.put(heading.answered_by(stream).of("text_completion", choices=[choice], **usage))

    async def read_to_end(first_index: int, stream: AsyncTextStream) -> None:
        try:
            await read(first_index, stream)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    num_outputs = len(streams[0].outputs) if streams else 0
    tasks = [asyncio.create_task(read_to_end(n * num_outputs, stream)) for n, stream in enumerate(streams)]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if has_usage:
        yield heading.of("text_completion", choices=[], usage=usage_of([stream.outputs for stream in streams]))
