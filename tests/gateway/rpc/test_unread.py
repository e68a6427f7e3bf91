"""Callers that take nothing cannot keep others out: where they leave many ends unread, they are hung up."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from octavo.gateway.observability.meters import GatewayMeters
from octavo.gateway.rpc.connections import Address, UnreadCalls, address_of
from octavo.gateway.rpc.interceptor import StatusInterceptor
from tests.support.http2.unread_caller import GENERATE, UnreadingCaller

PLACES = 8


READS = b"I read"  # what a caller says whose messages are waited for, however long the machine pauses


class Talking(grpc.GenericRpcHandler):
    """Says something, and waits for a reader that does not read no longer than the gateway would."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_stream_rpc_method_handler(self.talk)

    async def talk(self, request: bytes, context: Any) -> None:
        await context.send_initial_metadata(())
        try:
            async with asyncio.timeout(30.0 if request == READS else 0.5):
                await context.write(b"said")
        except TimeoutError:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "nobody reads")


@dataclass
class Served:
    port: int
    endings: UnreadCalls
    channel: grpc.aio.Channel

    async def is_open(self) -> bool:
        """Whether a caller that reads is let in."""
        call: Any = self.channel.unary_stream(GENERATE)(READS, timeout=30)  # type: ignore[arg-type]
        with suppress(grpc.aio.AioRpcError):
            return [each async for each in call] == [b"said"]
        assert await call.details() == "Concurrent RPC limit exceeded!"
        return False

    async def until_shut(self, caller: UnreadingCaller) -> None:
        """Until the caller has all places: one that was still taken when it first called, by a reader that had just
        left, it takes now."""
        async with asyncio.timeout(30):
            while await self.is_open():
                caller.open(b"")
                await asyncio.sleep(0.01)

    async def until_open(self) -> None:
        async with asyncio.timeout(30):
            while not await self.is_open():  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def until_hung_up(endings: UnreadCalls) -> None:
    async with asyncio.timeout(30):
        while not endings.num_hung_up:
            await asyncio.sleep(0.01)
            await endings.close_unread()


async def until_ended(endings: UnreadCalls, count: int) -> None:
    """So many calls have their status, and none of them is over."""
    async with asyncio.timeout(30):
        while sum(context.done() for context in endings.calls) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def until_closed(caller: UnreadingCaller) -> None:
    async with asyncio.timeout(30):
        while True:
            await caller.receive(for_s=0.1)


@asynccontextmanager
async def serving(endings: UnreadCalls) -> AsyncIterator[Served]:
    server = grpc.aio.server(
        interceptors=(StatusInterceptor(GatewayMeters(), pushback_ms=7, open_calls=endings.calls),),
        maximum_concurrent_rpcs=PLACES,
    )
    server.add_generic_rpc_handlers((Talking(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.enable_retries", 0)]) as channel:
            yield Served(port, endings, channel)
    finally:
        await server.stop(0)


async def test_a_caller_that_reads_no_ends_is_hung_up_and_keeps_no_other_out() -> None:
    async with serving(UnreadCalls(max_unread=4, patience_s=0.0)) as served:
        assert await served.is_open()
        caller = await UnreadingCaller.connect(served.port)
        for _ in range(PLACES):
            caller.open(b"")
        await served.until_shut(caller)
        await until_ended(served.endings, PLACES)
        assert not await served.is_open()  # for ever, if nobody looked
        await until_hung_up(served.endings)
        await served.until_open()
        with pytest.raises(ConnectionError):
            await until_closed(caller)
        await served.endings.close_unread()
        assert served.endings.num_hung_up == 1
        with suppress(ConnectionError):
            await caller.close()


async def test_a_few_unread_ends_are_left_to_be_read() -> None:
    async with serving(UnreadCalls(max_unread=4, patience_s=0.0)) as served:
        caller = await UnreadingCaller.connect(served.port)
        streams = [caller.open(b"") for _ in range(4)]
        await until_ended(served.endings, 4)
        await served.endings.close_unread()
        for stream in streams:
            caller.take(stream, 1000)
        async with asyncio.timeout(30):
            while len(caller.trailers) < len(streams):
                await caller.receive(for_s=0.1)
        assert {caller.trailers[stream]["grpc-status"] for stream in streams} == {"8"}
        assert served.endings.num_hung_up == 0
        await caller.close()


async def test_the_connections_with_the_most_unread_ends_go_first() -> None:
    async with serving(UnreadCalls(max_unread=3, patience_s=0.0)) as served:
        modest, greedy = [await UnreadingCaller.connect(served.port) for _ in range(2)]
        kept = [modest.open(b"") for _ in range(2)]
        for _ in range(5):
            greedy.open(b"")
        await until_ended(served.endings, 7)
        await until_hung_up(served.endings)
        for stream in kept:
            modest.take(stream, 1000)
        async with asyncio.timeout(30):
            while len(modest.trailers) < len(kept):
                await modest.receive(for_s=0.1)
        assert served.endings.num_hung_up == 1
        await modest.close()
        with suppress(ConnectionError):
            await greedy.close()


def test_patience_is_for_those_whose_status_is_on_its_way() -> None:
    endings = UnreadCalls(max_unread=0, patience_s=2.0)

    class Call:
        def done(self) -> bool:
            return True

        def peer(self) -> str:
            return "ipv4:10.0.0.1:80"

    call = Call()
    endings.calls[call] = None  # type: ignore[index]
    assert endings.choose(10.0) == set()
    assert endings.choose(11.9) == set()
    assert endings.choose(12.0) == {Address("10.0.0.1", 80)}
    del endings.calls[call]  # type: ignore[arg-type]
    assert endings.choose(13.0) == set()


def test_peers_are_known_however_grpc_spells_them() -> None:
    assert address_of("ipv4:127.0.0.1:5000") == Address("127.0.0.1", 5000)
    assert address_of("ipv6:%5B::1%5D:5000") == address_of("ipv6:[0:0::1]:5000") == Address("::1", 5000)
    assert address_of("ipv6:[::ffff:10.0.0.1]:7") == Address("10.0.0.1", 7)
    assert address_of("unix:") is None
    assert address_of("unix:/run/octavo.sock") is None
