"""Qwen2.5's tokenizer on texts that are slow for others: how its time grows, and whether the loop goes on turning."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from octavo.gateway.config import RequestLimits
from octavo.gateway.text.model_text import ModelText
from octavo.v1 import inference_pb2 as pb
from tests.support.faults.figures import percentile, record
from tests.support.gateway.fake_pool import FakePool, model_card, worker_view
from tests.support.gateway.rpc_errors import refused

MIB = 1 << 20
pytestmark = pytest.mark.usefixtures("frozen")
SIZES = (100_000, 300_000, 1_000_000)  # characters; of CJK three bytes each, of combining marks two
UNITS = {"a": "a", "^": "^", "spaces": " ", "CJK": "中文字", "marks": "e" + "\u0301" * 999}
MAX_SLOPE = 1.5  # of the logarithms; 1 is linear
LATE_S = 0.05
MAX_SHARE = 0.8  # of the work that may pass in such pauses: nearly all of it where the loop tokenizes by itself


def text_of(unit: str, length: int) -> str:
    return (unit * (length // len(unit) + 1))[:length]


def seconds_of(model: ModelText, text: str) -> float:
    """The best of three: the machine is shared."""
    took = []
    for _ in range(3):
        start_s = time.thread_time()
        model.encode(text, max_bytes=4 * MIB)
        took.append(time.thread_time() - start_s)
    return min(took)


@pytest.mark.parametrize("name", sorted(UNITS))
async def test_row_44_time_grows_with_the_text_and_the_loop_goes_on(
    name: str, serve: Any, qwen_text: ModelText, qwen_files: dict[str, bytes]
) -> None:
    took_s = [seconds_of(qwen_text, text_of(UNITS[name], size)) for size in SIZES]
    lags = await lags_of(serve, qwen_files, text_of(UNITS[name], SIZES[-1]))
    late_share = sum(work for work in lags.work_s if work > LATE_S) / sum(lags.work_s)
    num_bytes = [len(text_of(UNITS[name], size).encode()) for size in SIZES]
    record(
        f"44 {name}",
        **{f"ms_for_{size}_bytes": round(1000 * took, 1) for size, took in zip(num_bytes, took_s, strict=True)},
        loop_lag_ms_p99=round(1000 * percentile(lags.late_s, 99), 1),
        loop_lag_ms_max=round(1000 * max(lags.late_s), 1),
        late_share=round(late_share, 2),
    )
    assert took_s[-1] / took_s[0] < (num_bytes[-1] / num_bytes[0]) ** MAX_SLOPE
    assert late_share < MAX_SHARE


@dataclass(slots=True)
class Lags:
    """late_s: how much later than asked each turn of a loop came. work_s: what this process had computed meanwhile: a
    turn that is late because others have the machine, or because it pauses, has little."""

    late_s: list[float] = field(default_factory=list)
    work_s: list[float] = field(default_factory=list)


async def lags_of(serve: Any, files: dict[str, bytes], text: str) -> Lags:
    """Of the gateway's loop while it refused this text three times."""
    pool = FakePool(views=[worker_view(card=model_card(max_model_len=1000, vocab_size=151_936))])
    found, done = Lags(), asyncio.Event()

    async def watch() -> None:
        while not done.is_set():
            begin_s, before_s = time.monotonic(), time.process_time()
            await asyncio.sleep(0.002)
            found.late_s.append(time.monotonic() - begin_s - 0.002)
            found.work_s.append(time.process_time() - before_s)

    async with serve(pool, files=files, limits=RequestLimits(max_prompt_bytes=4 * MIB)) as served:
        watching = asyncio.create_task(watch())
        for _ in range(3):
            refusal = await refused(served.inference.Generate(pb.GenerateRequest(text=text), timeout=200))
            assert refusal.reason == "EXCEEDS_CAPACITY"
        done.set()
        await watching
    assert pool.runs == []
    return found
