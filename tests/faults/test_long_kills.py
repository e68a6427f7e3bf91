"""The long proof of migration: workers are killed at random moments, and no caller loses a byte. `make faults-long`."""

import asyncio
import os
import random
import signal
from typing import Any

import pytest

from tests.support.fault_bench import FaultBench
from tests.support.fault_callers import Call
from tests.support.figures import percentile, record, show

NUM_KILLS = int(os.environ.get("OCTAVO_KILLS", "50"))
KILLS_A_SERVICE = 6  # a worker that dies five times in a row within 30 s is given up by the supervisor
NUM_STREAMS = 32
MAX_TOKENS = 200


def streams(kill: int) -> list[Call]:
    """Prompts of 4 to 64 ids, different in every round."""
    drawn = random.Random(f"prompts of {kill}")
    return [
        Call(
            prompt=[drawn.randrange(10, 900) for _ in range(drawn.randrange(4, 65))],
            max_tokens=MAX_TOKENS,
            seed=drawn.getrandbits(63),
        )
        for _ in range(NUM_STREAMS)
    ]


async def one_kill(faults: FaultBench, kill: int) -> list[Call]:
    """The worker whose turn it is dies somewhere between the first prefill and the last token."""
    everybody = streams(kill)
    workers = sorted(faults.service.children("worker"), key=lambda process: " ".join(process.cmdline()))
    assert len(workers) == 2
    running = asyncio.create_task(faults.run(everybody))
    await asyncio.sleep(random.Random(f"moment of {kill}").uniform(0.05, 1.6))
    workers[kill % 2].send_signal(signal.SIGKILL)
    await running
    return everybody


async def until_both_serve(faults: FaultBench) -> None:
    for _ in range(600):
        if len(await asyncio.to_thread(faults.service.load)) == 2:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the killed worker did not come back")


@pytest.mark.long
@pytest.mark.timeout(3600)
async def test_row_3_every_stream_of_fifty_killed_workers_is_complete(bench: Any) -> None:
    pauses: list[float] = []
    num_complete = num_cut = 0
    for first in range(0, NUM_KILLS, KILLS_A_SERVICE):
        async with bench("--workers=2") as faults:
            for kill in range(first, min(first + KILLS_A_SERVICE, NUM_KILLS)):
                everybody = await one_kill(faults, kill)
                await until_both_serve(faults)
                await faults.check(everybody, limit_s=60)
                num_complete += sum(call.error is None for call in everybody)
                pauses += [call.longest_pause_s for call in everybody]
                num_cut += sum(call.longest_pause_s > 0.3 for call in everybody)
                show(f"kill {kill}: {num_complete} complete, longest pause {max(pauses):.2f} s")
    assert num_complete == NUM_KILLS * NUM_STREAMS
    record(
        "kills",
        kills=NUM_KILLS,
        streams=NUM_KILLS * NUM_STREAMS,
        complete=num_complete,
        pauses_over_300_ms=num_cut,
        pause_p50_s=round(percentile(pauses, 50), 3),
        pause_p99_s=round(percentile(pauses, 99), 3),
        longest_pause_s=round(max(pauses), 3),
    )
