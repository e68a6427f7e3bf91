"""Three gateways of one service: what ends, drains or counts requests reaches those of all of them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
import zmq

from octavo.gateway.auth.authenticator import digest_of
from octavo.gateway.config import AccessConfig, PeerConfig
from octavo.gateway.peers import control, others
from octavo.gateway.peers.others import name_of
from octavo.gateway.peers.peers import Peers
from octavo.v1 import admin_pb2, common_pb2, load_pb2
from octavo.v1 import inference_pb2 as pb
from octavo.wire.endpoints import EndpointError
from octavo.wire.keys import generate_keys, save_keys
from octavo.wire.peer_messages import PeerAbort, PeerAskLoad, PeerReply, ToPeer
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
                heard = each.gateway.control._limits._heard
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


@pytest.mark.usefixtures("frozen")
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


@pytest.fixture
def frozen(tmp_path: Path) -> Iterator[None]:
    """What stands at gateway 3's socket takes every question and answers none."""
    (tmp_path / "run").mkdir(mode=0o700)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.bind(socket_of(tmp_path, 3))
    yield
    context.destroy(linger=0)


@pytest.mark.usefixtures("impatient", "frozen")
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


# ---------------------------------------------------------------- the sockets between them


def answers(name: str) -> Callable[[ToPeer], PeerReply]:
    """A gateway's side: seven requests."""
    return lambda question: PeerReply(call_id=0, gateway_id="", num_in_flight=7)


@asynccontextmanager
async def peers(*configs: PeerConfig) -> AsyncIterator[list[Peers]]:
    async with AsyncExitStack() as stack:
        made = []
        for config in configs:
            each = Peers(config, answers(config.endpoint))
            await each.start()
            stack.push_async_callback(each.close)
            made.append(each)
        yield made


async def ask(each: Peers, timeout_s: float = 30.0) -> tuple[dict[str, int], tuple[str, ...]]:
    """Names with their answers, and who was silent."""
    asked = await each.ask(PeerAskLoad(call_id=0), timeout_s=timeout_s)
    return {name: reply.num_in_flight for name, reply in asked.replies.items()}, asked.silent


async def asked_until(each: Peers, answers: tuple[dict[str, int], tuple[str, ...]]) -> None:
    async with asyncio.timeout(60):
        while (await ask(each)) != answers:  # noqa: ASYNC110  (no event tells when others are connected)
            await asyncio.sleep(0.01)


async def test_one_list_serves_all_gateways_and_nobody_counts_itself(tmp_path: Path) -> None:
    """Also where it does not know its own address in the list."""
    alias = tmp_path / "alias"
    (tmp_path / "run").mkdir(mode=0o700)
    alias.symlink_to(tmp_path / "run")
    both = (socket_of(tmp_path, 0), socket_of(tmp_path, 1), f"ipc://{alias}/gateway-0.peers.sock")
    configs = [PeerConfig(endpoint=each, others=both) for each in both[:2]]
    async with peers(*configs) as (first, second):
        assert await ask(first) == ({"gateway-1": 7}, ())
        assert await ask(second) == ({"gateway-0": 7}, ())


async def test_a_gateway_that_starts_late_or_again_is_reached(tmp_path: Path) -> None:
    one, two = socket_of(tmp_path, 0), socket_of(tmp_path, 1)
    async with asyncio.timeout(60), peers(PeerConfig(endpoint=one, others=(two,))) as (first,):
        assert await ask(first, 0.1) == ({}, ("gateway-1",))
        waiting = asyncio.create_task(ask(first))
        async with peers(PeerConfig(endpoint=two, others=(one,))):
            assert await waiting == ({"gateway-1": 7}, ())
        async with peers(PeerConfig(endpoint=two, others=(one,))):
            await asked_until(first, ({"gateway-1": 7}, ()))


async def test_nobody_waits_for_a_gateway_that_is_known_to_be_down(tmp_path: Path) -> None:
    """It answered, and then died without a farewell. What it was asked meanwhile it does if it is back in time."""
    one, two = socket_of(tmp_path, 0), socket_of(tmp_path, 1)
    is_aborted = asyncio.Event()

    def answer(question: ToPeer) -> PeerReply:
        if question == PeerAbort(call_id=question.call_id, request_id="r"):
            is_aborted.set()
        return PeerReply(call_id=0, gateway_id="")

    async with asyncio.timeout(60), peers(PeerConfig(endpoint=one, others=(two,))) as (first,):
        async with peers(PeerConfig(endpoint=two, others=(one,))):
            assert await ask(first) == ({"gateway-1": 7}, ())
        for _ in range(2):
            asked = await first.ask(PeerAbort(call_id=0, request_id="r"), timeout_s=600.0)
            assert (asked.replies, asked.silent) == ({}, ("gateway-1",))
        again = Peers(PeerConfig(endpoint=two, others=(one,)), answer)
        await again.start()
        await asked_until(first, ({"gateway-1": 0}, ()))
        await is_aborted.wait()
        await again.close()


@pytest.mark.usefixtures("frozen")
async def test_nobody_waits_longer_for_a_gateway_that_freezes_than_until_it_counts_as_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(others, "SILENT_S", 0.5)
    configs = [PeerConfig(endpoint=socket_of(tmp_path, 0), others=(socket_of(tmp_path, 1), socket_of(tmp_path, 3)))]
    configs.append(PeerConfig(endpoint=socket_of(tmp_path, 1)))
    async with asyncio.timeout(60), peers(*configs) as (first, _):
        for _ in range(3):
            assert await ask(first, timeout_s=600.0) == ({"gateway-1": 7}, ("gateway-3",))


async def test_garbage_at_the_socket_changes_nothing(tmp_path: Path) -> None:
    one, two = socket_of(tmp_path, 0), socket_of(tmp_path, 1)
    async with peers(PeerConfig(endpoint=one, others=(two,)), PeerConfig(endpoint=two, others=(one,))) as (first, _):
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.connect(two)
        for frames in ([b""], [b"\x01\x80"], [b"a", b"b"], [b"\x01" + b"\x91" * 1000], [b"x" * 2_000_000]):
            stranger.send_multipart(frames)
        assert await ask(first) == ({"gateway-1": 7}, ())
        context.destroy(linger=0)


async def test_over_tcp_gateways_know_each_other_by_the_pair_that_they_share(tmp_path: Path) -> None:
    pair, _ = save_keys(generate_keys(), tmp_path, "gateway")
    other, _ = save_keys(generate_keys(), tmp_path, "stranger")
    from tests.support.services.service import free_port

    one, two = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    ours = PeerConfig(endpoint=one, others=(two,), key_file=pair)
    async with peers(ours, PeerConfig(endpoint=two, others=(one,), key_file=pair)) as (first, second):
        assert await ask(first) == ({name_of(two): 7}, ())
        assert await ask(second) == ({name_of(one): 7}, ())
        third = PeerConfig(endpoint=socket_of(tmp_path, 3), others=(one,), key_file=other)
        async with peers(third) as (stranger,):
            assert await ask(stranger, 0.5) == ({}, (name_of(one),))


@pytest.mark.parametrize(
    ("endpoint", "others", "words"),
    [
        ("tcp://127.0.0.1:7000", (), "--gateway-key-file"),
        ("ipc:///run/o/a.sock", ("tcp://10.0.0.1:7000",), "tcp://10.0.0.1:7000.*--gateway-key-file"),
        ("nonsense", (), "nonsense"),
        ("", ("ipc:///run/o/b.sock",), "--peer-endpoint needs --control-endpoint"),
    ],
)
async def test_what_cannot_be_is_told_at_the_start(endpoint: str, others: tuple[str, ...], words: str) -> None:
    each = Peers(PeerConfig(endpoint=endpoint, others=others), answers(""))
    with pytest.raises((EndpointError, ValueError), match=words):
        await each.start()
    await each.close()


@pytest.mark.parametrize(
    ("endpoint", "name"),
    [("ipc:///run/octavo/gateway-12.peers.sock", "gateway-12"), ("tcp://10.0.0.1:7000", "10.0.0.1:7000")],
)
def test_a_gateway_is_named_after_where_it_is_reached(endpoint: str, name: str) -> None:
    assert name_of(endpoint) == name
