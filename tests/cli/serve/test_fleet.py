"""How many workers a running service has: the number changes, and what cannot be is refused in one sentence."""

import asyncio
import json
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from octavo import Client
from octavo.cli.serve import fleet
from octavo.cli.serve.autoscale import AutoscalePolicy, AutoscaleState
from octavo.cli.serve.children import Child
from octavo.cli.serve.fleet import CannotScale, Fleet, NoSuchModel, dividing, follow_load
from octavo.cli.serve.launch import ProcessPlan, Role, environment
from octavo.cli.serve.service import Service, SupervisedProcess, supervised
from octavo.cli.serve.supervisor import RestartPolicy
from octavo.cli.settings.groups import ServeSettings
from octavo.v1 import admin_pb2, admin_pb2_grpc, load_pb2, load_pb2_grpc
from tests.support.services.service import Service as Running
from tests.support.services.service import environment as clean_environment
from tests.support.services.service import launch, wait_for
from tests.support.waiting import until

OBEDIENT = "import signal, time; signal.signal(15, lambda *_: exit(0)); print('up', flush=True); time.sleep(60)"
ORACLE = ("--runner=oracle", "--num-blocks=512", "--oracle-step-delay-s=0.01", "--oracle-eos-every=1000000")
LIMIT_S = 120.0


class Rig:
    """A fleet of scripts: a gateway, two workers of `a` and one of `b`, and so many gateways on other hosts."""

    def __init__(
        self,
        room: Callable[[int, int], str | None] = lambda workers, gateways: None,
        reserved: str | None = None,
        num_placed: int = 0,
    ) -> None:
        self.lines: list[tuple[str, str]] = []
        self.notices: list[str] = []
        gateway = ProcessPlan(name="gateway-0", role=Role.GATEWAY, settings={}, metrics_port=1)
        first = [self._kept(gateway), self.worker(0, "a"), self.worker(1, "a"), self.worker(2, "x=b")]
        first += [self.gateway(n + 1) for n in range(num_placed)]
        self.listed: list[list[str]] = []
        self.service = Service(first, drain_grace_s=5.0, notice=self.notices.append, on_change=self.note)
        self.fleet = Fleet(
            self.service,
            make=self.worker,
            make_gateway=self.gateway if num_placed else None,
            room=room,
            reserved=reserved,
            notice=self.notices.append,
        )
        self.fleet.is_ready = True

    def note(self) -> None:
        """What `octavo ps` is told: those that are to leave with a minus."""
        self.listed.append([f"{'-' * each.is_leaving}{each.plan.name}" for each in self.service.processes])

    def gateway(self, number: int) -> SupervisedProcess:
        """On another host."""
        name = f"gateway-{number}"
        return self._kept(ProcessPlan(name=name, role=Role.GATEWAY, settings={}, metrics_port=None, is_placed=True))

    def worker(self, number: int, model: str) -> SupervisedProcess:
        plan = ProcessPlan(
            name=f"worker-{number}", role=Role.WORKER, settings={"model": [model]}, metrics_port=2 + number
        )
        return self._kept(plan)

    def _kept(self, plan: ProcessPlan) -> SupervisedProcess:
        child = Child(plan.name, [sys.executable, "-c", OBEDIENT], environment(), lambda *line: self.lines.append(line))
        return supervised(plan, child, RestartPolicy(first_delay_s=0.05))

    def running(self) -> list[str]:
        return [each.plan.name for each in self.service.processes if each.child.is_running]

    def num_starts(self) -> int:
        return len(self.lines)


async def test_workers_come_and_go_by_their_model_and_numbers_are_used_again() -> None:
    rig = Rig()
    running = asyncio.create_task(rig.service.run())
    await until(lambda: rig.num_starts() == 4)
    assert rig.fleet.sizes() == {"a": 2, "x": 1}
    assert await rig.fleet.ask("a", 1) == ("a", 2)
    assert rig.fleet.sizes() == {"a": 1, "x": 1}
    await until(lambda: [each.plan.name for each in rig.service.processes] == ["gateway-0", "worker-0", "worker-2"])
    assert await rig.fleet.ask("x", 3) == ("x", 1)
    await until(lambda: sorted(rig.running()) == ["gateway-0", "worker-0", "worker-1", "worker-2", "worker-3"])
    assert rig.fleet.sizes() == {"a": 1, "x": 3}
    assert await rig.fleet.ask("x", 3) == ("x", 3)
    assert rig.notices == [
        "a: from 2 to 1 workers, since an operator asked for it",
        "worker-1 (a) has left: fewer workers were asked for",
        "x: from 1 to 3 workers, since an operator asked for it",
    ]
    rig.service.on_signal()
    assert await running == 0
    assert rig.running() == []


async def test_workers_get_their_share_of_the_cores_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "usable_cores", lambda: 8)
    rig = Rig()
    for each in rig.service.processes:
        each.plan.settings.update(run_dir=str(tmp_path), num_threads=4)
    make = rig.fleet._make

    def made(number: int, model: str) -> SupervisedProcess:
        kept = make(number, model)
        kept.plan.settings.update(run_dir=str(tmp_path), num_threads=4)
        return kept

    rig.fleet._make, rig.fleet._divide = made, dividing(ServeSettings(workers=2, model=("a", "x=b")))
    running = asyncio.create_task(rig.service.run())
    await until(lambda: rig.num_starts() == 4)

    def threads() -> dict[str, int | None]:
        """As each worker reads them when it is started next."""
        files = {file.stem: tomllib.loads(file.read_text()) for file in tmp_path.glob("*.toml")}
        return {name: settings.get("num_threads") for name, settings in sorted(files.items())}

    await rig.fleet.ask("a", 2)
    assert threads() == {}
    await rig.fleet.ask("a", 4)
    assert threads() == {"worker-0": 2, "worker-1": 2, "worker-3": 2, "worker-4": 2}
    await rig.fleet.ask("a", 1)
    assert threads()["worker-0"] is None  # all of them
    kept = "a: workers that run keep their threads; one that is started anew has its new share"
    assert rig.notices.count(kept) == 2
    rig.service.on_signal()
    assert await running == 0


async def test_gateways_of_other_hosts_come_and_go_beside_the_workers() -> None:
    rig = Rig(
        room=lambda workers, gateways: f"no room for {workers} and {gateways}" if gateways > 3 else None, num_placed=1
    )
    running = asyncio.create_task(rig.service.run())
    await until(lambda: rig.num_starts() == 5)
    assert await rig.fleet.ask_gateways(3) == 1
    await until(lambda: {"gateway-1", "gateway-2", "gateway-3"} <= set(rig.running()))
    assert rig.fleet.sizes() == {"a": 2, "x": 1}
    with pytest.raises(CannotScale, match="no room for 3 and 4"):
        await rig.fleet.ask_gateways(4)
    assert await rig.fleet.ask_gateways(0) == 3
    own = ["gateway-0", "worker-0", "worker-1", "worker-2"]
    assert rig.listed[-1] == [*own, "-gateway-1", "-gateway-2", "-gateway-3"]
    await until(lambda: rig.listed[-1] == own)  # one that has left is listed no more
    assert await rig.fleet.ask_gateways(1) == 0
    assert await rig.fleet.ask_gateways(1) == 1
    await until(lambda: "gateway-1" in rig.running())
    assert rig.notices[0] == "on other hosts: from 1 to 3 gateways, since an operator asked for it"
    assert "gateway-3 has left: fewer gateways were asked for" in rig.notices
    rig.service.on_signal()
    assert await running == 0
    assert rig.running() == []


async def test_a_service_without_gateways_on_other_hosts_refuses_to_have_some() -> None:
    with pytest.raises(CannotScale, match=r"start it with --cluster-gateways$"):
        await Rig().fleet.ask_gateways(1)


async def test_a_full_disk_is_a_refusal() -> None:
    rig = Rig(num_placed=1)

    def full(number: int) -> SupervisedProcess:
        raise OSError(28, "No space left on device")

    rig.fleet._make_gateway = full
    with pytest.raises(CannotScale, match=r"settings of a gateway cannot be written: .* No space left on device"):
        await rig.fleet.ask_gateways(2)


async def test_one_that_died_as_it_was_to_leave_is_not_started_again() -> None:
    rig = Rig()
    running = asyncio.create_task(rig.service.run())
    await until(lambda: rig.num_starts() == 4)
    rig.service.on_ready()
    last = rig.service.processes[2]
    last.child.kill()
    await until(lambda: not last.child.is_running)
    await rig.fleet.ask("a", 1)
    await until(lambda: last not in rig.service.processes)
    assert not running.done()
    rig.service.on_signal()
    assert await running == 0


@pytest.mark.parametrize(
    ("rig", "model", "wrong", "why"),
    [
        (Rig, "c", NoSuchModel, "no model 'c' is served here, but a, x"),
        (Rig, "", NoSuchModel, "several models are served: name one of a, x"),
        (lambda: Rig(room=lambda workers, _: f"no room for {workers}"), "a", CannotScale, "no room for 6"),
        (lambda: Rig(reserved="--autoscale does that"), "a", CannotScale, "--autoscale does that"),
    ],
)
async def test_what_cannot_be_is_refused_in_a_sentence(
    rig: Callable[[], Rig], model: str, wrong: type[Exception], why: str
) -> None:
    with pytest.raises(wrong) as refused:
        await rig().fleet.ask(model, 5)
    assert str(refused.value) == why


async def test_while_it_starts_and_while_it_ends_the_number_stays() -> None:
    rig = Rig()
    rig.fleet.is_ready = False
    with pytest.raises(CannotScale, match="still starting"):
        await rig.fleet.ask("a", 3)
    rig.service.on_signal()
    with pytest.raises(CannotScale, match="shutting down"):
        await rig.fleet.ask("a", 3)


async def test_who_looks_for_room_keeps_nobody_else_from_going_on() -> None:
    """A look may start a process that counts GPUs, or wait for a cluster."""
    is_let_go = threading.Event()
    rig = Rig(room=lambda *_: "that is enough" if is_let_go.wait(20) else "nobody else went on")
    asking = asyncio.create_task(rig.fleet.ask("a", 3))
    await asyncio.sleep(0)
    is_let_go.set()
    with pytest.raises(CannotScale, match="that is enough"):
        await asking


async def test_two_who_ask_at_once_are_not_given_the_same_room() -> None:
    rig = Rig(room=lambda workers, _: f"no room for {workers}" if workers > 4 else None)
    running = asyncio.create_task(rig.service.run())
    answers = await asyncio.gather(rig.fleet.ask("a", 3), rig.fleet.ask("x", 2), return_exceptions=True)
    assert [str(each) for each in answers] == ["('a', 2)", "no room for 5"]
    rig.service.on_signal()
    assert await running == 0


async def test_a_gateway_that_drains_is_not_asked_for_its_load_without_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last snapshot is the end of a stream, again and again."""
    monkeypatch.setattr(fleet, "LOOK_S", 600.0)
    num_asked = 0

    class Draining(load_pb2_grpc.LoadServiceServicer, admin_pb2_grpc.AdminServiceServicer):
        async def WatchLoad(self, request: load_pb2.WatchLoadRequest, context: Any) -> None:
            nonlocal num_asked
            num_asked += 1
            await context.write(load_pb2.WatchLoadResponse(is_draining=True))

        async def Abort(self, request: admin_pb2.AbortRequest, context: Any) -> admin_pb2.AbortResponse:
            return admin_pb2.AbortResponse()

    server, rig, address = grpc.aio.server(), Rig(), f"unix:{tmp_path}/status.sock"
    load_pb2_grpc.add_LoadServiceServicer_to_server(Draining(), server)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(Draining(), server)
    server.add_insecure_port(address)
    await server.start()
    policy = AutoscalePolicy(floor=2, ceiling=4)
    following = asyncio.create_task(follow_load(rig.fleet, policy, [address], rig.notices.append))
    await until(lambda: num_asked)
    async with grpc.aio.insecure_channel(address) as channel:
        for _ in range(20):  # turns in which it could have asked again
            await admin_pb2_grpc.AdminServiceStub(channel).Abort(admin_pb2.AbortRequest(request_id="r"))
    assert num_asked == 1
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await server.stop(None)


async def test_another_gateway_tells_the_load_where_one_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "LOOK_S", 0.01)
    monkeypatch.setattr(fleet, "SILENT_S", 0.2)

    class Telling(load_pb2_grpc.LoadServiceServicer):
        def __init__(self, stands_still_after: int) -> None:
            self._most, self.num_told = stands_still_after, 0

        async def WatchLoad(self, request: load_pb2.WatchLoadRequest, context: Any) -> None:
            while self.num_told < self._most:
                self.num_told += 1
                await context.write(load_pb2.WatchLoadResponse())
                await asyncio.sleep(0.01)
            await asyncio.Event().wait()

    rig = Rig()
    servers, tellers = [grpc.aio.server() for _ in range(2)], [Telling(1), Telling(1000)]
    addresses = [f"unix:{tmp_path}/{number}.sock" for number in range(2)]
    for server, teller, address in zip(servers, tellers, addresses, strict=True):
        load_pb2_grpc.add_LoadServiceServicer_to_server(teller, server)
        server.add_insecure_port(address)
        await server.start()
    policy = AutoscalePolicy(floor=1, ceiling=4)
    following = asyncio.create_task(follow_load(rig.fleet, policy, addresses, rig.notices.append))
    await until(lambda: tellers[1].num_told > 3)
    assert tellers[0].num_told == 1
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    for server in servers:
        await server.stop(None)


async def test_the_load_asks_again_for_what_was_refused_without_forgetting_and_tells_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steered, num_asked = list[AutoscaleState](), 0

    def asking(policy: AutoscalePolicy, state: AutoscaleState, demand: object, now_s: float) -> AutoscaleState:
        steered.append(state)
        return replace(state, wanted=3, patience=4.0 * state.patience)

    def no_room(workers: int, _: int) -> str:
        nonlocal num_asked
        num_asked += 1
        return "no room"

    monkeypatch.setattr(fleet, "next_state", asking)

    class Telling(load_pb2_grpc.LoadServiceServicer):
        async def WatchLoad(self, request: load_pb2.WatchLoadRequest, context: Any) -> None:
            while True:
                await context.write(load_pb2.WatchLoadResponse())
                await asyncio.sleep(0.01)

    rig = Rig(room=no_room)
    server, address = grpc.aio.server(), f"unix:{tmp_path}/status.sock"
    load_pb2_grpc.add_LoadServiceServicer_to_server(Telling(), server)
    server.add_insecure_port(address)
    await server.start()
    following = asyncio.create_task(
        follow_load(rig.fleet, AutoscalePolicy(floor=1, ceiling=4), [address], rig.notices.append)
    )
    await until(lambda: num_asked > 3)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert {(each.wanted, each.patience, each.refused) for each in steered[2:]} == {(2, 1.0, 3), (1, 1.0, 3)}
    assert rig.notices == ["a keeps 2 workers: no room", "x keeps 1 worker: no room"]
    await server.stop(None)


# ---------------------------------------------------------------- a service of processes


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        folder = tmp_path_factory.mktemp("service")
        with launch(folder, *ORACLE, "--gateways=2", "--drain-grace-s=1") as running:
            running.wait_until_supervised()
            yield running


def octavo(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "octavo.cli.main", *words]
    return subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=120, check=False)


def test_the_command_reaches_a_service_of_this_user_and_no_stream_is_lost(service: Running) -> None:
    """From one worker to three and back to one, while outputs run that take longer than the drain's grace."""
    asked = {"token_ids": [5, 6, 7], "max_tokens": 300, "seed": 3, "output": "token_ids"}
    got: list[list[int]] = []

    def call() -> None:
        with Client(service.target) as client:
            got.append(list(client.complete(**asked).token_ids))

    call()
    done = octavo("scale", "folio-chat", "3")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "folio-chat: 3 workers (was 1; `octavo top` shows them come and go)\n"
    wait_for(lambda: len(service.load()) == 3)
    callers = [threading.Thread(target=call) for _ in range(6)]
    for each in callers:
        each.start()
    wait_for(lambda: sum(each.num_running for each in service.load()) == 6)
    done = octavo("scale", "1")
    assert done.stdout == "folio-chat: 1 worker (was 3; `octavo top` shows them come and go)\n"
    for each in callers:
        each.join(LIMIT_S)
    assert got == [got[0]] * 7
    assert len(got[0]) == 300
    wait_for(lambda: len(service.load()) == 1)
    wait_for(lambda: len(service.children("worker")) == 1)
    wait_for(lambda: listed_workers() == ["worker-0"])


def listed_workers() -> list[str]:
    """By `octavo ps`."""
    (found,) = map(json.loads, octavo("ps", "--json").stdout.splitlines())
    return [each["name"] for each in found["processes"] if each["role"] == "worker"]


def test_the_admin_port_takes_it_too_and_passes_on_what_is_refused(service: Running) -> None:
    port = f"--admin-port={service.admin_port}"
    assert octavo("scale", "1", port).stdout == "folio-chat: 1 worker (as it was)\n"
    done = octavo("scale", "folio-cat", "2", port)
    assert (done.returncode, done.stdout) == (1, "")
    assert "no model 'folio-cat' is served here: did you mean folio-chat?" in done.stderr
    for way in ([port], []):
        done = octavo("scale", "--cluster-gateways=1", *way)
        assert (done.returncode, done.stdout) == (1, "")
        assert "it has no gateways on other hosts" in done.stderr
    with grpc.insecure_channel(f"127.0.0.1:{service.admin_port}") as channel:
        with pytest.raises(grpc.RpcError) as refused:
            admin_pb2_grpc.AdminServiceStub(channel).ScaleGateways(admin_pb2.ScaleGatewaysRequest(), timeout=60)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "num_gateways" in str(refused.value.details())
        with pytest.raises(grpc.RpcError) as refused:
            admin_pb2_grpc.AdminServiceStub(channel).Scale(admin_pb2.ScaleRequest(num_workers=65), timeout=60)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "num_workers" in str(refused.value.details())


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (["oracle", "0"], 2, "'0' is not a number from 1 to 64"),
        (["oracle", "many"], 2, "'many' is not a number from 1 to 64"),
        (["a", "b", "3"], 2, "3 words were given"),
        (["2", "--admin-port=1"], 1, "the number of workers stays as it is"),
        (["--cluster-gateways=2", "--admin-port=1"], 1, "the number of gateways stays as it is"),
        (["--cluster-gateways=65"], 2, "--cluster-gateways"),
        ([], 2, "0 words were given"),
    ],
)
def test_mistakes_are_told_in_a_sentence(words: list[str], code: int, why: str) -> None:
    done = octavo("scale", *words)
    assert (done.returncode, done.stdout) == (code, "")
    assert why in done.stderr
    assert "Traceback" not in done.stderr


def test_where_nothing_serves_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    done = octavo("scale", "2")
    assert done.returncode == 1
    assert "of this user there run here: none" in done.stderr
