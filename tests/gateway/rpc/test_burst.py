"""Calls that come together while the event loop is busy."""

import asyncio
import threading
import time
from collections import Counter
from typing import Any

import grpc

from octavo.gateway.config import GatewayConfig
from octavo.gateway.rpc.server import new_server
from octavo.gateway.workers.config import WorkerPoolConfig
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
        calling = asyncio.create_task(asyncio.to_thread(call_all, served.gateway.listeners.address, sent))
        await asyncio.sleep(0)
        sent.wait(60)
        time.sleep(1.0)  # noqa: ASYNC251  # the loop stands still until they have all come
        codes = await calling
    assert codes.keys() <= {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}
    assert codes["INVALID_ARGUMENT"]


class EndingTogether(grpc.GenericRpcHandler):
    """Streams that end all at once, as soon as a connection is full of them."""

    def __init__(self, num_places: int) -> None:
        self._num_places, self._num_begun, self._is_full = num_places, 0, asyncio.Event()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_stream_rpc_method_handler(self.talk)

    async def talk(self, request: bytes, context: Any) -> None:
        await context.write(b"said")
        self._num_begun += 1
        if self._num_begun == self._num_places:
            self._is_full.set()
        await self._is_full.wait()


async def test_calls_beyond_those_of_one_connection_wait_in_the_client_and_none_is_lost() -> None:
    """The core counted streams that had ended but that Python had not let go yet, and reset those that took their
    place, with UNAVAILABLE and no word of ours."""
    config = GatewayConfig(workers=WorkerPoolConfig(endpoints=()), metrics_address=None)
    num_places = config.limits.max_streams_per_connection
    server = new_server(config)
    server.add_generic_rpc_handlers((EndingTogether(num_places),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async def call(channel: grpc.aio.Channel) -> str:
        try:
            async with asyncio.timeout(60):
                messages = [each async for each in channel.unary_stream("/some/method")(b"")]  # type: ignore[arg-type]
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return f"{len(messages)} messages"

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await channel.channel_ready()
        ends = Counter(await asyncio.gather(*(call(channel) for _ in range(3 * num_places))))
    await server.stop(0)
    assert ends == {"1 messages": 3 * num_places}
