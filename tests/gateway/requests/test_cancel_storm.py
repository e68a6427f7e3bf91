"""Many callers that leave at random moments, beside one that stays."""

import asyncio
import random
from typing import Any

import grpc

from octavo.gateway.config import RequestLimits
from octavo.v1 import common_pb2
from octavo.v1 import inference_pb2 as pb
from octavo.wire.messages import Capacity
from tests.support.gateway.fake_pool import FakePool, FakeRun, worker_view

NUM_CALLERS = 300
IDS_ONLY = pb.OutputOptions(format=pb.OUTPUT_FORMAT_TOKEN_IDS)


def request(request_id: str) -> pb.GenerateRequest:
    return pb.GenerateRequest(request_id=request_id, token_ids=common_pb2.TokenIds(ids=[4]), output=IDS_ONLY)


async def test_cancels_at_random_moments_leave_nothing_and_disturb_nobody(serve: Any) -> None:
    rng = random.Random(5)
    capacity = Capacity(num_blocks=64, block_size=16, max_num_seqs=500, max_waiting=0, max_batch_tokens=64)
    tasks: set[asyncio.Task[None]] = set()

    async def speak(run: FakeRun) -> None:
        for token_id in range(100):
            run.tokens([token_id])
            await asyncio.sleep(0.005)
        run.finish()

    def begin(run: FakeRun) -> None:
        task = asyncio.create_task(speak(run))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def leave(stub: Any, index: int) -> None:
        await asyncio.sleep(rng.random() * 0.3)
        call = stub.Generate(request(f"r{index}"))
        reading = asyncio.create_task(read(call))
        await asyncio.sleep(rng.choice([0, 0, 0.001, 0.01, 0.05, 0.2]))
        call.cancel()
        await asyncio.gather(reading, return_exceptions=True)

    async def read(call: Any) -> list[int]:
        return [token_id async for event in call for token_id in event.delta.token_ids]

    pool = FakePool(views=[worker_view(capacity=capacity)], on_run=begin)
    async with serve(pool, limits=RequestLimits(max_requests=400)) as served:
        before = len(asyncio.all_tasks())
        bystander = asyncio.create_task(read(served.inference.Generate(request("bystander"))))
        await asyncio.gather(*(leave(served.inference, index) for index in range(NUM_CALLERS)))
        assert await bystander == list(range(100))
        tracker = served.gateway.tracker
        await served.until(lambda: tracker.admission.counts().num_entered == 0)
        assert len(tracker) == 0
        assert tracker.admission.on_worker("w0") == 0
        ended = {run.handle for run in pool.runs if run.is_over}
        assert ended == {run.handle for run in pool.runs}
        rpcs = served.gateway.meters.rpcs
        await served.until(lambda: {code for _, code, _ in rpcs} <= {"OK", "CANCELLED"})
        await served.until(lambda: len(asyncio.all_tasks()) <= before + len(tasks))
        assert rpcs[("/octavo.v1.InferenceService/Generate", grpc.StatusCode.OK.name, "")] >= 1
