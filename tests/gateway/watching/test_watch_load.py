"""WatchLoad over a real channel: what a snapshot says, when it comes, and when the call ends."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from octavo import AsyncClient, Client, Unavailable
from octavo.gateway.auth.authenticator import digest_of
from octavo.gateway.config import AccessConfig, RequestLimits
from octavo.gateway.watching import part, watch
from octavo.gateway.workers.queries import WorkerDetails
from octavo.gateway.workers.views import WorkerState
from octavo.v1 import admin_pb2, common_pb2
from octavo.v1 import inference_pb2 as pb
from octavo.v1 import load_pb2 as load
from octavo.wire.messages import HostBlocks, OutputPhase
from tests.support.gateway.fake_pool import FakePool, worker_view
from tests.support.gateway.rpc_errors import refused

C = grpc.StatusCode
IDS = common_pb2.TokenIds(ids=[4, 5, 6])


def request(request_id: str = "r1", **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(request_id=request_id, token_ids=IDS, **fields)


async def snapshot(served: Any, metadata: Any = None, **fields: Any) -> load.WatchLoadResponse:
    """The first of a watch."""
    await asyncio.sleep(watch.SHARE_S)  # what another caller was told before is old then
    call = served.load.WatchLoad(load.WatchLoadRequest(**fields), metadata=metadata)
    async for each in call:
        call.cancel()
        return each
    raise AssertionError("no snapshot came")


def look(worker_id: str = "w0", **changes: Any) -> WorkerDetails:
    fields: dict[str, Any] = {
        "worker_id": worker_id,
        "epoch": "e1",
        "cells_C": np.array([3] * 4 + [2] * 4 + [1] * 56, np.uint8),
        "blocks_per_cell": 1,
        "num_shared_blocks": 0,
        "held": {},
    }
    return WorkerDetails(**fields | changes)


async def test_a_snapshot_has_every_request_and_every_worker(serve: Any) -> None:
    pool = FakePool(views=[worker_view("w0", num_running=1, num_waiting=2, num_paused=3), worker_view("w1")])
    async with serve(pool) as served:
        call = served.inference.Generate(request())
        await served.until(lambda: pool.runs)
        queued = await snapshot(served, max_requests=10)
        assert [each.phase for each in queued.requests] == [load.REQUEST_PHASE_QUEUED]
        pool.runs[0].sink.on_started()
        begun = await snapshot(served, max_requests=10)
        assert [each.phase for each in begun.requests] == [load.REQUEST_PHASE_PREFILL]
        pool.runs[0].tokens([70, 71])
        pool.details = [look(held={1: (OutputPhase.DECODE, 7)})]
        await asyncio.sleep(part.REST_S)
        found = await snapshot(served, max_requests=10)
        (row,) = found.requests
        assert row.age_s > 0
        row.age_s = 0
        assert row == load.RequestSnapshot(
            request_id="r1",
            model="tiny",
            phase=load.REQUEST_PHASE_DECODE,
            num_prompt_tokens=3,
            num_output_tokens=2,
            num_blocks=7,
            worker_id="w0",
            gateway="gateway",
            num_outputs=1,
        )
        assert (found.total.num_in_flight, found.total.num_running, found.total.num_preparing) == (1, 1, 0)
        (model,) = found.models
        assert (model.model, model.num_workers, model.figures.num_running) == ("tiny", 2, 1)
        assert model.blocks == load.KvBlocks(num_blocks=128, num_free=120, num_cached=8)
        first, second = found.workers
        assert (first.worker_id, first.num_running, first.num_waiting, first.num_paused) == ("w0", 1, 2, 3)
        assert (second.worker_id, second.condition) == ("w1", load.WORKER_CONDITION_READY)
        assert not first.HasField("block_map")
        assert [each.gateway for each in found.gateways] == ["gateway"]
        assert list(found.tenants) == []
        call.cancel()


async def test_rates_and_percentiles_are_those_of_what_callers_got(serve: Any) -> None:
    pool = FakePool(on_run=lambda run: (run.sink.on_started(), run.tokens([70, 71, 72]), run.finish()))
    async with serve(pool) as served:
        for n in range(5):
            assert [event async for event in served.inference.Generate(request(f"r{n}"))]
        found = await snapshot(served)
        for figures in (found.total, found.models[0].figures):
            assert figures.generation_tokens_per_s == pytest.approx(15 / found.window_s)
            assert figures.prompt_tokens_per_s == pytest.approx(15 / found.window_s)
            assert figures.finished_per_s == pytest.approx(5 / found.window_s)
            assert figures.time_to_first_token_s.num_values == 5
            assert 0 < figures.time_to_first_token_s.p50 <= figures.time_to_first_token_s.p99
            assert figures.queue_s.num_values == 5
            assert not figures.HasField("inter_token_s")  # one message each
        assert found.gateways[0].generation_tokens_per_s == pytest.approx(15 / found.window_s)


async def test_a_block_map_comes_in_runs_and_within_what_was_asked_for(serve: Any) -> None:
    pool = FakePool(details=[look(num_shared_blocks=2)])
    async with serve(pool) as served:
        (worker,) = (await snapshot(served, max_block_cells=64)).workers
        states = [load.BLOCK_STATE_ACTIVE, load.BLOCK_STATE_CACHED, load.BLOCK_STATE_FREE]
        assert worker.block_map == load.BlockMap(blocks_per_cell=1, states=states, lengths=[4, 4, 56])
        assert worker.blocks.num_shared == 2
        assert pool.queries[-1] == {"max_cells": 64, "max_outputs": 0}
        (worker,) = (await snapshot(served, max_block_cells=10)).workers
        assert worker.block_map == load.BlockMap(blocks_per_cell=7, states=states, lengths=[1, 1, 8])


async def test_the_second_tier_arrives_with_the_map_and_only_where_there_is_one(serve: Any) -> None:
    states = [load.HOST_BLOCK_STATE_COPYING, load.HOST_BLOCK_STATE_SWAPPED, load.HOST_BLOCK_STATE_FREE]
    host = HostBlocks(
        num_blocks=9, num_free=4, num_cached=1, num_swapped=3, blocks_per_cell=2, cells=bytes([4, 3, 3, 1, 1])
    )
    pool = FakePool(views=[worker_view("w0"), worker_view("w1")], details=[look(host=host), look("w1")])
    async with serve(pool) as served:
        with_tier, without = (await snapshot(served, max_block_cells=64)).workers
        assert with_tier.host_blocks == load.HostKvBlocks(
            num_blocks=9, num_free=4, num_cached=1, num_swapped=3, num_copying=1
        )
        assert with_tier.host_block_map == load.HostBlockMap(blocks_per_cell=2, states=states, lengths=[1, 2, 2])
        assert without.HasField("block_map")
        assert not without.HasField("host_blocks")
        assert not without.HasField("host_block_map")
        fewer, _ = (await snapshot(served, max_block_cells=3)).workers
        assert fewer.host_block_map == load.HostBlockMap(blocks_per_cell=4, states=states, lengths=[1, 1, 1])
        nothing, _ = (await snapshot(served, max_requests=1)).workers
        assert not nothing.HasField("host_blocks")


async def test_maps_of_a_former_life_and_of_the_silent_are_not_shown(serve: Any) -> None:
    pool = FakePool(views=[worker_view("w0"), worker_view("w1", epoch="e2")], details=[look("w1")])
    async with serve(pool) as served:
        found = await snapshot(served, max_block_cells=64)
        assert [each.HasField("block_map") for each in found.workers] == [False, False]


async def test_a_lost_worker_is_shown_as_lost_until_it_is_back(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = FakePool(views=[worker_view("w0"), worker_view("w1", state=WorkerState.DRAINING)])
    async with serve(pool) as served:
        assert [each.condition for each in (await snapshot(served)).workers] == [
            load.WORKER_CONDITION_READY,
            load.WORKER_CONDITION_DRAINING,
        ]
        pool.set_views(worker_view("w1"))
        rows = {each.worker_id: each.condition for each in (await snapshot(served)).workers}
        assert rows == {"w0": load.WORKER_CONDITION_LOST, "w1": load.WORKER_CONDITION_READY}
        pool.set_views(worker_view("w0", epoch="e9"), worker_view("w1"))
        rows = {each.worker_id: each.condition for each in (await snapshot(served)).workers}
        assert rows == {"w0": load.WORKER_CONDITION_READY, "w1": load.WORKER_CONDITION_READY}
        pool.set_views()
        assert [each.condition for each in (await snapshot(served)).workers] == [load.WORKER_CONDITION_LOST] * 2
        monkeypatch.setattr(watch, "LOST_S", 0.0)
        assert list((await snapshot(served)).workers) == []


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"interval_s": 0.1}, "interval_s"),
        ({"interval_s": 61}, "interval_s"),
        ({"interval_s": float("nan")}, "interval_s"),
        ({"max_requests": 1001}, "max_requests"),
        ({"max_block_cells": 4097}, "max_block_cells"),
    ],
)
async def test_what_is_out_of_bounds_is_refused_by_its_path(serve: Any, fields: dict[str, Any], path: str) -> None:
    async with serve() as served:
        refusal = await refused(served.load.WatchLoad(load.WatchLoadRequest(**fields)))
        assert (refusal.code, refusal.reason, refusal.fields) == (C.INVALID_ARGUMENT, "INVALID_FIELD", (path,))


async def test_snapshots_come_an_interval_apart_until_the_caller_leaves(serve: Any) -> None:
    async with serve() as served:
        call = served.load.WatchLoad(load.WatchLoadRequest(interval_s=0.2))
        times = [each.time_s async for each in first(call, 3)]
        assert times[1] - times[0] > 0.15
        assert times[2] - times[1] > 0.15
        await served.until(lambda: served.gateway.load_watch.num_watchers == 0)


async def test_a_worker_that_comes_or_goes_is_told_at_once(serve: Any) -> None:
    pool = FakePool()
    async with serve(pool) as served:
        call = served.load.WatchLoad(load.WatchLoadRequest(interval_s=60))
        snapshots = aiter(call)
        assert [each.condition for each in (await anext(snapshots)).workers] == [load.WORKER_CONDITION_READY]
        pool.set_views()
        assert [each.condition for each in (await anext(snapshots)).workers] == [load.WORKER_CONDITION_LOST]
        pool.set_views(worker_view("w0", epoch="e2"))
        assert [each.epoch for each in (await anext(snapshots)).workers] == ["e2"]
        call.cancel()


async def first(call: Any, num: int) -> AsyncIterator[Any]:
    """So many messages, then the caller leaves."""
    async for each in call:
        yield each
        num -= 1
        if not num:
            call.cancel()
            return


async def test_a_slow_reader_gets_the_newest_snapshot_and_no_line_of_old_ones(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked for the next only when the former is gone: none is made meanwhile."""
    pool = FakePool()
    async with serve(pool) as served:
        source = served.gateway.load_watch.snapshots(served.gateway.control, load.WatchLoadRequest(interval_s=0.2))
        assert (await anext(source)).total.num_in_flight == 0
        made: list[object] = []
        message = watch.LoadWatch._message
        monkeypatch.setattr(watch.LoadWatch, "_message", lambda *args: (made.append(1), message(*args))[1])
        call = served.inference.Generate(request())
        await served.until(lambda: pool.runs)
        await asyncio.sleep(0.7)  # three intervals
        assert made == []
        assert (await anext(source)).total.num_in_flight == 1
        assert made == [1]
        await source.aclose()
        call.cancel()


async def test_a_caller_that_never_reads_is_sent_away(serve: Any) -> None:
    """A snapshot of a thousand workers is larger than what the library takes from us unread."""
    views = [worker_view(f"w{n:04}" + "x" * 200) for n in range(1000)]
    async with serve(FakePool(views=views), limits=RequestLimits(write_stall_s=0.3)) as served:
        call = served.load.WatchLoad(load.WatchLoadRequest(interval_s=0.2))
        await served.until(lambda: served.gateway.load_watch.num_watchers == 1)
        await served.until(lambda: served.gateway.load_watch.num_watchers == 0)
        refusal = await refused(call)
        assert (refusal.code, refusal.reason) == (C.RESOURCE_EXHAUSTED, "SLOW_CONSUMER")


async def test_too_many_watchers_are_refused_and_keep_nobody_else_out(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "MAX_WATCHERS", 2)
    async with serve() as served:
        calls = [served.load.WatchLoad(load.WatchLoadRequest(interval_s=60)) for _ in range(2)]
        for each in calls:
            assert await each.read()
        refusal = await refused(served.load.WatchLoad(load.WatchLoadRequest()))
        assert (refusal.code, refusal.reason) == (C.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        calls[0].cancel()
        await served.until(lambda: served.gateway.load_watch.num_watchers == 1)
        assert await snapshot(served)
        calls[1].cancel()


async def test_metrics_tell_how_many_watch(serve: Any) -> None:
    def shown() -> list[float]:
        families = served.gateway.collector.collect()
        return [each.samples[0].value for each in families if each.name == "octavo_gateway_load_watchers"]

    async with serve() as served:
        assert shown() == [0]
        calls = [served.load.WatchLoad(load.WatchLoadRequest(interval_s=60)) for _ in range(2)]
        for each in calls:
            assert await each.read()
        assert shown() == [2]
        for each in calls:
            each.cancel()
        await served.until(lambda: shown() == [0])


async def test_a_drain_ends_every_watch_with_a_last_snapshot(serve: Any) -> None:
    async with serve() as served:
        call = served.load.WatchLoad(load.WatchLoadRequest(interval_s=60))
        snapshots = aiter(call)
        assert not (await anext(snapshots)).is_draining
        served.gateway.begin_drain()
        assert (await anext(snapshots)).is_draining
        refusal = await refused(call)
        assert (refusal.code, refusal.reason) == (C.UNAVAILABLE, "DRAINING")
        assert (await refused(served.load.WatchLoad(load.WatchLoadRequest()))).reason == "DRAINING"


async def test_watchers_share_what_is_asked_of_workers(serve: Any) -> None:
    pool = FakePool(details=[look()])
    async with serve(pool) as served:
        calls = [served.load.WatchLoad(load.WatchLoadRequest(interval_s=60, max_requests=5)) for _ in range(8)]
        for each in calls:
            assert await each.read()
            each.cancel()
        assert len(pool.queries) <= 2


KEYS = {name: f"octavo-the-key-of-{name}-0123456789" for name in ("ann", "root")}


async def test_it_takes_the_scope_of_administration_and_tells_tenants_apart(serve: Any, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    rows = [f'[keys.{name}]\nsha256 = "{digest_of(key).hex()}"\n' for name, key in KEYS.items()]
    file.write_text(rows[0] + rows[1] + 'scopes = ["admin"]\n')
    file.chmod(0o600)
    as_ = {name: (("x-api-key", key),) for name, key in KEYS.items()}
    pool = FakePool()
    async with serve(pool, access=AccessConfig(api_keys_file=file)) as served:
        assert (await refused(served.load.WatchLoad(load.WatchLoadRequest()))).code is C.UNAUTHENTICATED
        denied = await refused(served.load.WatchLoad(load.WatchLoadRequest(), metadata=as_["ann"]))
        assert (denied.code, denied.reason) == (C.PERMISSION_DENIED, "PERMISSION_DENIED")
        call = served.inference.Generate(request(), metadata=as_["ann"])
        await served.until(lambda: pool.runs)
        pool.runs[0].tokens([70, 71])
        await served.until(lambda: served.gateway.meters.tenants["ann"].generation_tokens == 2)
        found = await snapshot(served, as_["root"], max_requests=9)
        (tenant,) = found.tenants
        assert (tenant.tenant, tenant.figures.num_in_flight) == ("ann", 1)
        assert tenant.figures.generation_tokens_per_s == pytest.approx(2 / found.window_s)
        assert tenant.figures.prompt_tokens_per_s == pytest.approx(3 / found.window_s)
        assert [each.tenant for each in found.requests] == ["ann"]
        call.cancel()


async def test_requests_without_a_worker_are_in_flight_too(serve: Any) -> None:
    async with serve() as served:

        async def never(work: Any, **_: Any) -> Any:
            await asyncio.sleep(60)

        served.gateway.text.run_steps = never
        call = served.inference.Generate(pb.GenerateRequest(request_id="x", text="x"))
        await served.until(lambda: served.gateway.tracker.admission.holds("x"))
        found = await snapshot(served, max_requests=5)
        assert (found.total.num_in_flight, found.total.num_preparing) == (1, 1)
        assert [(each.request_id, each.phase) for each in found.requests] == [("x", load.REQUEST_PHASE_PREPARING)]
        call.cancel()


async def test_the_oldest_are_listed_where_there_are_more(serve: Any) -> None:
    pool = FakePool()
    async with serve(pool) as served:
        calls = []
        for n in range(4):
            calls.append(served.inference.Generate(request(f"r{n}")))
            await served.until(lambda n=n: len(pool.runs) == n + 1)
        found = await snapshot(served, max_requests=2)
        assert [each.request_id for each in found.requests] == ["r0", "r1"]
        assert found.total.num_in_flight == 4
        for each in calls:
            each.cancel()


async def test_the_clients_give_typed_snapshots(serve: Any) -> None:
    async with serve() as served:
        async with AsyncClient(served.gateway.listeners.address) as client:
            async for each in client.watch_load(interval_s=0.2, max_requests=3):
                assert [row.worker_id for row in each.workers] == ["w0"]
                break

        def watch_blocking() -> list[str]:
            with Client(served.gateway.listeners.address) as client:
                snapshots = client.watch_load(interval_s=0.2, max_block_cells=64)
                found = [worker.worker_id for worker in next(snapshots).workers]
                snapshots.close()
                return found

        assert await asyncio.to_thread(watch_blocking) == ["w0"]
        served.gateway.begin_drain()
        async with AsyncClient(served.gateway.listeners.address) as client:
            with pytest.raises(Unavailable):
                await anext(client.watch_load())


async def test_who_asks_for_more_just_when_others_have_been_answered_is_answered(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway stood still for ever then: it waited, again and again, for what had ended, which takes no turn of its
    event loop. The alarm is a signal, since nothing else would run."""
    gather, late = watch.LoadWatch._gather, list[asyncio.Task[Any]]()

    async def gathered(self: watch.LoadWatch, control: Any) -> Any:
        taken = await gather(self, control)
        if not late:  # its first turn comes before those of the callbacks of what ends here
            more = self.snapshots(control, load.WatchLoadRequest(max_requests=10))
            late.append(asyncio.create_task(anext(more)))  # type: ignore[arg-type]
        return taken

    monkeypatch.setattr(watch.LoadWatch, "_gather", gathered)

    def stop(*_: Any) -> None:
        raise TimeoutError("the event loop stands still")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(20)
    try:
        async with serve(FakePool()) as served:
            await snapshot(served)
            (answered,) = await asyncio.gather(*late)
            assert answered.gateway == "gateway"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


async def test_an_embedding_is_shown_where_its_inputs_are(serve: Any) -> None:
    async with serve(admin_address="127.0.0.1:0") as served:
        inputs = [pb.EmbedInput(token_ids=common_pb2.TokenIds(ids=range(length))) for length in (2, 3)]
        call = served.inference.Embed(pb.EmbedRequest(request_id="e", inputs=inputs))
        await served.until(lambda: len(served.pool.runs) == 2)
        meters = served.gateway.meters
        for phase, num_waiting, num_running in ((load.REQUEST_PHASE_QUEUED, 1, 0), (load.REQUEST_PHASE_PREFILL, 0, 1)):
            found = await snapshot(served, max_requests=5)
            assert [(each.request_id, each.phase, each.model) for each in found.requests] == [("e", phase, "tiny")]
            for figures in (found.total, found.models[0].figures):
                counts = (figures.num_in_flight, figures.num_preparing, figures.num_waiting, figures.num_running)
                assert counts == (1, 0, num_waiting, num_running)
            served.gateway.ticker.set_gauges()
            assert (meters.num_preparing, meters.num_waiting, meters.num_running) == (0, num_waiting, num_running)
            served.pool.runs[0].sink.on_started()
        told = (await served.admin.GetLoad(admin_pb2.GetLoadRequest())).gateways[0]
        assert (told.num_in_flight, told.num_preparing) == (1, 0)
        call.cancel()
