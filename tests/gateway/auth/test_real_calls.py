"""API keys, scopes, tenants and limits on a real server with a real channel."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from octavo.gateway.auth.authenticator import SCOPE_OF, Scope, digest_of
from octavo.gateway.config import AccessConfig
from octavo.v1 import admin_pb2, load_pb2, load_pb2_grpc, model_pb2, model_pb2_grpc
from octavo.v1 import inference_pb2 as pb
from tests.support.gateway.fake_pool import FakePool, FakeRun
from tests.support.gateway.rpc_errors import refused

C = grpc.StatusCode
KEYS = {name: f"octavo-the-key-of-{name}-0123456789" for name in ("ann", "bob", "ops", "old", "eve")}
FILE = f"""
[keys.ann]
sha256 = "{digest_of(KEYS["ann"]).hex()}"
[keys.bob]
sha256 = "{digest_of(KEYS["bob"]).hex()}"
[keys.ops]
sha256 = "{digest_of(KEYS["ops"]).hex()}"
scopes = ["admin", "reflection"]
[keys.old]
sha256 = "{digest_of(KEYS["old"]).hex()}"
expires = 2020-01-01T00:00:00Z
"""


def as_(name: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {KEYS[name]}"),)


@pytest.fixture
def guarded(serve: Any, write_keys: Callable[[str], Path]) -> Callable[..., Any]:
    """As `serve`, with the file above (or another) in force."""

    def serving(pool: FakePool | None = None, *, file: str = FILE, **changes: Any) -> Any:
        access = AccessConfig(api_keys_file=write_keys(file), reload_interval_s=0.05)
        return serve(pool, access=access, **changes)

    return serving


def answers(*ids: int) -> FakePool:
    """A pool that gives these tokens at once."""

    def run(run: FakeRun) -> None:
        run.tokens(list(ids))
        run.finish()

    return FakePool(on_run=run)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        (None, "an API key is needed"),
        (as_("eve"), "not valid"),
        (as_("old"), "expired"),
        ((("x-api-key", "wrong"),), "not valid"),
        ((("authorization", "Basic YW5uOng="),), "Bearer"),
    ],
)
async def test_nobody_gets_past_the_door_without_a_good_key(guarded: Any, metadata: Any, words: str) -> None:
    pool = answers(5)
    async with guarded(pool) as served:
        calls = [
            served.inference.Generate(pb.GenerateRequest(text="x"), metadata=metadata),
            served.inference.Complete(pb.CompleteRequest(generate=pb.GenerateRequest(text="x")), metadata=metadata),
            served.inference.Tokenize(pb.TokenizeRequest(text="x"), metadata=metadata),
            served.models.ListModels(model_pb2.ListModelsRequest(), metadata=metadata),
            # Not even parsed: bytes that are no message get the same answer.
            served.channel.unary_unary("/octavo.v1.InferenceService/Tokenize")(b"\xff\xff", metadata=metadata),
        ]
        for call in calls:
            refusal = await refused(call)
            assert (refusal.code, refusal.reason) == (C.UNAUTHENTICATED, "UNAUTHENTICATED")
            assert words in refusal.message
        assert pool.runs == []
        assert served.gateway.text.num_waiting == 0
        rpcs = served.gateway.meters.rpcs
        await served.until(lambda: rpcs.total() == len(calls))
        assert {key[1:] for key in rpcs} == {("UNAUTHENTICATED", "UNAUTHENTICATED")}


async def test_a_good_key_is_served_and_named_in_the_log(guarded: Any) -> None:
    async with guarded(answers(5, 6)) as served:
        with structlog.testing.capture_logs() as lines:
            response = await served.inference.Complete(
                pb.CompleteRequest(generate=pb.GenerateRequest(text="x")), metadata=as_("ann")
            )
        assert response.finished.usage.completion_tokens == 2
        assert [line["caller"] for line in lines if line["event"] == "end"] == ["ann"]


async def services(channel: grpc.aio.Channel) -> list[str]:
    """What the server itself says that it serves."""
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    async for answer in stub.ServerReflectionInfo(iter([asked]), metadata=as_("ops")):
        return [service.name for service in answer.list_services_response.service]
    raise AssertionError("no answer")


async def test_every_method_of_every_service_asks_for_its_scope(guarded: Any, tmp_path: Path) -> None:
    """By the descriptors of what is really served: a method that is added without a row fails here."""
    async with guarded(answers(5), admin_address=f"unix:{tmp_path}/admin.sock") as served:
        tried = 0
        for channel in (served.channel, served.admin_channel):
            for service in await services(channel):
                for method in descriptor_pool.Default().FindServiceByName(service).methods:
                    path = f"/{service}/{method.name}"
                    assert path in SCOPE_OF
                    make = channel.unary_stream if method.server_streaming else channel.unary_unary
                    if method.client_streaming:
                        make = channel.stream_stream
                    request = iter([b""]) if method.client_streaming else b""
                    if SCOPE_OF[path] is Scope.HEALTH:
                        continue
                    refusal = await refused(make(path)(request, timeout=30))
                    assert (path, refusal.reason) == (path, "UNAUTHENTICATED")
                    key = "ann" if SCOPE_OF[path] in (Scope.ADMIN, Scope.REFLECTION) else "ops"
                    request = iter([b""]) if method.client_streaming else b""
                    refusal = await refused(make(path)(request, timeout=30, metadata=as_(key)))
                    assert (path, refusal.code, refusal.reason) == (path, C.PERMISSION_DENIED, "PERMISSION_DENIED")
                    tried += 1
        assert tried >= 12


async def test_health_is_public_and_admin_takes_an_admins_key(guarded: Any, tmp_path: Path) -> None:
    async with guarded(admin_address=f"unix:{tmp_path}/admin.sock") as served:
        health = health_pb2_grpc.HealthStub(served.channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == 1
        assert (await served.admin.GetLoad(admin_pb2.GetLoadRequest(), metadata=as_("ops"))).workers
        refusal = await refused(served.admin.GetLoad(admin_pb2.GetLoadRequest()))
        assert refusal.code is C.UNAUTHENTICATED


async def test_methods_that_nobody_serves_are_still_unimplemented(guarded: Any) -> None:
    """Gateways in front of us ask for services that may not be there, and go by this answer."""
    async with guarded() as served:
        refusal = await refused(served.channel.unary_unary("/sglang.grpc.scheduler.SglangScheduler/HealthCheck")(b""))
        assert refusal.code is C.UNIMPLEMENTED


async def accepts(served: Any, name: str) -> bool:
    try:
        await served.models.ListModels(model_pb2.ListModelsRequest(), metadata=as_(name))
    except grpc.aio.AioRpcError:
        return False
    return True


async def test_a_changed_file_is_in_force_soon_and_streams_that_run_go_on(
    guarded: Any, write_keys: Callable[[str], Path]
) -> None:
    pool = FakePool()
    async with guarded(pool) as served:
        stream = served.inference.Generate(pb.GenerateRequest(text="x"), metadata=as_("ann"))
        assert (await anext(aiter(stream))).WhichOneof("event") == "started"
        write_keys(
            FILE.replace("keys.ann", "keys.eve").replace(digest_of(KEYS["ann"]).hex(), digest_of(KEYS["eve"]).hex())
        )
        await served.until(lambda: served.gateway.reloader.reloads["keys", "taken"])
        assert [await accepts(served, name) for name in ("ann", "bob", "eve")] == [False, True, True]
        pool.runs[0].tokens([5])
        pool.runs[0].finish()
        assert [event.WhichOneof("event") async for event in stream][-1] == "finished"
        assert served.gateway.reloader.reloads == {("keys", "taken"): 1, ("keys", "failed"): 0}


async def test_a_broken_or_open_file_changes_nothing_until_it_is_mended(
    guarded: Any, write_keys: Callable[[str], Path]
) -> None:
    async with guarded() as served:
        reloader, ask = served.gateway.reloader, model_pb2.ListModelsRequest()
        for text in ("[keys.ann]\nsha256 = 5", "nonsense"):
            failures = reloader.reloads["keys", "failed"]
            write_keys(text)
            await served.until(lambda: reloader.reloads["keys", "failed"] > failures)  # noqa: B023
            await served.models.ListModels(ask, metadata=as_("ann"))
        path = write_keys(FILE.replace("keys.bob", "keys.bobby"))
        path.chmod(0o600)
        await served.until(lambda: reloader.reloads["keys", "taken"])
        await served.models.ListModels(ask, metadata=as_("bob"))


async def test_a_hangup_loads_files_that_look_the_same(guarded: Any) -> None:
    async with guarded() as served:
        served.gateway.reloader.reload()
        await served.until(lambda: served.gateway.reloader.reloads["keys", "taken"])


async def test_tenants_have_salts_of_their_own_and_their_own_ids(guarded: Any) -> None:
    pool = FakePool()
    async with guarded(pool) as served:
        request = pb.GenerateRequest(request_id="same", text="x", cache_salt="s")
        streams = []
        for name in ("ann", "bob"):
            streams.append(served.inference.Generate(request, metadata=as_(name)))
            assert (await anext(aiter(streams[-1]))).started.request_id == "same"
        refusal = await refused(served.inference.Generate(request, metadata=as_("ann")))
        assert (refusal.code, refusal.message) == (C.ALREADY_EXISTS, "request id 'same' is in flight")
        mine = served.inference.Generate(pb.GenerateRequest(text="x", cache_salt="s"), metadata=as_("ann"))
        await anext(aiter(mine))
        first, second, third = [run.request.cache_salt for run in pool.runs]
        assert first != second
        assert first == third
        assert all(re.fullmatch("[0-9a-f]{64}", salt) for salt in (first, second))
        assert [run.request.request_id for run in pool.runs[:2]] == ["same", "same"]


async def test_a_tenant_cannot_end_anothers_request(guarded: Any) -> None:
    stubs = pytest.importorskip("smg_grpc_proto")
    pool = FakePool()
    async with guarded(pool) as served:
        stream = served.inference.Generate(pb.GenerateRequest(request_id="r", text="x"), metadata=as_("ann"))
        await anext(aiter(stream))
        engine = stubs.vllm_engine_pb2_grpc.VllmEngineStub(served.channel)
        await engine.Abort(stubs.vllm_engine_pb2.AbortRequest(request_ids=["r"]), metadata=as_("bob"))
        assert pool.cancelled == []
        await engine.Abort(stubs.vllm_engine_pb2.AbortRequest(request_ids=["r"]), metadata=as_("ann"))
        assert set(pool.cancelled) == {1}
        assert (await refused(stream)).reason == "ABORTED"


async def test_a_caller_ends_the_request_of_its_own_that_has_the_id_and_no_other(guarded: Any, tmp_path: Path) -> None:
    """The same id is in flight for two tenants, and another one that ends with it."""
    pool = FakePool()
    async with guarded(pool, admin_address=f"unix:{tmp_path}/admin.sock") as served:
        streams = {}
        for name, request_id in (("ann", "r"), ("bob", "r"), ("ann", "xr"), ("bob", "rr")):
            stream = served.inference.Generate(pb.GenerateRequest(request_id=request_id, text="x"), metadata=as_(name))
            await anext(aiter(stream))
            streams[name, request_id] = stream
        await served.inference.Cancel(pb.CancelRequest(request_id="r"), metadata=as_("bob"))
        assert (await refused(streams["bob", "r"])).reason == "ABORTED"
        assert set(pool.cancelled) == {2}
        answer = await served.admin.Abort(admin_pb2.AbortRequest(request_id="r"), metadata=as_("ops"))
        assert answer.found
        assert (await refused(streams["ann", "r"])).reason == "ABORTED"
        assert set(pool.cancelled) == {1, 2}
        assert {live.request_id for live in served.gateway.tracker} == {"xr", "rr"}


async def test_an_operator_can_end_anybodys_request(guarded: Any, tmp_path: Path) -> None:
    async with guarded(FakePool(), admin_address=f"unix:{tmp_path}/admin.sock") as served:
        stream = served.inference.Generate(pb.GenerateRequest(request_id="r", text="x"), metadata=as_("ann"))
        await anext(aiter(stream))
        answer = await served.admin.Abort(admin_pb2.AbortRequest(request_id="r"), metadata=as_("ops"))
        assert answer.found
        assert (await refused(stream)).reason == "ABORTED"


async def test_a_tenants_limits_stop_it_and_nobody_else(guarded: Any) -> None:
    file = FILE + "[tenants.ann]\nmax_requests = 2\nmax_queued = 1\n"
    pool = FakePool()
    async with guarded(pool, file=file) as served:

        async def begin(name: str) -> Any:
            stream = served.inference.Generate(pb.GenerateRequest(text="x"), metadata=as_(name))
            await anext(aiter(stream))
            return stream

        first = await begin("ann")
        queue_full = await refused(served.inference.Generate(pb.GenerateRequest(text="x"), metadata=as_("ann")))
        pool.runs[0].sink.on_started()
        second = await begin("ann")
        pool.runs[1].sink.on_started()
        full = await refused(served.inference.Generate(pb.GenerateRequest(text="x"), metadata=as_("ann")))
        for refusal, words in ((queue_full, "queued"), (full, "in flight")):
            assert (refusal.code, refusal.reason, refusal.pushback_ms) == (C.RESOURCE_EXHAUSTED, "TENANT_LIMIT", 500)
            assert words in refusal.message
        others = [await begin("bob") for _ in range(3)]
        first.cancel()
        await served.until(lambda: served.gateway.tracker.quotas.counts("ann").num_in_flight == 1)
        third = await begin("ann")
        for stream in (second, third, *others):
            stream.cancel()
        await served.until(lambda: served.gateway.tracker.admission.counts().num_entered == 0)
        assert served.gateway.meters.tenant_refusals == 2
        assert served.gateway.tracker.quotas._held == {}


async def test_limits_count_every_output_of_a_request(guarded: Any) -> None:
    file = FILE + "[tenants.ann]\nmax_requests = 4\n"
    pool = FakePool()
    async with guarded(pool, file=file) as served:

        def ask(num_outputs: int) -> Any:
            request = pb.GenerateRequest(text="x", num_outputs=num_outputs)
            return served.inference.Generate(request, metadata=as_("ann"))

        never = await refused(ask(5))
        assert (never.code, never.reason) == (C.INVALID_ARGUMENT, "EXCEEDS_CAPACITY")
        stream = ask(3)
        await anext(aiter(stream))
        assert (await refused(ask(2))).reason == "TENANT_LIMIT"
        counts = served.gateway.tracker.quotas.counts("ann")
        assert (counts.num_in_flight, counts.num_queued) == (3, 3)
        assert served.gateway.tracker.admission.counts().num_outputs == 3
        pool.runs[1].sink.on_started()
        pool.runs[1].sink.on_started()
        assert served.gateway.tracker.quotas.counts("ann").num_queued == 2
        stream.cancel()
        await served.until(lambda: served.gateway.tracker.quotas.counts("ann").num_in_flight == 0)
        four = ask(4)
        await anext(aiter(four))
        four.cancel()


async def test_workers_hear_of_a_tenant_by_label_and_weight_whatever_its_headers_say(guarded: Any) -> None:
    file = FILE + "[tenants.ann]\nweight = 9\n"
    pool = answers(5)
    async with guarded(pool, file=file) as served:
        for name, more in (("ann", ()), ("bob", ()), ("ann", (("x-tenant", "bob"), ("tenant", "bob")))):
            metadata = (*as_(name), *more)
            complete = pb.CompleteRequest(generate=pb.GenerateRequest(text="x"))
            await served.inference.Complete(complete, metadata=metadata)
        ann, bob, again = [run.request for run in pool.runs]
    assert (ann.weight, bob.weight, again.weight) == (9, 1, 9)
    assert ann.tenant == again.tenant != bob.tenant
    assert not {"ann", "bob", ""} & {ann.tenant, bob.tenant}


async def test_without_keys_everybody_is_one_tenant(serve: Any) -> None:
    pool = answers(5)
    async with serve(pool) as served:
        await served.inference.Complete(pb.CompleteRequest(generate=pb.GenerateRequest(text="x")))
        assert (pool.runs[0].request.tenant, pool.runs[0].request.weight) == ("", 1)


async def test_tokens_are_reserved_refused_with_the_wait_and_refunded(guarded: Any) -> None:
    file = FILE + "[tenants.ann]\ntokens_per_minute = 60\nburst_tokens = 50\n"
    pool = FakePool()
    async with guarded(pool, file=file) as served:

        def ask(max_tokens: int) -> Any:
            request = pb.GenerateRequest(
                token_ids={"ids": [5] * 10}, stop=pb.StopConditions(max_tokens=max_tokens), output={"format": 2}
            )
            return served.inference.Generate(request, metadata=as_("ann"))

        never = await refused(ask(41))
        assert (never.code, never.reason) == (C.INVALID_ARGUMENT, "EXCEEDS_CAPACITY")
        stream = ask(40)
        await anext(aiter(stream))
        soon = await refused(ask(10))
        assert soon.reason == "TENANT_LIMIT"
        assert soon.pushback_ms is not None
        assert 15_000 < soon.pushback_ms <= 20_000
        pool.runs[0].tokens([5] * 5)
        pool.runs[0].finish()
        assert [event.WhichOneof("event") async for event in stream][-1] == "finished"
        await served.until(lambda: served.gateway.tracker.admission.counts().num_entered == 0)
        again = ask(25)  # 10 + 5 were used, 35 are back
        await anext(aiter(again))
        again.cancel()


async def test_the_supervisors_socket_tells_health_models_and_load_and_does_nothing_else(
    guarded: Any, tmp_path: Path
) -> None:
    address = f"unix:{tmp_path}/status.sock"
    async with guarded(status_address=address), grpc.aio.insecure_channel(address) as channel:
        models = await model_pb2_grpc.ModelServiceStub(channel).ListModels(model_pb2.ListModelsRequest())
        assert [model.name for model in models.models] == ["tiny"]
        assert (await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())).status == 1
        snapshot = await load_pb2_grpc.LoadServiceStub(channel).WatchLoad(load_pb2.WatchLoadRequest()).read()
        assert [each.model for each in snapshot.workers] == ["tiny"]
        load = "/octavo.v1.LoadService/WatchLoad"
        for path in sorted(SCOPE_OF.keys() - {load}):
            if SCOPE_OF[path] not in (Scope.HEALTH, Scope.MODELS) or path.startswith("/vllm"):
                assert (await refused(channel.unary_unary(path)(b"", timeout=30))).code is C.UNIMPLEMENTED


async def test_only_an_admin_may_scale_and_a_gateway_of_no_supervisor_refuses(guarded: Any, tmp_path: Path) -> None:
    request = admin_pb2.ScaleRequest(num_workers=2)
    for supervisor in (None, f"unix:{tmp_path}/nobody.sock"):
        given = {"admin_address": f"unix:{tmp_path}/admin.sock", "supervisor_address": supervisor}
        async with guarded(**given) as served:
            assert (await refused(served.admin.Scale(request))).code is C.UNAUTHENTICATED
            assert (await refused(served.admin.Scale(request, metadata=as_("ann")))).code is C.PERMISSION_DENIED
            refusal = await refused(served.admin.Scale(request, metadata=as_("ops")))
            assert (refusal.code, refusal.reason) == (C.FAILED_PRECONDITION, "SCALE_REFUSED")
            why = "does not answer" if supervisor else "was not started by octavo serve"
            assert why in refusal.message


async def test_metrics_have_closed_labels_for_every_caller(guarded: Any) -> None:
    async with guarded(answers(5)) as served:

        def series() -> set[tuple[str, ...]]:
            return {
                (sample.name, *sample.labels.values())
                for family in served.gateway.collector.collect()
                for sample in family.samples
            }

        async def call(n: int) -> None:
            metadata = (("x-api-key", f"wrong-{n}"), ("x-tenant", f"t{n}"), ("user-agent", f"u{n}"))
            request = pb.GenerateRequest(model=f"m{n}", request_id=f"r{n}", text="x", cache_salt=f"s{n}")
            await refused(served.inference.Generate(request, metadata=metadata))
            await refused(served.inference.Generate(request, metadata=as_("ann")))
            await refused(served.channel.unary_unary(f"/no.Service{n}/Method{n}")(b""))

        await call(0)
        rpcs = served.gateway.meters.rpcs
        await served.until(lambda: rpcs.total() == 2)  # a caller can be faster than the count
        before = series()
        for n in range(1, 50):
            await call(n)
        assert series() == before
        assert not [row for row in before if any(word in row for word in ("ann", "t0", "m0", "r0", "s0"))]
