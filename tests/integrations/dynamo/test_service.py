"""The service behind a backend of Dynamo, limits, cache and load, against a server that does as it is told."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from octavo.openengine import openengine_pb2 as oe
from octavo.openengine import openengine_pb2_grpc
from octavo.v1 import load_pb2, load_pb2_grpc, model_pb2, model_pb2_grpc
from octavo_dynamo import service
from octavo_dynamo.service import Limits, Load, OctavoService, StartError

READY, LOST = load_pb2.WORKER_CONDITION_READY, load_pb2.WORKER_CONDITION_LOST
MODEL = model_pb2.ModelInfo(name="m", max_model_len=2048, eos_token_ids=[7, 9])
FOUND = model_pb2.GetModelResponse(model=MODEL)


def worker(
    model: str = "m", *, condition: int = READY, block_size: int = 16, active: int = 3
) -> load_pb2.WorkerSnapshot:
    blocks = load_pb2.KvBlocks(num_blocks=100, num_active=active)
    return load_pb2.WorkerSnapshot(
        worker_id="w", model=model, condition=condition, block_size=block_size, max_num_seqs=8, blocks=blocks
    )  # type: ignore[arg-type]


def snapshot(*workers: load_pb2.WorkerSnapshot, is_draining: bool = False) -> load_pb2.WatchLoadResponse:
    return load_pb2.WatchLoadResponse(workers=workers, is_draining=is_draining)


def batch(number: int) -> oe.SubscribeKvEventsResponse:
    return oe.SubscribeKvEventsResponse(batch=oe.KvEventBatch(sequence_number=number))


class Server(openengine_pb2_grpc.ControlServicer):
    """Plays what it was given: one answer a call, the last one for ever; a status is refused with."""

    def __init__(self) -> None:
        self.models: list[Any] = [FOUND]
        self.loads: list[list[Any]] = [[snapshot(worker())]]
        self.events: list[list[Any]] = [[]]
        self.metadata: list[dict[str, str]] = []
        self.is_dialect_known = True
        self.target = ""

    async def GetModel(self, request: Any, context: Any) -> Any:
        (answer,) = [each async for each in self._play([self._next(self.models)], context)]
        return answer

    async def WatchLoad(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async for each in self._play(self._next(self.loads), context):
            yield each

    async def SubscribeKvEvents(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.metadata.append(dict(context.invocation_metadata()))
        assert request.include_snapshot
        async for each in self._play(self._next(self.events), context):
            yield each

    async def ListModels(self, request: Any, context: Any) -> Any:
        raise AssertionError("nobody asks")

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        if not self.is_dialect_known:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "not here")
        return oe.ServerInfo(capacity=oe.DeploymentCapacity(max_batched_tokens=512))

    @staticmethod
    def _next(answers: list[Any]) -> Any:
        return answers.pop(0) if len(answers) > 1 else answers[0]

    @staticmethod
    async def _play(answers: list[Any], context: Any) -> AsyncIterator[Any]:
        for each in answers:
            if isinstance(each, tuple):
                code, reason = each
                await context.abort(code, "as it was told", (("x-error-reason", reason),))
            yield each


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    """Pauses between tries are short."""
    monkeypatch.setattr(service, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(service, "LONGEST_WAIT_S", 0.01)
    told, running = Server(), grpc.aio.server()
    model_pb2_grpc.add_ModelServiceServicer_to_server(told, running)
    load_pb2_grpc.add_LoadServiceServicer_to_server(told, running)
    openengine_pb2_grpc.add_ControlServicer_to_server(told, running)
    port = running.add_insecure_port("127.0.0.1:0")
    await running.start()
    told.target = f"127.0.0.1:{port}"
    yield told
    await running.stop(None)


async def limits(target: str, model: str = "", timeout_s: float = 60) -> Limits:
    octavo = OctavoService(target)
    try:
        return await octavo.limits(model, timeout_s=timeout_s)
    finally:
        await octavo.close()


async def test_limits_are_those_of_all_ready_workers_of_the_model(server: Server) -> None:
    server.loads = [[snapshot(worker(), worker(), worker("other", block_size=32), worker(condition=LOST))]]
    assert await limits(server.target) == Limits(
        model="m", context_length=2048, block_size=16, total_blocks=200, max_num_seqs=16, max_batched_tokens=512,
        ends=(7, 9),
    )  # fmt: skip


async def test_a_service_without_the_dialect_tells_its_other_limits(server: Server) -> None:
    server.is_dialect_known = False
    assert (await limits(server.target)).max_batched_tokens is None


async def test_a_start_waits_for_a_worker(server: Server) -> None:
    server.models = [(grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND"), (grpc.StatusCode.UNAVAILABLE, "NO_WORKER"), FOUND]
    server.loads = [[snapshot()], [snapshot(worker(condition=LOST))], [snapshot(worker())]]
    assert (await limits(server.target)).total_blocks == 100


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (grpc.StatusCode.UNAUTHENTICATED, "its key needs the scopes generate, models and admin"),
        (grpc.StatusCode.PERMISSION_DENIED, "its key needs the scopes generate, models and admin"),
        (grpc.StatusCode.INVALID_ARGUMENT, "as it was told"),
    ],
)
async def test_a_start_that_is_refused_says_why_at_once(server: Server, code: grpc.StatusCode, said: str) -> None:
    server.models = [(code, "")]
    with pytest.raises(StartError, match=said):
        await limits(server.target)


async def test_a_start_gives_up_with_one_sentence(server: Server) -> None:
    server.models = [(grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")]
    with pytest.raises(StartError, match=rf"no Octavo service with x at {server.target} within 0\.01 s: ") as raised:
        await limits(server.target, "x", timeout_s=0.01)
    assert "\n" not in str(raised.value)


async def test_blocks_of_two_sizes_cannot_be_told(server: Server) -> None:
    server.loads = [[snapshot(worker(), worker(block_size=32))]]
    with pytest.raises(StartError, match=r"blocks of \[16, 32\] tokens: one size is needed"):
        await limits(server.target)


async def followed(
    server: Server, follow: Callable[[OctavoService, Callable[[Any], None]], Any], num_news: int
) -> list[Any]:
    """The first news that come."""
    octavo, news, enough = OctavoService(server.target, api_key="secret"), list[Any](), asyncio.Event()

    def take(each: Any) -> None:
        news.append(each)
        if len(news) >= num_news:
            enough.set()

    task = asyncio.create_task(follow(octavo, take))
    try:
        async with asyncio.timeout(60):
            await enough.wait()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await octavo.close()
    return news[:num_news]


async def test_a_cache_is_followed_anew_when_its_stream_ends(server: Server) -> None:
    error = oe.SubscribeKvEventsResponse(error=oe.EngineError(message="too slow"))
    server.events = [[batch(1), batch(2), error], [(grpc.StatusCode.UNAVAILABLE, "NO_WORKER")], [batch(3)], [batch(4)]]
    news = await followed(server, lambda octavo, take: octavo.follow_cache("m", take), 7)
    assert [each and each.sequence_number for each in news] == [1, 2, None, None, 3, None, 4]
    assert {each["x-model"] for each in server.metadata} == {"m"}
    assert {each["authorization"] for each in server.metadata} == {"Bearer secret"}


@pytest.mark.parametrize("code", [grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.PERMISSION_DENIED])
async def test_a_cache_that_is_not_told_is_not_asked_for_again(server: Server, code: grpc.StatusCode) -> None:
    server.events = [[(code, "")]]
    octavo, news = OctavoService(server.target), list[Any]()
    async with asyncio.timeout(60):
        await octavo.follow_cache("m", news.append)
    await octavo.close()
    assert (news, len(server.metadata)) == ([None], 1)


async def test_a_load_is_none_while_no_request_is_taken(server: Server) -> None:
    server.loads = [
        [snapshot(worker(active=3), worker(active=4)), snapshot(worker(condition=LOST)), snapshot(worker("other"))],
        [(grpc.StatusCode.UNAVAILABLE, "DRAINING")],
        [snapshot(worker(active=5)), snapshot(worker(), is_draining=True)],
    ]
    news = await followed(server, lambda octavo, take: octavo.follow_load("m", 1.0, take), 7)
    full, back = Load(used_blocks=7, total_blocks=200), Load(used_blocks=5, total_blocks=100)
    assert news == [full, None, None, None, None, back, None]


async def test_a_service_that_is_not_there_is_no_service() -> None:
    with pytest.raises(StartError, match=r"within 0\.01 s"):
        await limits("127.0.0.1:1", timeout_s=0.01)
