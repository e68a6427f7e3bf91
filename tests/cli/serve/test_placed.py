"""A process on a cluster that forgets: a reservation that is never granted, answers that are lost, a disk that is full.
Ray is played."""

import asyncio
import sys
from concurrent.futures import Future
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from octavo.cli.serve import placed
from octavo.cli.serve.launch import ProcessPlan, Role
from octavo.cli.serve.parent import EXIT_PLACE_LOST
from octavo.cli.serve.placed import ClusterContext, Placed, PlacedGateway
from octavo.cli.serve.placement import OF_GATEWAY, GatewayAddress, GatewayDirectory, Need
from tests.support.waiting import until


class RayError(Exception): ...


class RayActorError(RayError): ...


class ActorUnavailableError(RayActorError): ...


class RayTaskError(RayError):
    cause = OSError(28, "No space left on device")


ERRORS = SimpleNamespace(
    RayError=RayError,
    RayActorError=RayActorError,
    ActorUnavailableError=ActorUnavailableError,
    RayTaskError=RayTaskError,
)
NEVER = object()


class Played:
    """Answers of an actor, by method, one after the other; the last one stays. grants: whether each reservation is
    granted."""

    def __init__(self, grants: list[bool], **answers: list[object]) -> None:
        self.answers: dict[str, list[object]] = {"start": ["host"], "follow": [([], 0)], "write": [None]} | answers
        self.grants = grants
        self.asked: list[tuple[str, tuple[object, ...]]] = []
        self.reserved: list[str] = []
        self.given_back: list[str] = []
        self.exceptions = ERRORS

    def remote(self, _: type) -> "Played":
        return self

    def options(self, **_: object) -> Any:
        return SimpleNamespace(remote=lambda: self)

    def kill(self, _: object) -> None:
        self.given_back.append("actor")

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_") or method not in self.answers:
            raise AttributeError(method)
        return SimpleNamespace(remote=lambda *arguments: self._answer(method, arguments))

    def _answer(self, method: str, arguments: tuple[object, ...]) -> Any:
        self.asked.append((method, arguments))
        left = self.answers[method]
        return reference(left.pop(0) if len(left) > 1 else left[0])

    def placement_group(self, _: object, *, name: str, **__: object) -> Any:
        self.reserved.append(name.rpartition("-")[2])
        answer = None if self.grants.pop(0) else NEVER
        return SimpleNamespace(name=self.reserved[-1], ready=lambda: reference(answer))


def reference(answer: object) -> Any:
    future: Future[object] = Future()
    if isinstance(answer, Exception):
        future.set_exception(answer)
    elif answer is not NEVER:
        future.set_result(answer)
    return SimpleNamespace(future=lambda: future)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What never comes is not waited for long; but this process may stand still before it sees what has come."""
    for name in ("PATIENCE_S", "ANEW_S", "AGAIN_S"):
        monkeypatch.setattr(placed, name, 0.3)


def cluster(ray: Played, monkeypatch: pytest.MonkeyPatch, directory: GatewayDirectory) -> ClusterContext:
    groups = ModuleType("ray.util.placement_group")
    vars(groups).update(
        placement_group=ray.placement_group,
        placement_group_table=lambda _: {"bundles_to_node_id": {0: "node"}},
        remove_placement_group=lambda group: ray.given_back.append(group.name),
    )
    strategies = ModuleType("ray.util.scheduling_strategies")
    vars(strategies)["PlacementGroupSchedulingStrategy"] = lambda *_, **__: None
    for module in (ModuleType("ray"), ModuleType("ray.util"), groups, strategies):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return ClusterContext(
        ray=ray, label="l", directory=directory, own_node="", towards="127.0.0.1", placing=asyncio.Lock()
    )


def worker(
    ray: Played, monkeypatch: pytest.MonkeyPatch, notices: list[str], directory: GatewayDirectory | None = None
) -> Placed:
    directory = directory or GatewayDirectory({})
    context = cluster(ray, monkeypatch, directory)
    plan = ProcessPlan(name="worker-0", role=Role.WORKER, settings={"model": ["m"]}, is_placed=True, metrics_port=None)
    files = lambda: {"gateway_endpoints_file": directory.endpoints()}  # noqa: E731
    return Placed(context, plan, {}, files, Need(gpus=0, cpus=1), lambda *_: None, notices.append)


async def test_a_reservation_that_is_not_granted_is_given_back_and_made_anew(
    soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray, notices = Played([True, False, False, True]), list[str]()
    process = worker(ray, monkeypatch, notices)
    assert await process.run() == 0
    process._leave()  # as where its host is lost
    async with asyncio.timeout(60):
        assert await process.run() == 0
    assert ray.reserved == ["1", "2", "3", "4"]
    assert ray.given_back == ["actor", "1", "2", "3"]
    assert [each for each in notices if "waits" in each] == ["worker-0 waits for a host of the cluster with 1 CPU free"]


@pytest.mark.parametrize("answers", [{"start": [NEVER]}, {"start": [RayError("lost")]}, {"follow": [RayError("lost")]}])
async def test_an_actor_whose_answers_are_lost_is_left_for_another(
    answers: dict[str, list[object]], soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placed, "ANSWER_S", 0.3)
    ray, notices = Played([True], **answers), list[str]()
    async with asyncio.timeout(60):
        assert await worker(ray, monkeypatch, notices).run() == EXIT_PLACE_LOST
    assert ray.given_back == ["actor", "1"]
    assert "worker-0: its actor does not answer" in notices[-1]


async def test_a_file_that_cannot_be_written_on_its_host_is_told_once_and_tried_again(
    soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placed, "LOOK_S", 0.0)
    directory, notices = GatewayDirectory({}), list[str]()
    lines = ([], None)
    ray = Played([True], follow=[lines] * 6 + [NEVER], write=[RayTaskError(), RayTaskError(), None])
    process = worker(ray, monkeypatch, notices, directory)
    running = asyncio.create_task(process.run())
    await until(lambda: ("follow", (0,)) in ray.asked)
    directory.put("gateway-1", GatewayAddress(host="10.0.0.2", port=1, worker_port=2, control=3))
    ray.answers["follow"] = [lines] * 3 + [NEVER]
    await until(lambda: len(writes(ray)) == 3 or process._tell())
    assert [files for _, files in writes(ray)] == [{"gateway_endpoints_file": "tcp://10.0.0.2:2\n"}] * 3
    told = [each for each in notices if "learn" in each]
    assert len(told) == 1
    assert "worker-0 does not learn what has changed, and it is tried again: " in told[0]
    assert "No space left on device" in told[0]
    process.kill()
    assert await running == 0


async def test_a_gateway_that_has_its_place_does_not_wait_for_one_that_looks_for_one(
    soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may be for as long as a host is away."""
    monkeypatch.setattr(placed, "APART_S", 600.0)
    directory, notices = GatewayDirectory({}), list[str]()
    ray = Played([True, False], choose_ports=[("10.0.0.2", [50051, 5555, 5556, 9090])])
    context = cluster(ray, monkeypatch, directory)
    first, second = (gateway(context, name, notices) for name in ("gateway-1", "gateway-2"))
    assert await first.run() == 0
    waiting = asyncio.create_task(second.run())
    await until(lambda: len(ray.reserved) == 2)
    async with asyncio.timeout(60):
        assert await first.run() == 0  # its process has died
    assert directory.addresses() == {"gateway-1": "10.0.0.2:50051"}
    second.kill()
    assert await waiting == 0


def gateway(context: ClusterContext, name: str, notices: list[str], **settings: object) -> PlacedGateway:
    plain = {"host": "0.0.0.0", "port": 50051, "metrics_host": "127.0.0.1", "metrics_port": 9090, "model_port": []}
    plan = ProcessPlan(name=name, role=Role.GATEWAY, settings=plain | settings, is_placed=True, metrics_port=None)
    return PlacedGateway(context, plan, plan.settings, dict, OF_GATEWAY, lambda *_: None, notices.append)


async def test_ports_of_models_are_chosen_on_its_host_kept_there_and_told(
    soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two gateways may be on one host, and somebody else may have the port there."""
    directory, notices = GatewayDirectory({}), list[str]()
    ray = Played([True], choose_ports=[("10.0.0.2", [50052, 5555, 5556, 9091, 7001, 8002])])
    process = gateway(
        cluster(ray, monkeypatch, directory), "gateway-2", notices, model_port=["Org/two=8001", "a=b=8002"]
    )
    for _ in range(2):
        assert await process.run() == 0
    (first, second) = [arguments for method, arguments in ray.asked if method == "choose_ports"]
    assert first[1] == [("", 50051), ("", 0), ("", 0), ("127.0.0.1", 9090), ("", 8001), ("", 8002)]
    assert second[1] == [("", 50052), ("", 5555), ("", 5556), ("127.0.0.1", 9091), ("", 7001), ("", 8002)]
    for settings in [arguments[3] for method, arguments in ray.asked if method == "start"]:
        assert settings["model_port"] == ["Org/two=7001", "a=b=8002"]
    assert notices == [
        "gateway-2 is placed on host; callers reach it at 10.0.0.2:50052, Org/two at 10.0.0.2:7001, "
        "a=b at 10.0.0.2:8002"
    ]
    assert directory.rows() == [
        ("gateway-2", "10.0.0.2:50052"),
        ("gateway-2, Org/two", "10.0.0.2:7001"),
        ("gateway-2, a=b", "10.0.0.2:8002"),
    ]
    assert set(directory.ports(besides="gateway-1")) >= {7001, 8002}


def writes(ray: Played) -> list[tuple[object, ...]]:
    return [arguments for method, arguments in ray.asked if method == "write"]
