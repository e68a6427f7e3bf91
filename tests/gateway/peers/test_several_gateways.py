"""Three gateways of one service: what ends, drains or counts requests reaches those of all of them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog

from octavo.gateway.auth.authenticator import digest_of
from octavo.gateway.config import AccessConfig, PeerConfig
from octavo.gateway.peers import control
from octavo.v1 import admin_pb2, common_pb2, load_pb2
from octavo.v1 import inference_pb2 as pb
from tests.support.gateway.fake_pool import FakePool
from tests.support.gateway.rpc_errors import Refusal, refused

C = grpc.StatusCode
IDS = common_pb2.TokenIds(ids=[4])
Fleet = Callable[..., Any]


def socket_of(folder: Path, n: int) -> str:
    return f"ipc://{folder}/run/gateway-{n}.peers.sock"


@pytest.fixture
def fleet(serve: Any, tmp_path: Path) -> Fleet:
    """`async with fleet() as gateways`: three, each with a pool of its own, an address and an admin listener."""

    @asynccontextmanager
    async def serving(num: int = 3, *, absent: int = 0, **changes: Any) -> AsyncIterator[list[Any]]:
        endpoints = [socket_of(tmp_path, n) for n in range(num + absent)]
        async with AsyncExitStack() as stack:
            gateways = [
                await stack.enter_async_context(
                    serve(
                        FakePool(answers_cancels=False),
                        listen_address=f"unix:{tmp_path}/grpc-{n}.sock",
                        admin_address=f"unix:{tmp_path}/admin-{n}.sock",
                        peers=PeerConfig(endpoint=endpoints[n], others=tuple(endpoints)),
                        **changes,
                    )
                )
                for n in range(num)
            ]
            for each in gateways:
                heard = each.gateway.control._limits._states
                await each.until(lambda heard=heard: len(heard) == num - 1)
            yield gateways

    return serving


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who does not answer is named sooner; nobody who answers is near this limit."""
    monkeypatch.setattr(control, "TIMEOUT_S", 0.3)


def call(served: Any, method: str, request_id: str, metadata: Any = None) -> Any:
    """A request that its worker never answers."""
    generate = pb.GenerateRequest(request_id=request_id, token_ids=IDS)
    match method:
        case "Generate":
            return served.inference.Generate(generate, metadata=metadata)
        case "Complete":
            return served.inference.Complete(pb.CompleteRequest(generate=generate), metadata=metadata)
    inputs = [pb.EmbedInput(token_ids=IDS)]
    return served.inference.Embed(pb.EmbedRequest(request_id=request_id, inputs=inputs), metadata=metadata)


async def in_flight(gateways: list[Any], method: str, request_id: str) -> list["asyncio.Task[Refusal]"]:
    """One request of this id at each gateway."""
    tasks = [asyncio.ensure_future(refused(call(each, method, request_id))) for each in gateways]
    for each in gateways:
        await each.until(lambda each=each: each.pool.runs)
    return tasks


METHODS = ["Generate", "Complete", "Embed"]


@pytest.mark.parametrize("method", METHODS)
async def test_an_abort_reaches_the_requests_of_every_gateway(fleet: Fleet, method: str) -> None:
    async with fleet() as gateways:
        calls = await in_flight(gateways, method, "r1")
        response = await gateways[0].admin.Abort(admin_pb2.AbortRequest(request_id="r1"))
        assert response == admin_pb2.AbortResponse(found=True)
        assert [(each.code, each.reason) for each in await asyncio.gather(*calls)] == [(C.ABORTED, "ABORTED")] * 3
        for each in gateways:
            await each.until(lambda each=each: each.pool.cancelled)
            assert each.gateway.tracker.admission.counts().num_entered == 0
        again = await gateways[0].admin.Abort(admin_pb2.AbortRequest(request_id="r1"))
        assert again == admin_pb2.AbortResponse(found=False)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("at", [0, 2])
async def test_a_cancel_reaches_ones_own_request_wherever_it_is_and_may_be_repeated(
    fleet: Fleet, method: str, at: int
) -> None:
    async with fleet() as gateways:
        (ended,) = await in_flight([gateways[at]], method, "mine")
        first = await gateways[0].inference.Cancel(pb.CancelRequest(request_id="mine"))
        assert first == pb.CancelResponse(found=True)
        refusal = await ended
        assert (refusal.code, refusal.reason, refusal.request_id) == (C.ABORTED, "ABORTED", "mine")
        await gateways[at].until(lambda: gateways[at].gateway.tracker.admission.counts().num_entered == 0)
        assert gateways[at].pool.cancelled
        for each in gateways:
            again = await each.inference.Cancel(pb.CancelRequest(request_id="mine"))
            assert again == pb.CancelResponse(found=False)


async def test_a_cancel_reaches_a_request_that_is_still_tokenized(fleet: Fleet) -> None:
    async with fleet() as gateways:
        tracker = gateways[1].gateway.tracker

        async def never(work: Any, **_: Any) -> Any:
            await asyncio.sleep(60)

        gateways[1].gateway.text.run_steps = never
        ended = asyncio.ensure_future(
            refused(gateways[1].inference.Generate(pb.GenerateRequest(request_id="x", text="x")))
        )
        await gateways[1].until(lambda: tracker.admission.holds("x"))
        assert (await gateways[2].inference.Cancel(pb.CancelRequest(request_id="x"))).found
        assert (await ended).reason == "ABORTED"
        assert gateways[1].pool.runs == []


async def test_what_came_before_a_cancel_is_delivered(fleet: Fleet) -> None:
    async with fleet() as gateways:
        stream = gateways[1].inference.Generate(pb.GenerateRequest(request_id="r1", token_ids=IDS))
        await gateways[1].until(lambda: gateways[1].pool.runs)
        gateways[1].pool.runs[0].tokens([70, 71])
        assert (await gateways[0].inference.Cancel(pb.CancelRequest(request_id="r1"))).found
        refusal = await refused(stream)
    assert (refusal.code, refusal.tokens_delivered) == (C.ABORTED, 2)


async def test_a_cancel_needs_an_id(fleet: Fleet) -> None:
    async with fleet(1) as (served,):
        refusal = await refused(served.inference.Cancel(pb.CancelRequest()))
        assert (refusal.code, refusal.fields) == (C.INVALID_ARGUMENT, ("request_id",))


KEYS = {name: f"octavo-the-key-of-{name}-0123456789" for name in ("ann", "bob")}


def as_(name: str) -> tuple[tuple[str, str], ...]:
    return (("x-api-key", KEYS[name]),)


async def test_nobody_cancels_anothers_request_at_any_gateway(fleet: Fleet, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text("".join(f'[keys.{name}]\nsha256 = "{digest_of(key).hex()}"\n' for name, key in KEYS.items()))
    file.chmod(0o600)
    async with fleet(access=AccessConfig(api_keys_file=file)) as gateways:
        calls = {
            name: asyncio.ensure_future(refused(call(gateways[at], "Generate", "r1", as_(name))))
            for at, name in enumerate(KEYS)
        }
        for served in gateways[:2]:
            await served.until(lambda served=served: served.pool.runs)
        cancel = gateways[2].inference.Cancel
        assert (await refused(cancel(pb.CancelRequest(request_id="r1")))).code is C.UNAUTHENTICATED
        assert (await cancel(pb.CancelRequest(request_id="r1"), metadata=as_("bob"))).found
        assert (await calls["bob"]).reason == "ABORTED"
        assert not (await cancel(pb.CancelRequest(request_id="r1"), metadata=as_("bob"))).found
        assert gateways[0].gateway.tracker.admission.holds("ann\nr1")
        assert (await cancel(pb.CancelRequest(request_id="r1"), metadata=as_("ann"))).found
        assert (await calls["ann"]).reason == "ABORTED"


async def test_the_load_is_that_of_all_gateways(fleet: Fleet) -> None:
    async with fleet() as gateways:
        calls = await in_flight(gateways, "Generate", "r1")
        calls += await in_flight(gateways[1:2], "Generate", "r2")
        await gateways[1].until(lambda: len(gateways[1].pool.runs) == 2)
        load = await gateways[2].admin.GetLoad(admin_pb2.GetLoadRequest())
        rows = [(each.gateway, each.num_in_flight, each.num_preparing, each.is_draining) for each in load.gateways]
        assert rows == [("gateway-2", 1, 0, False), ("gateway-0", 1, 0, False), ("gateway-1", 2, 0, False)]
        assert [each.worker_id for each in load.workers] == ["w0"]
        assert list(load.unreachable_gateways) == []
        for request_id in ("r1", "r2"):
            await gateways[0].admin.Abort(admin_pb2.AbortRequest(request_id=request_id))
        await asyncio.gather(*calls)


async def first_snapshot(served: Any, **fields: Any) -> load_pb2.WatchLoadResponse:
    async for snapshot in served.load.WatchLoad(load_pb2.WatchLoadRequest(**fields)):
        return snapshot
    raise AssertionError("no snapshot came")


async def test_a_snapshot_is_of_all_gateways(fleet: Fleet) -> None:
    async with fleet() as gateways:
        calls = await in_flight(gateways, "Generate", "r1")
        calls += await in_flight(gateways[1:2], "Generate", "r2")
        await gateways[1].until(lambda: len(gateways[1].pool.runs) == 2)
        gateways[0].gateway.meters.of_model("tiny").generation_tokens += 30
        gateways[1].gateway.meters.of_model("tiny").time_to_first_token.observe(0.02)
        gateways[2].gateway.meters.of_model("tiny").time_to_first_token.observe(0.02)
        found = await first_snapshot(gateways[2], max_requests=10)
        assert found.gateway == "gateway-2"
        assert [(each.gateway, each.num_in_flight) for each in found.gateways] == [
            ("gateway-2", 1),
            ("gateway-0", 1),
            ("gateway-1", 2),
        ]
        assert (found.total.num_in_flight, found.total.num_waiting) == (4, 4)
        assert [each.figures.num_in_flight for each in found.models] == [4]
        assert sorted((each.gateway, each.request_id) for each in found.requests) == [
            ("gateway-0", "r1"),
            ("gateway-1", "r1"),
            ("gateway-1", "r2"),
            ("gateway-2", "r1"),
        ]
        assert found.total.time_to_first_token_s.num_values == 2
        assert found.total.generation_tokens_per_s == pytest.approx(30 / found.window_s)
        assert list(found.unreachable_gateways) == []
        for request_id in ("r1", "r2"):
            await gateways[0].admin.Abort(admin_pb2.AbortRequest(request_id=request_id))
        await asyncio.gather(*calls)


@pytest.mark.usefixtures("frozen_gateway")
async def test_a_gateway_that_does_not_answer_is_named_in_every_snapshot_and_once_in_the_log(fleet: Fleet) -> None:
    async with asyncio.timeout(60), fleet(absent=1) as gateways:
        with structlog.testing.capture_logs() as lines:
            call = gateways[0].load.WatchLoad(load_pb2.WatchLoadRequest(interval_s=0.2))
            snapshots = aiter(call)
            for _ in range(3):
                assert list((await anext(snapshots)).unreachable_gateways) == ["gateway-3"]
            call.cancel()
        assert [line["gateway"] for line in lines if line["event"] == "gateway_silent"] == ["gateway-3"]


async def test_a_drain_drains_all_gateways(fleet: Fleet) -> None:
    async with fleet() as gateways:
        calls = await in_flight(gateways, "Generate", "r1")
        response = await gateways[1].admin.Drain(admin_pb2.DrainRequest(grace_s=30))
        assert response == admin_pb2.DrainResponse(num_in_flight=3)
        for each in gateways:
            await each.until(lambda each=each: each.gateway.tracker.is_draining)
            assert not each.gateway.drained.is_set()
            refusal = await refused(each.inference.Generate(pb.GenerateRequest(token_ids=IDS)))
            assert (refusal.code, refusal.reason) == (C.UNAVAILABLE, "DRAINING")
        load = await gateways[0].admin.GetLoad(admin_pb2.GetLoadRequest())
        assert [each.is_draining for each in load.gateways] == [True] * 3
        for each in gateways:
            each.pool.runs[0].finish()
            await each.until(each.gateway.drained.is_set)
        for each in calls:
            each.cancel()


# ---------------------------------------------------------------- the vllm dialect


async def test_vllms_abort_reaches_every_gateway(fleet: Fleet) -> None:
    make_stub = pytest.importorskip("smg_grpc_proto").vllm_engine_pb2_grpc.VllmEngineStub

    from tests.support.gateway import vllm_calls
    from tests.support.gateway.vllm_calls import vllm

    async with fleet() as gateways:
        stubs = [make_stub(each.channel) for each in gateways]
        calls = []
        for n, stub in enumerate(stubs):
            request = vllm_calls.request()
            request.request_id = f"r{n}"
            calls.append(stub.Generate(request))
            await gateways[n].until(lambda n=n: gateways[n].pool.runs)
        ids = [*(f"unknown{n}" for n in range(600)), "r0", "r1", "r2"]
        await stubs[1].Abort(vllm.AbortRequest(request_ids=ids))
        for each in calls:
            assert [answer.complete.finish_reason async for answer in each] == ["abort"]
        for each in gateways:
            assert each.pool.cancelled


async def test_vllms_figures_are_those_of_all_gateways(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    make_stub = pytest.importorskip("smg_grpc_proto").vllm_engine_pb2_grpc.VllmEngineStub

    from tests.support.gateway.vllm_calls import vllm

    async with fleet() as gateways:
        calls = await in_flight(gateways, "Generate", "r1")
        stub = make_stub(gateways[0].channel)
        assert (await stub.GetServerInfo(vllm.GetServerInfoRequest())).active_requests == 3
        for each, rate in zip(gateways, (1.0, 2.0, 4.0), strict=True):
            monkeypatch.setattr(each.gateway.control, "_throughput", Constant(rate))
        (load,) = (await stub.GetLoads(vllm.GetLoadsRequest())).loads
        assert load.gen_throughput == 7.0
        await gateways[0].admin.Abort(admin_pb2.AbortRequest(request_id="r1"))
        await asyncio.gather(*calls)


class Constant:
    """A rate."""

    def __init__(self, rate: float) -> None:
        self._rate = rate

    def read(self, total: int, *, now_s: float) -> float:
        return self._rate


# ---------------------------------------------------------------- gateways that do not answer


@pytest.mark.usefixtures("impatient", "frozen_gateway")
async def test_callers_do_not_fill_the_log_while_a_gateway_is_silent(fleet: Fleet) -> None:
    async with asyncio.timeout(60), fleet(absent=1) as gateways:
        cancel, abort = pb.CancelRequest(request_id="r1"), admin_pb2.AbortRequest(request_id="r1")
        with structlog.testing.capture_logs() as lines:
            for _ in range(3):
                assert (await gateways[0].inference.Cancel(cancel)).num_unreachable_gateways == 1
            for _ in range(2):
                await gateways[0].admin.Abort(abort)
        asked = [line["asked"] for line in lines if line["event"] == "gateway_silent"]
        assert asked == ["PeerCancel", "PeerAbort", "PeerAbort"]


@pytest.mark.usefixtures("impatient", "frozen_gateway")
@pytest.mark.parametrize("absent", [1, 2], ids=["one is frozen", "and one is not there"])
async def test_a_gateway_that_does_not_answer_is_named_and_nobody_waits_for_it(fleet: Fleet, absent: int) -> None:
    silent = ["gateway-3", "gateway-4"][:absent]
    async with asyncio.timeout(60), fleet(absent=absent) as gateways:
        calls = await in_flight(gateways, "Generate", "r1")
        admin = gateways[0].admin
        with structlog.testing.capture_logs() as lines:
            load = await admin.GetLoad(admin_pb2.GetLoadRequest())
        assert list(load.unreachable_gateways) == silent
        assert [each.num_in_flight for each in load.gateways] == [1, 1, 1]
        assert [line["gateway"] for line in lines if line["event"] == "gateway_silent"] == silent
        mine = await gateways[1].inference.Cancel(pb.CancelRequest(request_id="r1"))
        assert mine == pb.CancelResponse(found=True, num_unreachable_gateways=absent)
        assert [each.reason for each in await asyncio.gather(*calls)] == ["ABORTED"] * 3
        abort = await admin.Abort(admin_pb2.AbortRequest(request_id="r1"))
        assert abort == admin_pb2.AbortResponse(found=False, unreachable_gateways=silent)
        drain = await admin.Drain(admin_pb2.DrainRequest())
        assert drain == admin_pb2.DrainResponse(num_in_flight=0, unreachable_gateways=silent)
        for each in gateways:
            await each.until(each.gateway.drained.is_set)


@pytest.mark.usefixtures("impatient")
async def test_a_drain_goes_on_though_the_operator_hangs_up(fleet: Fleet) -> None:
    async with fleet(1, absent=1) as (served,):
        asked = served.admin.Drain(admin_pb2.DrainRequest())
        await asyncio.sleep(0.1)
        asked.cancel()
        await served.until(served.gateway.drained.is_set)
