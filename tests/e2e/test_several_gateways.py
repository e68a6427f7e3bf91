"""`octavo serve --gateways 3`: one service, whichever of its processes takes a connection."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import psutil
import pytest

from octavo import AsyncClient, AsyncTextStream, Cancelled, OctavoError
from octavo.cli.main import main
from octavo.v1 import admin_pb2, admin_pb2_grpc
from tests.support.services.service import Service, launch, serve

ORACLE = ("--runner=oracle", "--model=one=x", "--oracle-eos-every=1000000", "--oracle-step-delay-s=0.02")
NUM_STREAMS = 8
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)


@asynccontextmanager
async def admin_of(service: Service) -> AsyncIterator[admin_pb2_grpc.AdminServiceStub]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{service.admin_port}") as channel:
        yield admin_pb2_grpc.AdminServiceStub(channel)


async def in_flight(admin: admin_pb2_grpc.AdminServiceStub) -> list[int]:
    """Requests at each gateway."""
    load = await admin.GetLoad(admin_pb2.GetLoadRequest(), timeout=60)
    return [each.num_in_flight for each in load.gateways]


async def streams_everywhere(service: Service, stack: AsyncExitStack) -> dict[str, AsyncTextStream]:
    """Long streams by their ids, each on a connection of its own, until every gateway has one; at least eight."""
    streams: dict[str, AsyncTextStream] = {}
    admin = await stack.enter_async_context(admin_of(service))
    while len(streams) < NUM_STREAMS or not all(await in_flight(admin)):
        assert len(streams) < 200, "connections never reach every gateway"
        client = await stack.enter_async_context(AsyncClient(service.target, options=OWN_CONNECTION))
        name = f"r{len(streams)}"
        streams[name] = client.stream(
            token_ids=[1, 2, 3], max_tokens=20_000, ignore_eos=True, output="token_ids", request_id=name
        )
        await anext(aiter(streams[name].deltas()))
    return streams


async def end_of(stream: AsyncTextStream) -> str:
    try:
        async for _ in stream.deltas():
            pass
    except OctavoError as error:
        return error.reason
    return "finished"


@pytest.mark.alone
async def test_aborts_cancels_and_the_load_reach_all_of_three_gateways(tmp_path: Path) -> None:
    with serve(tmp_path, "--gateways=3", *ORACLE) as service:
        service.wait_until_supervised()
        async with AsyncExitStack() as stack:
            streams = await streams_everywhere(service, stack)
            admin = await stack.enter_async_context(admin_of(service))
            assert sum(await in_flight(admin)) == len(streams)
            names = iter(streams)
            for _ in range(NUM_STREAMS // 2):
                name = next(names)
                assert (await admin.Abort(admin_pb2.AbortRequest(request_id=name), timeout=60)).found
                assert await end_of(streams[name]) == "ABORTED"
            caller = await stack.enter_async_context(AsyncClient(service.target, options=OWN_CONNECTION))
            for name in names:
                assert (await caller.cancel(name)).found
                assert await end_of(streams[name]) == "ABORTED"
                assert not (await caller.cancel(name)).found
            service.wait_until_idle()
            assert await in_flight(admin) == [0, 0, 0]


@pytest.mark.alone
async def test_a_frozen_gateway_is_named_and_a_drain_ends_the_whole_service(tmp_path: Path) -> None:
    with launch(tmp_path, "--gateways=3", *ORACLE) as service:
        service.wait_until_supervised()
        async with AsyncExitStack() as stack:
            admin = await stack.enter_async_context(admin_of(service))
            frozen = process_of(service, "gateway-2")
            os.kill(frozen.pid, signal.SIGSTOP)
            load = await admin.GetLoad(admin_pb2.GetLoadRequest(), timeout=60)
            assert ([each.gateway for each in load.gateways], list(load.unreachable_gateways)) == (
                ["gateway-0", "gateway-1"],
                ["gateway-2"],
            )
            os.kill(frozen.pid, signal.SIGCONT)
            streams = await streams_everywhere(service, stack)
            ends = [asyncio.create_task(end_of(stream)) for stream in streams.values()]
            response = await admin.Drain(admin_pb2.DrainRequest(grace_s=0.1), timeout=60)
            assert response == admin_pb2.DrainResponse(num_in_flight=len(streams))
            assert set(await asyncio.gather(*ends)) == {"DRAINING"}
        assert await asyncio.to_thread(service.process.wait, 60) == 0, service.log.read_text()[-4000:]


def process_of(service: Service, name: str) -> psutil.Process:
    """The process that was given this gateway's settings."""
    return next(each for each in service.children("gateway") if any(name in word for word in each.cmdline()))


@pytest.mark.alone
async def test_the_command_cancels_a_request_of_another_connection(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with serve(tmp_path, "--gateways=2", *ORACLE) as service:
        service.wait_until_supervised()
        async with AsyncClient(service.target) as client:
            stream = client.stream(token_ids=[1], max_tokens=20_000, output="token_ids", request_id="mine")
            await anext(aiter(stream.deltas()))
            command = ["cancel", "mine", "--port", str(service.port)]
            assert await asyncio.to_thread(main, command) == 0
            with pytest.raises(Cancelled):
                async for _ in stream.deltas():
                    pass
            assert await asyncio.to_thread(main, command) == 1
        assert capsys.readouterr().out == "cancelled\nnot in flight\n"
