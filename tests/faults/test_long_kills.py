"""The long proof of migration: workers are killed at random moments, and no caller loses a byte. `make faults-long`."""

import asyncio
import os
import random
import signal
from typing import Any

import pytest

from tests.support.faults.bench import FaultBench
from tests.support.faults.callers import Call
from tests.support.faults.figures import percentile, record, show

NUM_KILLS = int(os.environ.get("OCTAVO_KILLS", "50"))
KILLS_A_SERVICE = 6  # a worker that dies five times in a row within 30 s is given up by the supervisor
NUM_STREAMS = 32
MAX_TOKENS = 400


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


@pytest.mark.long
@pytest.mark.timeout(3600)
async def test_row_3_every_stream_of_fifty_killed_workers_is_complete(bench: Any) -> None:
    pauses: list[float] = []
    num_complete = num_moved = 0
    for first in range(0, NUM_KILLS, KILLS_A_SERVICE):
        async with bench("--workers=2") as faults:
            moved = 0.0
            for kill in range(first, min(first + KILLS_A_SERVICE, NUM_KILLS)):
                everybody = await one_kill(faults, kill)
                await faults.until_workers(2, num_new=1)
                await faults.check(everybody, limit_s=60)
                num_complete += sum(call.error is None for call in everybody)
                pauses += [call.longest_pause_s for call in everybody]
                moved = (await faults.metrics()).total("octavo_requests_migrated_total")
                show(f"kill {kill}: {num_complete} complete, longest pause {max(pauses):.2f} s")
            num_moved += round(moved)
    assert num_complete == NUM_KILLS * NUM_STREAMS
    record(
        "kills",
        kills=NUM_KILLS,
        streams=NUM_KILLS * NUM_STREAMS,
        complete=num_complete,
        moved_outputs=num_moved,
        pause_p50_s=round(percentile(pauses, 50), 3),
        pause_p99_s=round(percentile(pauses, 99), 3),
        longest_pause_s=round(max(pauses), 3),
    )
