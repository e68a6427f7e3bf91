"""Qwen2.5's tokenizer on texts that are slow for others: how its time grows, and whether the loop goes on turning."""

import asyncio
import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest
from octavo.v1 import inference_pb2 as pb

from gateway.config import RequestLimits
from gateway.text.model_text import ModelText
from tests.support.fake_pool import FakePool, model_card, worker_view
from tests.support.figures import percentile, record
from tests.support.rpc_errors import refused

MIB = 1 << 20
SIZES = (100_000, 300_000, 1_000_000)  # characters; of CJK three bytes each, of combining marks two
UNITS = {"a": "a", "^": "^", "spaces": " ", "CJK": "中文字", "marks": "e" + "\u0301" * 999}
MAX_SLOPE = 1.5  # of the logarithms; 1 is linear
LATE_S = 0.05
MAX_SHARE = 0.8  # of the time that the loop may be that late: nearly all of it where it tokenizes by itself


@pytest.fixture(autouse=True)
def frozen() -> Iterator[None]:
    """What earlier tests have left is none of the gateway's; a gateway starts so, too."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


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
    start_s = time.monotonic()
    lags_s = await lags(serve, qwen_files, text_of(UNITS[name], SIZES[-1]))
    late_share = sum(lag for lag in lags_s if lag > LATE_S) / (time.monotonic() - start_s)
    num_bytes = [len(text_of(UNITS[name], size).encode()) for size in SIZES]
    record(
        f"44 {name}",
        **{f"ms_for_{size}_bytes": round(1000 * took, 1) for size, took in zip(num_bytes, took_s, strict=True)},
        loop_lag_ms_p99=round(1000 * percentile(lags_s, 99), 1),
        loop_lag_ms_max=round(1000 * max(lags_s), 1),
        late_share=round(late_share, 2),
    )
    assert took_s[-1] / took_s[0] < (num_bytes[-1] / num_bytes[0]) ** MAX_SLOPE
    assert late_share < MAX_SHARE


async def lags(serve: Any, files: dict[str, bytes], text: str) -> list[float]:
    """How much later than asked the gateway's loop turned while it refused this text three times."""
    pool = FakePool(views=[worker_view(card=model_card(max_model_len=1000, vocab_size=151_936))])
    found, done = list[float](), asyncio.Event()

    async def watch() -> None:
        while not done.is_set():
            begin_s = time.monotonic()
            await asyncio.sleep(0.002)
            found.append(time.monotonic() - begin_s - 0.002)

    async with serve(pool, files=files, limits=RequestLimits(max_prompt_bytes=4 * MIB)) as served:
        watching = asyncio.create_task(watch())
        for _ in range(3):
            refusal = await refused(served.inference.Generate(pb.GenerateRequest(text=text), timeout=60))
            assert refusal.reason == "EXCEEDS_CAPACITY"
        done.set()
        await watching
    assert pool.runs == []
    return found
