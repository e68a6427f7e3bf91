"""Streams of a real model whose worker is killed go on: with `--deterministic` token by token as if nothing had
happened, else as a continuation of what was delivered."""

import asyncio
from pathlib import Path
from typing import Any

import psutil
import pytest

from octavo import AsyncClient
from octavo.model.cpu.native import native_library
from tests.support.services.service import Service, serve

NUM_TOKENS, KILL_AFTER = 400, 24
WISHES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.8, "seed": 8, "top_p": 0.9, "repetition_penalty": 1.1},
    {"temperature": 1.0, "seed": 9, "logprobs": 2},
]


def asked(index: int) -> dict[str, Any]:
    chat = [("user", f"Tell me a long story about {'a sailor' if index % 2 else 'two cats'}, part {index}.")]
    return WISHES[index % len(WISHES)] | {
        "messages": chat,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "output": "token_ids",
    }


async def read(client: AsyncClient, index: int, got: list[list[int]], moved: list[int]) -> None:
    stream = client.stream(**asked(index))
    async for delta in stream.deltas():
        got[index] += delta.token_ids
    assert stream.finished is not None
    moved[index] = stream.finished.receipt.migrations


async def outputs(service: Service, *, victim: psutil.Process | None) -> tuple[list[list[int]], list[int]]:
    """Of all wishes at once, and how often each moved. The victim is killed when every stream has got a few tokens."""
    got, moved = [list[int]() for _ in WISHES], [0] * len(WISHES)
    async with AsyncClient(service.target) as client, asyncio.timeout(300), asyncio.TaskGroup() as group:
        for index in range(len(WISHES)):
            group.create_task(read(client, index, got, moved))
        while victim is not None and not all(len(ids) >= KILL_AFTER for ids in got):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        if victim is not None:
            victim.kill()
    return got, moved


async def killed_in_the_middle(folder: Path, *settings: str) -> tuple[list[list[int]], list[list[int]]]:
    """Outputs undisturbed, and again, when those of one of two workers move."""
    with serve(folder, "--workers=2", "--num-blocks=256", "--heartbeat-timeout-s=120", *settings) as service:
        service.wait_until_supervised()
        quiet, moved = await outputs(service, victim=None)
        assert moved == [0] * len(WISHES)
        disturbed, moved = await outputs(service, victim=service.children("worker")[0])
        assert sum(moved) >= 1
        assert max(moved) == 1
    return quiet, disturbed


@pytest.mark.skipif(native_library() is None, reason="deterministic mode on a CPU needs a C compiler")
async def test_with_deterministic_not_a_token_is_another(tmp_path: Path) -> None:
    quiet, disturbed = await killed_in_the_middle(tmp_path, "--deterministic")
    assert [len(ids) for ids in quiet] == [NUM_TOKENS] * len(WISHES)
    assert disturbed == quiet


async def test_without_it_every_stream_is_whole_and_goes_on_from_what_it_has_given(tmp_path: Path) -> None:
    """Rounding may choose otherwise at a near tie, on any side of the move; nothing is lost, or given twice."""
    quiet, disturbed = await killed_in_the_middle(tmp_path)
    assert [len(ids) for ids in disturbed] == [NUM_TOKENS] * len(WISHES)
    assert [ids[0] for ids in disturbed] == [ids[0] for ids in quiet]
