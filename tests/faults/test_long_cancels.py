"""Ten thousand cancels beside one stream that stays. `make faults-long`."""

import asyncio
import os
import random
from itertools import pairwise
from typing import Any

import pytest

from octavo import AsyncClient
from tests.support.faults.bench import FaultBench
from tests.support.faults.callers import Call, calls, golden, request, run
from tests.support.faults.figures import percentile, record

NUM_CANCELS = int(os.environ.get("OCTAVO_CANCELS", "10000"))
NUM_CALLERS = 100
CANARY_TOKENS = 3500


async def cancels(faults: FaultBench, caller: int, count: int) -> None:
    """Requests that are left at random moments of their first 50 ms, over one connection."""
    drawn = random.Random(f"caller {caller}")
    async with AsyncClient(faults.service.target, options=(("grpc.use_local_subchannel_pool", 1),)) as client:
        for _ in range(count):
            call = Call(prompt=[drawn.randrange(10, 900) for _ in range(drawn.randrange(1, 64))], max_tokens=200)
            stream = client.stream(request(call))
            reading = asyncio.create_task(drain(stream))
            await asyncio.sleep(drawn.uniform(0, 0.05))
            stream.cancel()
            await asyncio.gather(reading, return_exceptions=True)


async def drain(stream: Any) -> None:
    async for _ in stream.deltas():
        pass


async def canary_until(client: AsyncClient, done: asyncio.Event) -> list[Call]:
    """The same long request again and again, as long as the cancels go on."""
    sung = list[Call]()
    while not done.is_set():
        sung.append(await run(client, Call(prompt=[3, 1, 4], max_tokens=CANARY_TOKENS, seed=7)))
    return sung


def gaps_ms(sung: list[Call]) -> list[float]:
    return [1000 * (later - earlier) for call in sung for earlier, later in pairwise(call.arrivals_s)]


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_row_17_ten_thousand_cancels_leave_nothing_and_change_no_byte_of_a_canary(bench: Any) -> None:
    async with bench("--workers=1", "--max-num-seqs=128") as faults:
        baseline = Call(prompt=[3, 1, 4], max_tokens=CANARY_TOKENS, seed=7)
        warm_up = calls(NUM_CALLERS, max_tokens=50)
        await faults.run(warm_up)
        await faults.note_gateways()
        await faults.run([baseline])
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        async with AsyncClient(faults.service.target) as client:
            singing = asyncio.create_task(canary_until(client, done))
            start_s = loop.time()
            each = NUM_CANCELS // NUM_CALLERS
            await asyncio.gather(*(cancels(faults, caller, each) for caller in range(NUM_CALLERS)))
            took_s = loop.time() - start_s
            done.set()
            sung = await singing
        assert [call.token_ids for call in sung] == [golden(baseline, faults.model)] * len(sung)
        page = await faults.metrics()
        ended = page.total("octavo_requests_total", method="/octavo.v1.InferenceService/Generate")
        faults.num_rpcs = round(ended)  # calls that were cancelled early enough never left their client
        await faults.check([baseline, *sung, *warm_up], limit_s=600)
        p99_ms, before_ms = percentile(gaps_ms(sung), 99), percentile(gaps_ms([baseline]), 99)
        record(
            "17",
            cancels=each * NUM_CALLERS,
            reached_the_gateway=round(page.total("octavo_requests_total", code="CANCELLED")),
            cancels_per_s=round(each * NUM_CALLERS / took_s),
            canary_diffs=0,
            canary_gap_ms_p99=round(p99_ms, 1),
            baseline_gap_ms_p99=round(before_ms, 1),
            ratio=round(p99_ms / before_ms, 2),
        )
