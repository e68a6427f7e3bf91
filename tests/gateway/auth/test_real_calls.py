"""API keys and scopes on a real server with a real channel."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
import structlog
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from octavo.gateway.auth.authenticator import SCOPE_OF, Scope, digest_of
from octavo.gateway.auth.reloader import AccessReloader
from octavo.gateway.config import AccessConfig
from octavo.v1 import admin_pb2, load_pb2, load_pb2_grpc, model_pb2, model_pb2_grpc
from octavo.v1 import inference_pb2 as pb
from tests.support.gateway.fake_pool import FakePool
from tests.support.gateway.keyed import FILE, KEYS, answers, as_
from tests.support.gateway.rpc_errors import refused

C = grpc.StatusCode


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
                    # Without a message: grpc.aio's client tells of an error of its own where it is refused as it sends.
                    request = () if method.client_streaming else (b"",)
                    if SCOPE_OF[path] is Scope.HEALTH:
                        continue
                    refusal = await refused(make(path)(*request, timeout=30))
                    assert (path, refusal.reason) == (path, "UNAUTHENTICATED")
                    key = "ann" if SCOPE_OF[path] in (Scope.ADMIN, Scope.REFLECTION) else "ops"
                    refusal = await refused(make(path)(*request, timeout=30, metadata=as_(key)))
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


async def test_an_open_file_is_taken_once_it_is_closed_and_told_once_until_then(guarded: Any, tmp_path: Path) -> None:
    """Closing it changes neither its time nor its size."""
    async with guarded() as served:
        reloader, path = served.gateway.reloader, served.gateway.config.access.api_keys_file
        fresh = tmp_path / "fresh"
        fresh.write_text(FILE.replace("keys.bob", "keys.bobby"))
        fresh.chmod(0o644)
        fresh.replace(path)
        await served.until(lambda: reloader.reloads["keys", "failed"])
        for _ in range(3):
            await reloader.refresh()
        assert reloader.reloads["keys", "failed"] == 1
        path.chmod(0o600)
        await served.until(lambda: reloader.reloads["keys", "taken"])
        assert reloader.reloads["keys", "failed"] == 1


async def test_a_file_that_could_not_be_read_for_a_moment_is_taken_then(
    guarded: Any, write_keys: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with guarded() as served:
        reloader = served.gateway.reloader
        with monkeypatch.context() as patch:
            patch.setattr("octavo.gateway.auth.key_file.read_regular", Mock(side_effect=OSError(24, "Too many files")))
            write_keys(FILE.replace("keys.ann", "keys.anna"))
            await served.until(lambda: reloader.reloads["keys", "failed"])
        await served.until(lambda: reloader.reloads["keys", "taken"])
        assert reloader.reloads == {("keys", "taken"): 1, ("keys", "failed"): 1}


async def test_half_of_a_file_that_is_being_written_shuts_nobody_out(write_keys: Callable[[str], Path]) -> None:
    """Up to the end of any table it is a file of keys."""
    path = write_keys(FILE)
    reloader = AccessReloader(AccessConfig(api_keys_file=path))
    reloader.load()
    access = reloader.authenticator.access
    await reloader.refresh()
    path.write_text("")
    await reloader.refresh()
    path.write_text(FILE + "# the same keys\n")
    await reloader.refresh()
    assert reloader.authenticator.access is access
    await reloader.refresh()
    assert reloader.reloads == {("keys", "taken"): 1, ("keys", "failed"): 0}
    assert reloader.authenticator.access.ring.find(KEYS["ann"]) is not None


async def test_a_hangup_loads_files_that_look_the_same(guarded: Any) -> None:
    async with guarded() as served:
        served.gateway.reloader.reload()
        await served.until(lambda: served.gateway.reloader.reloads["keys", "taken"])


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
