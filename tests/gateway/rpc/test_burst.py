"""Calls that come together while the event loop is busy."""

import asyncio
import threading
import time
from collections import Counter
from typing import Any

import grpc

from octavo.v1 import inference_pb2 as pb
from octavo.v1 import inference_pb2_grpc

NUM_CALLS, CALLS_A_CHANNEL = 4000, 100  # more than gRPC's own bounds of what waits to be taken in: 1,000 and 3,000
LOCAL = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]


def call_all(address: str, sent: threading.Event) -> Counter[str]:
    """How the calls end, each of which asks for nothing; sent is set once the last one is on its way."""
    channels = [grpc.insecure_channel(address, options=LOCAL) for _ in range(NUM_CALLS // CALLS_A_CHANNEL)]
    try:
        stubs = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in channels]
        calls = [
            stubs[n % len(stubs)].Complete.future(
                pb.CompleteRequest(generate=pb.GenerateRequest()), wait_for_ready=True
            )
            for n in range(NUM_CALLS)
        ]
        sent.set()
        return Counter(call.code().name for call in calls)
    finally:
        for channel in channels:
            channel.close()


async def test_calls_that_come_at_once_are_answered_by_us_and_not_cancelled_by_the_library(serve: Any) -> None:
    async with serve() as served:
        sent = threading.Event()
        calling = asyncio.create_task(asyncio.to_thread(call_all, served.gateway.listen_address, sent))
        await asyncio.sleep(0)
        sent.wait(60)
        time.sleep(1.0)  # noqa: ASYNC251  # the loop stands still until they have all come
        codes = await calling
    assert codes.keys() <= {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}
    assert codes["INVALID_ARGUMENT"]
