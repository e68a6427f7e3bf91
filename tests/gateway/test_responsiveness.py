"""No request, however large or strange, keeps the event loop from the others."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from octavo.gateway.config import RequestLimits
from octavo.v1 import common_pb2
from octavo.v1 import inference_pb2 as pb
from tests.support.gateway.fake_pool import FakePool, model_card, worker_view
from tests.support.gateway.rpc_errors import Refusal, refused


def held_up_s() -> float:
    """Seconds, since their starts, in which threads of this process were ready to run and had no core; 0.0 where the
    system does not count them. A pause less this is what the process did to itself."""
    waited_ns = 0
    for task in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):  # a thread that has ended
            waited_ns += int(task.read_text().split()[1])
    return waited_ns / 1e9


pytestmark = pytest.mark.usefixtures("frozen")
MIB = 1024 * 1024
# Without the time that others had the cores 0.02 s are seen, and 0.15 to 0.5 s of work on the loop.
LIMIT_S = 0.12 if held_up_s() else 0.5


async def longest_pause(stop: asyncio.Event) -> float:
    """Seconds that this process kept its own loop from turning."""
    longest_s = 0.0
    while not stop.is_set():
        begin_s, held_s = time.monotonic(), held_up_s()
        await asyncio.sleep(0.005)
        pause_s = time.monotonic() - begin_s - 0.005
        longest_s = max(longest_s, pause_s - (held_up_s() - held_s) if pause_s > LIMIT_S else pause_s)
    return longest_s


async def pause_beside(call: Callable[[], Awaitable[Refusal]]) -> float:
    """`longest_pause` beside a call that is refused for its size. What the machine does to the loop comes once and what
    the gateway does to it comes each time, so the least of a few calls counts."""
    least_s = math.inf
    for _ in range(5):
        stop = asyncio.Event()
        watch = asyncio.create_task(longest_pause(stop))
        await asyncio.sleep(0.02)
        refusal = await call()
        stop.set()
        assert refusal.reason == "EXCEEDS_CAPACITY"
        least_s = min(least_s, await watch)
        if least_s < LIMIT_S:
            break
    return least_s


def hostile() -> dict[str, Any]:
    user = pb.CHAT_ROLE_USER
    call = pb.ToolCall(name="f", arguments_json='{"x": [' + "1," * 150_000 + "1]}")
    chat = pb.Chat(messages=[pb.ChatMessage(role=pb.CHAT_ROLE_ASSISTANT, tool_calls=[call])])
    specials = pb.Chat(messages=[pb.ChatMessage(role=user, content="<|im_end|>" * 50_000)])
    return {
        "a": pb.GenerateRequest(text="a" * MIB),
        "^": pb.GenerateRequest(text="^" * MIB),
        "spaces": pb.GenerateRequest(text=" " * MIB),
        "cjk": pb.GenerateRequest(text="中文字" * (MIB // 9)),
        "combining": pb.GenerateRequest(text="e" + "\u0301" * 100_000),
        "specials": pb.GenerateRequest(chat=specials),
        "messages": pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role=user, content="x")] * 10_000)),
        "arguments": pb.GenerateRequest(chat=chat),
        "ids": pb.GenerateRequest(token_ids=common_pb2.TokenIds(ids=[5] * 3 * MIB)),
        "stops": pb.GenerateRequest(text="x" * 2 * MIB, stop=pb.StopConditions(strings=["é" * 128] * 64)),
    }


@pytest.mark.parametrize("name", sorted(hostile()))
async def test_the_loop_goes_on_turning(serve: Any, name: str) -> None:
    pool = FakePool(views=[worker_view(card=model_card(max_model_len=1000))])
    async with serve(pool, limits=RequestLimits(max_prompt_bytes=2 * MIB)) as served:
        request = hostile()[name]
        assert await pause_beside(lambda: refused(served.inference.Generate(request, timeout=60))) < LIMIT_S
        assert pool.runs == []


async def test_detokenizing_millions_of_ids_is_refused_by_size_without_a_pause(serve: Any) -> None:
    request = pb.DetokenizeRequest(token_ids=[1] * 3 * MIB)
    async with serve() as served:
        assert await pause_beside(lambda: refused(served.inference.Detokenize(request))) < LIMIT_S
