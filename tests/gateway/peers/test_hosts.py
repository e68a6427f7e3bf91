"""Gateways of several hosts: limits that they share, what reaches all of them, and what metrics tell of the others."""

import asyncio
from typing import Any

import grpc
import pytest
import structlog

from octavo.gateway.config import RequestLimits
from octavo.gateway.observability.meters import PEER_LOSSES
from octavo.gateway.observability.metrics import registry_of
from octavo.gateway.peers import control, limits
from octavo.openengine import openengine_pb2 as oe
from octavo.openengine import openengine_pb2_grpc as oe_grpc
from octavo.v1 import admin_pb2
from octavo.v1 import inference_pb2 as pb
from octavo.vllm import vllm_pb2 as vllm
from octavo.vllm import vllm_pb2_grpc as vllm_grpc
from tests.support.gateway.hosts import AS_ANN, IDS, Hosts, address, begun, elsewhere, refusal_of
from tests.support.gateway.rpc_errors import refused

try:
    import smg_grpc_proto as smg
except ImportError:  # the extra `vllm-dialect`
    smg = None

C = grpc.StatusCode


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
        call = openengine.Abort(oe.AbortRequest(request_id="r"))
        refusal = await refused(call)
        assert refusal.message == "no such request is in flight; 1 gateway did not answer"
        assert refusal.reason == "REQUEST_NOT_FOUND"
        assert silent in tuple(await call.trailing_metadata())
        if smg is not None:
            engine = smg.vllm_engine_pb2_grpc.VllmEngineStub(one.channel)
            messages = smg.vllm_engine_pb2
            for call in (
                engine.Abort(messages.AbortRequest(request_ids=["r"])),
                engine.GetServerInfo(messages.GetServerInfoRequest()),
                engine.GetLoads(messages.GetLoadsRequest()),
            ):
                assert silent in tuple(await call.trailing_metadata())


# ---------------------------------------------------------------- metrics


async def test_metrics_tell_how_many_gateways_there_are_and_how_old_their_news_is(hosts: Hosts) -> None:
    async with hosts(3, absent=(address(4),)) as gateways:
        served = gateways[0]

        def values() -> tuple[float | None, ...]:
            served.gateway.ticker.set_gauges()
            registry = registry_of(served.gateway.collector)
            names = ("octavo_gateway_peers", "octavo_gateway_peers_unreachable")
            return tuple(registry.get_sample_value(name) for name in names)

        known = served.gateway.control.peers._links.values()
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
            served.gateway.ticker.set_gauges()
            registry = registry_of(served.gateway.collector)
            name = "octavo_gateway_peer_losses_total"
            return {kind: registry.get_sample_value(name, {"lost": kind}) or 0.0 for kind in PEER_LOSSES}

        await served.until(lambda: lost()["gateway"] == 1)
        before = lost()
        assert before["message"] >= 1
        await served.admin.Abort(admin_pb2.AbortRequest(request_id="r"))
        assert lost()["answer"] == before["answer"] + 1
        assert lost()["gateway"] == 1
