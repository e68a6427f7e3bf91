"""Streams send their headers before their first message: behind headers that wait with it for a reader's window, gRPC
could send no status."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.gateway.fake_pool import FakePool
from tests.support.gateway.kserve_calls import stub_of


def generate(served: Any, stub: Any) -> Any:
    from tests.support.gateway.vllm_calls import request

    return stub(served.channel).Generate(request())


def generate_whole(served: Any, stub: Any) -> Any:
    from tests.support.gateway.vllm_calls import request

    return stub(served.channel).Generate(request(stream=False))


def stream_of_requests(served: Any, stub: Any) -> Any:
    return stub_of(served).ModelStreamInfer()


@pytest.mark.parametrize("call", [generate, generate_whole, stream_of_requests])
async def test_headers_come_although_nothing_is_said_yet(
    serve: Any, vllm_stub: Any, call: Callable[[Any, Any], Any]
) -> None:
    async with serve(FakePool()) as served:  # whose outputs say nothing
        called = call(served, vllm_stub)
        async with asyncio.timeout(30):
            await called.initial_metadata()
        called.cancel()
