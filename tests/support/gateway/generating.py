"""Calls of Generate: a request, and workers that send scripted tokens."""

import asyncio
from typing import Any

from octavo.gateway.text.model_text import ModelText
from octavo.v1 import inference_pb2 as pb
from octavo.wire.messages import WireFinishReason
from tests.support.gateway.fake_pool import FakePool, FakeRun

REQUEST = pb.GenerateRequest(request_id="r1", text="Hello world", sampling=pb.SamplingParams(seed=7))


def ids_of(text: str, model_text: ModelText) -> list[int]:
    return model_text.encode(text, max_bytes=1 << 20).ids_T.tolist()


def speaking(*steps: list[int], reason: WireFinishReason = WireFinishReason.LENGTH, **figures: object) -> FakePool:
    """A pool whose worker sends these steps, one per turn of the event loop, then ends the output."""

    async def speak(run: FakeRun) -> None:
        for step in steps:
            run.tokens(step)
            await asyncio.sleep(0)
        run.finish(reason, **figures)

    tasks: set[asyncio.Task[None]] = set()
    return FakePool(on_run=lambda run: tasks.add(asyncio.create_task(speak(run))))


async def text_of(call: Any) -> tuple[str, list[pb.GenerateResponse]]:
    events = [event async for event in call]
    return "".join(event.delta.text for event in events), events
