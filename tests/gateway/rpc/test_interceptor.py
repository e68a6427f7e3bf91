"""The guard: whatever happens inside, callers get one status that is not UNKNOWN."""

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from octavo.gateway.auth.authenticator import AccessList, Authenticator, KeyRing
from octavo.gateway.config import Dialects
from octavo.gateway.errors import InvalidRequest, QueueFull, Violation
from octavo.gateway.observability.meters import GatewayMeters
from octavo.gateway.rpc.interceptor import RpcScope, StatusInterceptor
from octavo.gateway.rpc.status import status_of
from octavo.v1 import inference_pb2 as pb
from tests.support.gateway.fake_pool import FakePool
from tests.support.gateway.rpc_errors import refused


async def counted(meters: GatewayMeters) -> None:
    """The end is counted right after the status has left, so a caller can be faster than the count."""
    async with asyncio.timeout(30):
        while not meters.rpcs:  # noqa: ASYNC110  (any state of the server)
            await asyncio.sleep(0.002)


class Panic(BaseException):
    """As libraries in Rust raise it (pyo3)."""


class Crashing(grpc.GenericRpcHandler):
    """A service whose methods are named after what they do."""

    async def raises(self, request: bytes, context: Any) -> bytes:
        raise RuntimeError("secret")

    async def panics(self, request: bytes, context: Any) -> bytes:
        raise Panic("secret")

    async def raises_cancelled(self, request: bytes, context: Any) -> bytes:
        raise asyncio.CancelledError

    async def is_cancelled_from_inside(self, request: bytes, context: Any) -> bytes:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(1)
        return b""

    async def waits_in_finally(self, request: bytes, context: Any) -> bytes:
        try:
            raise KeyError("x")
        finally:
            await asyncio.sleep(0.01)

    async def aborts_twice(self, request: bytes, context: Any) -> bytes:
        try:
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, "first")
        except grpc.aio.AbortError:
            await context.abort(grpc.StatusCode.INTERNAL, "second")
        return b""

    async def stream_returns_early(self, request: bytes, context: Any) -> None:
        return

    async def stream_raises_after_a_message(self, request: bytes, context: Any) -> None:
        await context.write(b"one")
        raise QueueFull("no")

    async def generator_raises(self, request: bytes, context: Any) -> Any:
        yield b"one"
        raise QueueFull("no")

    async def generator_has_a_defect(self, request: bytes, context: Any) -> Any:
        yield b"one"
        raise RuntimeError("secret")

    async def generator_panics(self, request: bytes, context: Any) -> Any:
        yield b"one"
        raise Panic("secret")

    async def generator_raises_cancelled(self, request: bytes, context: Any) -> Any:
        yield b"one"
        raise asyncio.CancelledError

    async def generator_is_cancelled_from_inside(self, request: bytes, context: Any) -> Any:
        yield b"one"
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(1)

    async def generator_is_fine(self, request: bytes, context: Any) -> Any:
        yield b"one"

    async def generator_goes_on(self, request: bytes, context: Any) -> Any:
        yield b"one"
        await asyncio.Event().wait()

    async def aborts_by_itself(self, request: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.OUT_OF_RANGE, "mine")
        return b""

    async def fine(self, request: bytes, context: Any) -> bytes:
        return b"ok"

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        name = details.method.rpartition("/")[2]
        if not hasattr(self, name):
            return None
        make = (
            grpc.unary_stream_rpc_method_handler
            if name.startswith(("stream", "generator"))
            else grpc.unary_unary_rpc_method_handler
        )
        return make(getattr(self, name), request_deserializer=bytes.decode if name == "fine" else None)


@pytest.fixture
async def crashing(tmp_path: Any) -> Any:
    meters = GatewayMeters()
    server = grpc.aio.server(interceptors=(StatusInterceptor(meters, pushback_ms=7),))
    server.add_generic_rpc_handlers((Crashing(),))
    server.add_insecure_port(f"unix:{tmp_path}/s")
    await server.start()
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/s", options=[("grpc.enable_retries", 0)]) as channel:
        yield channel, meters
    await server.stop(0)


@pytest.mark.parametrize(
    "name", ["raises", "panics", "raises_cancelled", "is_cancelled_from_inside", "waits_in_finally"]
)  # fmt: skip
async def test_defects_are_internal_with_our_trailer_and_no_secret(crashing: Any, name: str) -> None:
    channel, meters = crashing
    refusal = await refused(channel.unary_unary(f"/t.S/{name}")(b"", timeout=30))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
    assert (refusal.message, refusal.request_id) == ("internal error; the server's log has it", "")
    await counted(meters)
    assert meters.rpcs == {(f"/t.S/{name}", "INTERNAL", "INTERNAL"): 1}


@pytest.mark.parametrize("name", ["stream_raises_after_a_message", "generator_raises"])
async def test_streams_end_with_the_tables_status_after_what_they_sent(crashing: Any, name: str) -> None:
    channel, meters = crashing
    call = channel.unary_stream(f"/t.S/{name}")(b"", timeout=30)
    assert await anext(aiter(call)) == b"one"
    refusal = await refused(call)
    assert (refusal.code, refusal.reason, refusal.pushback_ms) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", 7,
    )  # fmt: skip
    await counted(meters)
    assert meters.rpcs == {(f"/t.S/{name}", "RESOURCE_EXHAUSTED", "QUEUE_FULL"): 1}


async def test_a_second_abort_changes_nothing(crashing: Any) -> None:
    channel, _ = crashing
    refusal = await refused(channel.unary_unary("/t.S/aborts_twice")(b"", timeout=30))
    assert (refusal.code, refusal.message) == (grpc.StatusCode.OUT_OF_RANGE, "first")


async def test_a_stream_without_messages_ends_well(crashing: Any) -> None:
    channel, _ = crashing
    assert [each async for each in channel.unary_stream("/t.S/stream_returns_early")(b"", timeout=30)] == []


async def test_a_handlers_own_abort_is_left_alone(crashing: Any) -> None:
    channel, _ = crashing
    refusal = await refused(channel.unary_unary("/t.S/aborts_by_itself")(b"", timeout=30))
    assert (refusal.code, refusal.message, refusal.reason) == (grpc.StatusCode.OUT_OF_RANGE, "mine", "")


async def test_bytes_that_are_no_message_are_not_unknown(crashing: Any) -> None:
    channel, _ = crashing
    assert await channel.unary_unary("/t.S/fine")(b"text", timeout=30) == b"ok"
    refusal = await refused(channel.unary_unary("/t.S/fine")(b"\xff", timeout=30))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.INTERNAL, "INVALID_FIELD")


async def test_bytes_that_are_no_message_are_the_callers_fault_in_a_stream_too(serve: Any) -> None:
    async with serve() as served:
        call = served.channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        refusal = await refused(call(iter([b"\xff\xff"]), timeout=30))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.INTERNAL, "INVALID_FIELD")


async def test_unknown_methods_are_unimplemented(crashing: Any) -> None:
    channel, _ = crashing
    refusal = await refused(channel.unary_unary("/t.S/nothing_of_that_name")(b"", timeout=30))
    assert refusal.code is grpc.StatusCode.UNIMPLEMENTED


async def test_malformed_requests_to_every_real_method(serve: Any) -> None:
    methods = ["Generate", "Complete", "Tokenize", "Detokenize"]
    async with serve() as served:
        for method in methods:
            path = f"/octavo.v1.InferenceService/{method}"
            kind = served.channel.unary_stream if method == "Generate" else served.channel.unary_unary
            refusal = await refused(kind(path)(b"\x0a\xff\xff\xff\xff\x0f", timeout=30))
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.INTERNAL, "INVALID_FIELD")
            refusal = await refused(kind(path)(b"\xf8\x7f\x01", timeout=30))
            assert refusal.code is grpc.StatusCode.INVALID_ARGUMENT
            assert any(field.endswith("#2047") for field in refusal.fields)


def test_messages_to_callers_name_no_paths() -> None:
    scope = RpcScope(method="/m", request_id="r", tokens_delivered=3)
    for secret in ("/srv/models/qwen/model.safetensors", "ipc:///run/octavo/gateway-0.sock", "tcp://10.0.0.1:5555"):
        status = status_of(QueueFull(f"failed at {secret}, try 1/2 later"), scope, pushback_ms=5)
        assert status.message == "failed at <path>, try 1/2 later"
        assert secret.encode() not in dict(status.trailers)["grpc-status-details-bin"]  # type: ignore[operator]
    assert len(status_of(QueueFull("x" * 10_000), scope, pushback_ms=5).message) == 400


@pytest.mark.parametrize("letter", ["x", "\N{GRINNING FACE}", "\ud800"])
def test_callers_words_fit_into_trailers_whatever_they_are(letter: str) -> None:
    """Larger ones reach no caller: gRPC takes 8 KiB of headers. Half a surrogate pair could not be sent at all."""
    violations = tuple(Violation(field=letter * 300, description=letter * 300) for _ in range(16))
    status = status_of(InvalidRequest(violations), RpcScope(method="/s/m", request_id="r" * 128), pushback_ms=5)
    sizes = [len(name) + 4 * len(value) // 3 + 32 for name, value in status.trailers]
    assert sum(sizes) + 3 * len(status.message.encode()) < 8000
    assert status.message
    assert dict(status.trailers)["grpc-status-details-bin"]


# ---------------------------------------------------------------- services of the libraries


async def test_health_follows_the_workers_and_watchers_are_told(serve: Any) -> None:
    from tests.support.gateway.fake_pool import worker_view

    states = health_pb2.HealthCheckResponse
    async with asyncio.timeout(60), serve(FakePool()) as served:
        stub = health_pb2_grpc.HealthStub(served.channel)

        async def check(service: str) -> Any:
            return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status

        async def becomes(service: str, status: Any) -> None:
            async with asyncio.timeout(30):
                while await check(service) != status:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)

        await becomes("octavo.v1.InferenceService", states.SERVING)
        assert await check("") == states.SERVING
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="octavo.v1.ModelService"))
        assert (await watch.read()).status == states.SERVING
        served.pool.set_views()
        assert (await watch.read()).status == states.NOT_SERVING
        await becomes("octavo.v1.InferenceService", states.NOT_SERVING)
        assert await check("") == states.SERVING
        served.pool.set_views(worker_view())
        assert (await watch.read()).status == states.SERVING
        served.gateway.begin_drain(0)
        assert (await watch.read()).status == states.NOT_SERVING
        refusal = await refused(stub.Check(health_pb2.HealthCheckRequest(service="nothing")))
        assert refusal.code is grpc.StatusCode.NOT_FOUND
        watch.cancel()


async def test_reflection_lists_what_is_served_and_not_the_admin_service(serve: Any, tmp_path: Any) -> None:
    async def services(channel: Any) -> set[str]:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        return {service.name async for reply in call for service in reply.list_services_response.service}

    watched = {"octavo.v1.LoadService", "grpc.health.v1.Health"}
    public = {"octavo.v1.InferenceService", "octavo.v1.ModelService"} | watched
    reflection = {"grpc.reflection.v1alpha.ServerReflection"}
    async with serve(admin_address=f"unix:{tmp_path}/admin.sock", dialects=Dialects.NONE) as served:
        assert await services(served.channel) == public | reflection
        assert await services(served.admin_channel) == {"octavo.v1.AdminService"} | watched | reflection


async def test_a_message_above_the_limit_never_reaches_a_handler(serve: Any) -> None:
    async with serve() as served:
        refusal = await refused(served.inference.Generate(pb.GenerateRequest(text="x" * (4 * 1024 * 1024))))
        assert refusal.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        # The status is the library's: to us the caller went away before its request came.
        await counted(served.gateway.meters)
        assert served.gateway.meters.rpcs == {("/octavo.v1.InferenceService/Generate", "CANCELLED", "CLIENT"): 1}


async def silent(channel: grpc.aio.Channel, name: str, *, ends: bool) -> Any:
    """A call that sends no message: it ends at once, or never."""

    async def nothing() -> Any:
        if not ends:
            await asyncio.sleep(60)
        return
        yield b""

    return await refused(channel.stream_unary(f"/t.S/{name}")(nothing(), timeout=30))


async def test_calls_without_a_request_get_a_status(crashing: Any) -> None:
    channel, meters = crashing
    refusal = await silent(channel, "fine", ends=True)
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.INTERNAL, "INVALID_FIELD")
    await counted(meters)
    assert meters.rpcs == {("/t.S/fine", "INTERNAL", "INVALID_FIELD"): 1}
    assert meters.called == {"/t.S/fine"}


def test_a_callers_id_is_adopted_if_it_fits_into_trailers() -> None:
    scope = RpcScope(method="/t.S/fine")
    for given, adopted in (("an id", ""), ("id\n", ""), ("id-1", "id-1"), ("no id", "id-1")):
        scope.adopt_request_id(given)
        assert scope.request_id == adopted


async def test_a_request_that_never_comes_is_not_waited_for_for_ever(tmp_path: Any) -> None:
    guard = StatusInterceptor(GatewayMeters(), pushback_ms=7, message_timeout_s=0.1)
    server = grpc.aio.server(interceptors=(guard,))
    server.add_generic_rpc_handlers((Crashing(),))
    server.add_insecure_port(f"unix:{tmp_path}/s")
    await server.start()
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as channel:
        refusal = await silent(channel, "fine", ends=False)
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE")
        guard._waits.timeout_s = 30.0  # this one comes, though the machine may pause
        assert await channel.unary_unary("/t.S/fine")(b"x", timeout=30) == b"ok"
    await server.stop(0)


async def test_metadata_above_the_limit_is_refused_before_a_message_comes(tmp_path: Any) -> None:
    """By us: the server's own limit is far above here, as it is for clients that acknowledge no SETTINGS."""
    server = grpc.aio.server(interceptors=(StatusInterceptor(GatewayMeters(), pushback_ms=7, max_metadata_bytes=1000),))
    server.add_generic_rpc_handlers((Crashing(),))
    server.add_insecure_port(f"unix:{tmp_path}/s")
    await server.start()
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as channel:
        call = channel.unary_unary("/t.S/fine")
        assert await call(b"x", timeout=30, metadata=(("x-a", "v" * 600),)) == b"ok"
        many = tuple((f"x-{number:02}", "v") for number in range(26))  # each 5 bytes, which count as 37
        for metadata in ((("x-a", "v" * 1000),), many):
            refusal = await refused(call(b"x", timeout=30, metadata=metadata))
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "EXCEEDS_CAPACITY")
        assert await call(b"x", timeout=30, metadata=many[:16]) == b"ok"
    await server.stop(0)


@pytest.mark.parametrize(
    "name",
    ["generator_has_a_defect", "generator_panics", "generator_raises_cancelled", "generator_is_cancelled_from_inside"],
)
async def test_defects_of_generators_are_internal_after_what_they_sent(crashing: Any, name: str) -> None:
    channel, meters = crashing
    call = channel.unary_stream(f"/t.S/{name}")(b"", timeout=30)
    assert await anext(aiter(call)) == b"one"
    refusal = await refused(call)
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
    assert (refusal.message, refusal.request_id) == ("internal error; the server's log has it", "")
    await counted(meters)
    assert meters.rpcs == {(f"/t.S/{name}", "INTERNAL", "INTERNAL"): 1}


async def test_a_generator_that_ends_well_is_counted_as_that(crashing: Any) -> None:
    channel, meters = crashing
    assert [message async for message in channel.unary_stream("/t.S/generator_is_fine")(b"", timeout=30)] == [b"one"]
    await counted(meters)
    assert meters.rpcs == {("/t.S/generator_is_fine", "OK", ""): 1}


async def test_a_generator_whose_caller_leaves_is_closed_and_counted(crashing: Any) -> None:
    channel, meters = crashing
    call = channel.unary_stream("/t.S/generator_goes_on")(b"", timeout=30)
    assert await anext(aiter(call)) == b"one"
    call.cancel()
    await counted(meters)
    assert meters.rpcs == {("/t.S/generator_goes_on", "CANCELLED", "CLIENT"): 1}


@pytest.mark.parametrize("name", ["generator_is_fine", "stream_returns_early", "fine"])
async def test_no_handler_of_any_kind_is_reached_without_a_key(tmp_path: Any, name: str) -> None:
    guard = StatusInterceptor(
        GatewayMeters(), pushback_ms=7, authenticator=Authenticator(access=AccessList(ring=KeyRing(())))
    )
    server = grpc.aio.server(interceptors=(guard,))
    server.add_generic_rpc_handlers((Crashing(),))
    server.add_insecure_port(f"unix:{tmp_path}/s")
    await server.start()
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/s", options=[("grpc.enable_retries", 0)]) as channel:
        refusal = await refused(channel.unary_stream(f"/t.S/{name}")(b"", timeout=30))
    await server.stop(0)
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
