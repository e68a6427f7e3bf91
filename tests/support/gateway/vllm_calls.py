"""Requests of VllmEngine, and a worker that answers them. Importable only if its stubs are installed."""

import asyncio
from collections.abc import Callable
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as vllm  # type: ignore[import-untyped]

from octavo.wire.messages import WireFinishReason
from tests.support.gateway.fake_pool import FakePool, FakeRun

Stub = Callable[[Any], Any]


def request(stream: bool = True, ids: tuple[int, ...] = (5, 6, 7), **params: Any) -> vllm.GenerateRequest:
    return vllm.GenerateRequest(
        request_id="r1",
        stream=stream,
        tokenized=vllm.TokenizedInput(input_ids=ids),
        sampling_params=vllm.SamplingParams(**params),
    )


def speaking(*ids: int, end: tuple[WireFinishReason, int | None] = (WireFinishReason.LENGTH, None)) -> FakePool:
    """A pool that sends these tokens one by one, each in a message of its own, then the end."""
    tasks: list[asyncio.Task[None]] = []

    async def speak(run: FakeRun) -> None:
        for token_id in ids:
            run.tokens([token_id])
            await asyncio.sleep(0.005)
        run.finish(end[0], stop_token_id=end[1])

    return FakePool(on_run=lambda run: tasks.append(asyncio.create_task(speak(run))))
