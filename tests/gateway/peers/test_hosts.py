"""Gateways of several hosts, here 127.0.0.1 and 127.0.0.2: limits that they share, names that stand for several of
them, and what is said of those that cannot be reached or should not be there."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
import zmq

from octavo.gateway.auth.authenticator import digest_of
from octavo.gateway.config import AccessConfig, PeerConfig, RequestLimits
from octavo.gateway.observability.meters import PEER_LOSSES
from octavo.gateway.observability.metrics import registry_of
from octavo.gateway.peers import control, limits, others, peers
from octavo.gateway.peers.peers import Asked, Peers
from octavo.openengine import openengine_pb2 as oe
from octavo.openengine import openengine_pb2_grpc as oe_grpc
from octavo.v1 import admin_pb2, common_pb2
from octavo.v1 import inference_pb2 as pb
from octavo.vllm import vllm_pb2 as vllm
from octavo.vllm import vllm_pb2_grpc as vllm_grpc
from octavo.wire.endpoints import EndpointError
from octavo.wire.keys import generate_keys, save_keys
from octavo.wire.peer_messages import PeerAskLoad, PeerReply, PeerUse, ToPeer
from tests.support.gateway.fake_pool import FakePool
from tests.support.gateway.rpc_errors import refused
from tests.support.services.service import free_port

try:
    import smg_grpc_proto as smg
except ImportError:  # the extra `vllm-dialect`
    smg = None

C = grpc.StatusCode
IDS = common_pb2.TokenIds(ids=[4])
KEY = "octavo-the-key-of-ann-0123456789"
AS_ANN = (("x-api-key", KEY),)
Hosts = Callable[..., Any]


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """The key file that all gateways of the service have."""
    return save_keys(generate_keys(), tmp_path, "gateway")[0]


def address(n: int) -> str:
    return f"tcp://127.0.0.{n + 1}:{free_port()}"


@pytest.fixture
def hosts(serve: Any, tmp_path: Path, pair: Path) -> Hosts:
    """`async with hosts() as gateways`: two that have met, each at an address of its own. absent: addresses that all of
    them are told of and nobody has."""

    @asynccontextmanager
    async def serving(
        num: int = 2, *, absent: tuple[str, ...] = (), tenant: str = "", **changes: Any
    ) -> AsyncIterator[list[Any]]:
        if tenant:
            file = tmp_path / "keys.toml"
            file.write_text(f'[keys.ann]\nsha256 = "{digest_of(KEY).hex()}"\n[tenants.ann]\n{tenant}')
            file.chmod(0o600)
            changes["access"] = AccessConfig(api_keys_file=file)
        endpoints = [address(n) for n in range(num)]
        async with AsyncExitStack() as stack:
            gateways = [
                await stack.enter_async_context(
                    serve(
                        FakePool(),
                        listen_address=f"unix:{tmp_path}/grpc-{n}.sock",
                        admin_address=f"unix:{tmp_path}/admin-{n}.sock",
                        peers=PeerConfig(endpoint=endpoints[n], others=(*endpoints, *absent), key_file=pair),
                        **changes,
                    )
                )
                for n in range(num)
            ]
            for each in gateways:
                await each.until(lambda each=each: met(each) == num - 1)
            yield gateways

    return serving


def met(served: Any) -> int:
    """Gateways that have told this one of their use."""
    return len(served.gateway.control._limits._heard)


async def begun(served: Any, request_id: str, *, max_tokens: int | None = None) -> Any:
    """A request of the tenant that its worker has and never answers."""
    num_before = len(served.pool.runs)
    stop = None if max_tokens is None else pb.StopConditions(max_tokens=max_tokens)
    request = pb.GenerateRequest(request_id=request_id, token_ids=IDS, stop=stop)
    call = served.inference.Generate(request, metadata=AS_ANN)
    await served.until(lambda: len(served.pool.runs) > num_before)
    return call


async def refusal_of(served: Any, *, max_tokens: int = 5) -> Any:
    request = pb.GenerateRequest(token_ids=IDS, stop=pb.StopConditions(max_tokens=max_tokens))
    return await refused(served.inference.Generate(request, metadata=AS_ANN))


def elsewhere(served: Any) -> int:
    """Outputs of the tenant that the others have told this gateway of."""
    return sum(each.use.num_in_flight for each in served.gateway.tracker.quotas._told.get("ann", {}).values())


# ---------------------------------------------------------------- limits


async def test_a_tenant_may_have_so_many_requests_at_all_gateways_together(hosts: Hosts) -> None:
    async with hosts(tenant="max_requests = 3") as (one, two):
        calls = [await begun(one, f"r{n}") for n in range(2)] + [await begun(two, "r2")]
        await one.until(lambda: elsewhere(one) == 1)
        await two.until(lambda: elsewhere(two) == 2)
        for served in (one, two):
            refusal = await refusal_of(served)
            assert (refusal.code, refusal.reason) == (C.RESOURCE_EXHAUSTED, "TENANT_LIMIT")
            assert "3 outputs are in flight, the limit of this tenant is 3" in refusal.message
        calls[0].cancel()
        await two.until(lambda: elsewhere(two) == 1)
        await begun(two, "r3")
        await one.until(lambda: elsewhere(one) == 2)
        assert (await refusal_of(one)).reason == "TENANT_LIMIT"


async def test_tokens_that_were_spent_at_one_are_missing_at_the_other(hosts: Hosts) -> None:
    async with hosts(tenant="tokens_per_minute = 60\nburst_tokens = 100") as (one, two):
        await begun(one, "r0", max_tokens=89)
        await two.until(lambda: two.gateway.tracker.quotas.uses(["ann"], 0)[0].num_lacking > 80)
        refusal = await refusal_of(two, max_tokens=60)
        assert (refusal.reason, refusal.pushback_ms > 1000) == ("TENANT_LIMIT", True)
        one.pool.runs[0].finish()  # what was not used comes back, here and there
        await two.until(lambda: two.gateway.tracker.quotas.uses(["ann"], 0)[0].num_lacking < 10)
        await begun(two, "r1", max_tokens=60)


async def test_the_service_may_have_so_many_requests_whoever_makes_them(hosts: Hosts) -> None:
    async with hosts(limits=RequestLimits(max_service_requests=2)) as (one, two):
        call = await begun(one, "r0")
        await begun(one, "r1")
        await two.until(lambda: two.gateway.tracker.admission.num_elsewhere == 2)
        refusal = await refusal_of(two)
        assert (refusal.code, refusal.reason) == (C.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert "the limit of the service is 2" in refusal.message
        call.cancel()
        await two.until(lambda: two.gateway.tracker.admission.num_elsewhere == 1)
        await begun(two, "r2")


async def test_what_a_gateway_held_is_free_when_it_stops(hosts: Hosts) -> None:
    async with hosts(tenant="max_requests = 2") as (one, two):
        for n in range(2):
            await begun(one, f"r{n}")
        await two.until(lambda: elsewhere(two) == 2)
        with structlog.testing.capture_logs() as lines:
            await one.gateway.stop()
            assert elsewhere(two) == 0  # by its farewell: it had five seconds left to be forgotten in
            # Nobody waits for it, or misses it: it has nothing in flight.
            done = await two.inference.Cancel(pb.CancelRequest(request_id="r0"), metadata=AS_ANN)
            assert done == pb.CancelResponse()
            assert two.gateway.control.figures().num_known == 0
        assert not {"peer_forgotten", "gateway_silent"} & {line["event"] for line in lines}
        await begun(two, "r2")


async def test_a_gateway_that_comes_back_after_its_leave_is_asked_again(pair: Path) -> None:
    one, two = address(0), address(1)
    first = Peers(PeerConfig(endpoint=one, others=(two,), key_file=pair), answering(0))
    configs = PeerConfig(endpoint=two, others=(one,), key_file=pair)
    second = Peers(configs, answering(7))
    question = PeerAskLoad(call_id=0)
    await first.start()
    await second.start()
    assert (await first.ask(question, timeout_s=30.0)).replies
    first.left(second.gateway_id)
    assert await first.ask(question, timeout_s=30.0) == Asked()
    await second.close()
    third = Peers(configs, answering(8))
    await third.start()
    await sweep(first, lambda: first.counts() == (1, 0))
    assert [each.num_in_flight for each in (await first.ask(question, timeout_s=30.0)).replies.values()] == [8]
    await asyncio.gather(first.close(), third.close())


async def test_what_a_gateway_held_is_free_when_it_is_gone(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FORGET_S", 1.5)
    async with hosts(tenant="max_requests = 2") as (one, two):
        for n in range(2):
            await begun(one, f"r{n}")
        await two.until(lambda: elsewhere(two) == 2)
        with structlog.testing.capture_logs() as lines:
            await one.gateway.control.peers.close()  # as its host loses its network
            assert (await refusal_of(two)).reason == "TENANT_LIMIT"
            await two.until(lambda: elsewhere(two) == 0)
        assert "peer_forgotten" in [line["event"] for line in lines]
        await begun(two, "r2")


# ---------------------------------------------------------------- what reaches all


async def test_aborts_drains_and_loads_reach_the_other_host(hosts: Hosts) -> None:
    nobody = address(2)
    async with hosts(absent=(nobody,)) as (one, two):
        name = nobody.removeprefix("tcp://")
        call = asyncio.ensure_future(refused(two.inference.Generate(pb.GenerateRequest(request_id="r", token_ids=IDS))))
        await two.until(lambda: two.pool.runs)
        load = await one.admin.GetLoad(admin_pb2.GetLoadRequest())
        assert ([each.num_in_flight for each in load.gateways], list(load.unreachable_gateways)) == ([0, 1], [name])
        done = await one.inference.Cancel(pb.CancelRequest(request_id="r"))
        assert done == pb.CancelResponse(found=True, num_unreachable_gateways=1)
        assert (await call).reason == "ABORTED"
        assert (await one.admin.Drain(admin_pb2.DrainRequest())).unreachable_gateways == [name]
        await two.until(two.gateway.drained.is_set)


async def test_dialects_abort_and_load_reach_the_other_host_and_tell_who_is_unreachable_in_a_trailer(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "TIMEOUT_S", 0.5)
    silent = ("x-unreachable-gateways", "1")
    async with hosts(absent=(address(2),)) as (one, two):

        async def in_flight() -> Any:
            num_before = len(two.pool.runs)
            request = pb.GenerateRequest(request_id="r", token_ids=IDS)
            call = asyncio.ensure_future(refused(two.inference.Generate(request)))
            await two.until(lambda: len(two.pool.runs) > num_before)
            return call

        native = vllm_grpc.ControlStub(one.channel)
        ended = await in_flight()
        call = native.Abort(vllm.AbortRequest(request_ids=["r", "s"]))
        assert silent in tuple(await call.trailing_metadata())
        assert (await ended).reason == "ABORTED"
        openengine = oe_grpc.ControlStub(one.channel)
        for request in (oe.AbortRequest(request_id="r"), oe.AbortRequest(all_requests=oe.AllRequests())):
            ended = await in_flight()
            call = openengine.Abort(request)
            assert (await call).status == oe.ABORT_STATUS_ABORTED
            assert silent in tuple(await call.trailing_metadata())
            assert (await ended).reason == "ABORTED"
        refusal = await refused(openengine.Abort(oe.AbortRequest(request_id="r")))
        assert refusal.message == "no such request is in flight; 1 gateway did not answer"
        if smg is not None:
            engine = smg.vllm_engine_pb2_grpc.VllmEngineStub(one.channel)
            messages = smg.vllm_engine_pb2
            for call in (
                engine.Abort(messages.AbortRequest(request_ids=["r"])),
                engine.GetServerInfo(messages.GetServerInfoRequest()),
                engine.GetLoads(messages.GetLoadsRequest()),
            ):
                assert silent in tuple(await call.trailing_metadata())


# ---------------------------------------------------------------- names


@pytest.fixture
def dns(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Addresses by name, as the cluster's DNS has them now; a name without a row is not known."""
    names: dict[str, list[str]] = {}

    def getaddrinfo(host: str, port: Any, **_: Any) -> list[tuple[Any, ...]]:
        if host not in names:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in names[host]]

    monkeypatch.setattr(others.socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(peers, "LOOK_UP_S", 0.05)
    return names


def answering(num_in_flight: int) -> Callable[[ToPeer], PeerReply]:
    return lambda question: PeerReply(call_id=0, gateway_id="", num_in_flight=num_in_flight)


async def sweep(each: Peers, condition: Callable[[], object]) -> None:
    """Tell the others again and again, as a gateway does, until something is true."""
    async with asyncio.timeout(60):
        while not condition():
            each.tell(PeerUse(call_id=0, gateway_id=each.gateway_id, number=1, is_sweep=True))
            await asyncio.sleep(0.05)


async def test_a_name_stands_for_all_gateways_that_have_it_as_they_come_and_go(
    dns: dict[str, list[str]], pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A headless Service: one list for all, this gateway itself among them."""
    monkeypatch.setattr(others, "SILENT_S", 1.0)
    port = free_port()
    configs = [
        PeerConfig(endpoint=f"tcp://127.0.0.{n}:{port}", others=(f"tcp://octavo-gateways:{port}",), key_file=pair)
        for n in (1, 2, 3)
    ]
    with structlog.testing.capture_logs() as lines:
        one, two, three = (Peers(each, answering(n)) for n, each in enumerate(configs))
        await one.start()
        await sweep(one, lambda: any(line["event"] == "peer_not_found" for line in lines))
        asked = await one.ask(PeerUse(call_id=0, gateway_id="", number=1, is_sweep=True), timeout_s=0.1)
        assert asked.silent == (f"tcp://octavo-gateways:{port}",)
        assert one.counts() == (1, 1)
        dns["octavo-gateways"] = ["127.0.0.1", "127.0.0.2"]
        await two.start()
        await sweep(one, lambda: one.counts() == (1, 0))
        dns["octavo-gateways"].append("127.0.0.3")
        await three.start()
        await sweep(one, lambda: one.counts() == (2, 0))
        await two.close()
        await sweep(one, lambda: one.counts() == (2, 1))  # as long as the name says that there is one
        dns["octavo-gateways"].remove("127.0.0.2")
        await sweep(one, lambda: one.counts() == (1, 0))
        del dns["octavo-gateways"]  # a resolver that is down ends nobody
        await sweep(one, lambda: sum(line["event"] == "peer_not_found" for line in lines) >= 2)
        assert one.counts() == (1, 0)
        await asyncio.gather(one.close(), three.close())
    told = [line["detail"] for line in lines if line["event"] == "peer_is_this_gateway"]
    assert f"tcp://127.0.0.1:{port} is this gateway itself: it is left out" in told
    first, *_ = [line["error"] for line in lines if line["event"] == "peer_not_found"]
    assert first.startswith(f"--peer-endpoint tcp://octavo-gateways:{port} cannot be looked up: ")


async def test_a_resolver_that_hangs_keeps_nobody_from_stopping(
    dns: dict[str, list[str]], pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    release = threading.Event()
    monkeypatch.setattr(others.socket, "getaddrinfo", lambda *_, **__: release.wait(60) and [])
    each = Peers(PeerConfig(endpoint=address(0), others=("tcp://slow:5556",), key_file=pair), answering(0))
    await each.start()
    await asyncio.sleep(0)
    await each.close()
    assert not release.is_set()
    release.set()


# ---------------------------------------------------------------- what is wrong


async def errors_of(config: PeerConfig, *, event: str, other: Peers | None = None) -> list[str]:
    """What a gateway with these others says, once it has said something."""
    each = Peers(config, answering(0))
    with structlog.testing.capture_logs() as lines:
        await each.start()
        if other is not None:
            await other.start()
        await sweep(each, lambda: any(line["event"] == event for line in lines))
        await each.close()
        if other is not None:
            await other.close()
    return [line["error"] for line in lines if line["event"] == event]


async def test_a_gateway_that_cannot_be_reached_is_named_with_the_reason_once(pair: Path, tmp_path: Path) -> None:
    nobody, stranger = address(1), address(2)
    other_pair = save_keys(generate_keys(), tmp_path, "stranger")[0]
    other = Peers(PeerConfig(endpoint=stranger, key_file=other_pair), answering(0))
    for place, reason in (
        (nobody, "nobody listens there, or the network lets nothing through"),
        (
            stranger,
            "it refuses this gateway's key or has another: all gateways of a service have one --gateway-key-file",
        ),
    ):
        config = PeerConfig(endpoint=address(0), others=(place,), key_file=pair)
        (error,) = await errors_of(config, event="gateway_unreachable", other=other if place == stranger else None)
        assert error.startswith(f"{place} has not answered for ")
        assert error.endswith(reason)


async def test_a_gateway_that_takes_questions_and_answers_none_is_told_apart(pair: Path) -> None:
    def dumb(question: ToPeer) -> PeerReply:
        raise RuntimeError("of another release")

    place = address(1)
    config = PeerConfig(endpoint=address(0), others=(place,), key_file=pair)
    other = Peers(PeerConfig(endpoint=place, key_file=pair), dumb)
    (error,) = await errors_of(config, event="gateway_unreachable", other=other)
    assert error.endswith("it is connected and does not answer: it is frozen, or no gateway of this release")


@pytest.mark.parametrize("place", ["tcp://0.0.0.0:5556", "tcp://[::]:5556", "tcp://10.0.0.1:0"])
async def test_an_address_that_nobody_can_dial_is_refused_at_the_start(place: str, pair: Path) -> None:
    each = Peers(PeerConfig(endpoint=address(0), others=(place,), key_file=pair), answering(0))
    with pytest.raises(EndpointError, match=f"--peer-endpoint .*{place[-6:]}: nobody can be reached"):
        await each.start()


async def test_gateways_of_other_releases_and_models_and_those_that_are_told_nothing_are_named(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "FORGET_S", 0.0)
    async with hosts(1, expected_models=("tiny",)) as (served,):
        own = served.gateway.control
        use = PeerUse(
            call_id=0, gateway_id="x", number=1, name="g1", release="9.9", models=("big", "tiny"), is_sweep=True
        )
        with structlog.testing.capture_logs() as lines:
            assert own.answer(use) == PeerReply(call_id=0, gateway_id="")
            own.answer(PeerUse(call_id=0, gateway_id="x", number=2, name="g1", release="9.9", is_sweep=True))
            own._look_who_is_told(10**19)
            own._look_who_is_told(10**19)
        errors = {line["event"]: line["error"] for line in lines if "error" in line}
        assert [line["event"] for line in lines] == [
            "peer_met", "peer_of_another_release", "peer_of_other_models", "peer_not_told",
        ]  # fmt: skip
    assert errors["peer_of_another_release"].startswith("gateway g1 is of release 9.9, this one of ")
    assert errors["peer_of_other_models"] == (
        "gateway g1 expects big, tiny, and this one tiny: gateways of one service have the same models"
    )
    assert errors["peer_not_told"] == (
        "gateway g1 knows this one and is not among its --peer-endpoint: it is told nothing here"
    )


# ---------------------------------------------------------------- metrics


async def test_metrics_tell_how_many_gateways_there_are_and_how_old_their_news_is(hosts: Hosts) -> None:
    async with hosts(3, absent=(address(4),)) as gateways:
        served = gateways[0]

        def values() -> tuple[float | None, ...]:
            served.gateway.ticker.take_gauges()
            registry = registry_of(served.gateway.collector)
            names = ("octavo_gateway_peers", "octavo_gateway_peers_unreachable")
            return tuple(registry.get_sample_value(name) for name in names)

        known = served.gateway.control.peers._others.values()
        await served.until(lambda: sum(bool(other.gateway_id) for other in known) == 2)
        for other in known:
            if not other.gateway_id:
                other._last_s -= 10.0
        assert values() == (3, 1)
        age_s = registry_of(served.gateway.collector).get_sample_value("octavo_gateway_peer_news_age_seconds")
        assert age_s is not None
        assert 0 <= age_s < 60


async def test_metrics_tell_what_was_lost_between_gateways(hosts: Hosts) -> None:
    """One that nobody ever reaches."""
    async with hosts(absent=(address(4),)) as (served, _):

        def lost() -> dict[str, float]:
            served.gateway.ticker.take_gauges()
            registry = registry_of(served.gateway.collector)
            name = "octavo_gateway_peer_losses_total"
            return {kind: registry.get_sample_value(name, {"lost": kind}) or 0.0 for kind in PEER_LOSSES}

        await served.until(lambda: lost()["gateway"] == 1)
        before = lost()
        assert before["message"] >= 1
        await served.admin.Abort(admin_pb2.AbortRequest(request_id="r"))
        assert lost()["answer"] == before["answer"] + 1
        assert lost()["gateway"] == 1


async def test_what_a_gateway_of_another_wire_sends_is_told_once(pair: Path, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/run/gateway-0.peers.sock"
    each = Peers(PeerConfig(endpoint=endpoint), answering(0))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with structlog.testing.capture_logs() as lines:
        await each.start()
        stranger = context.socket(zmq.DEALER)
        stranger.connect(endpoint)
        for frame in (b"\x02old", b"\x02old", b"\x02new", b"\x01\x80"):
            stranger.send(frame)
        await sweep(each, lambda: len(lines) >= 2)
        await each.close()
    context.destroy(linger=0)
    first, second = [line["error"] for line in lines if line["event"] == "peer_message_dropped"]
    told = "a gateway of another release, or no gateway, sends what this one does not know: "
    assert first == f"{told}wire version 2, this side speaks 1"
    assert second.startswith(f"{told}malformed message")


async def test_the_list_of_others_is_a_file_that_changes_while_they_serve(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is placed anew has another address; the former one is given up once nobody answers there."""
    monkeypatch.setattr(others, "SILENT_S", 1.0)
    one, two, three = address(0), address(1), address(2)
    file = tmp_path / "peers"
    file.write_text(f"{one}\n{two}\n")
    first = Peers(PeerConfig(endpoint=one, others_file=file, key_file=pair), answering(0))
    second = Peers(PeerConfig(endpoint=two, others=(one,), key_file=pair), answering(7))
    third = Peers(PeerConfig(endpoint=three, others=(one,), key_file=pair), answering(8))
    await first.start()
    await second.start()
    await sweep(first, lambda: first.told_ids() == {second.gateway_id})
    await second.close()
    await third.start()
    file.write_text("not an address\n")  # changes nothing
    await sweep(first, lambda: first.counts() == (1, 1))
    file.write_text(f"{one}\n{three}\n")
    await sweep(first, lambda: first.told_ids() == {third.gateway_id})
    assert first.counts() == (1, 0)
    answers = (await first.ask(PeerAskLoad(call_id=0), timeout_s=30.0)).replies
    assert [each.num_in_flight for each in answers.values()] == [8]
    await asyncio.gather(first.close(), third.close())
