"""The supervisor's shell over processes that do as they are told: restarts, order of the end, no orphan."""

import asyncio
import contextlib
import errno
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import octavo.cli.serve.service
from octavo.cli.serve import children
from octavo.cli.serve.children import Child
from octavo.cli.serve.launch import ProcessPlan, Role, environment
from octavo.cli.serve.parent import EXIT_DRAINED
from octavo.cli.serve.service import Service, supervised
from octavo.cli.serve.supervisor import RestartPolicy
from tests.support.waiting import until

QUICK = RestartPolicy(first_delay_s=0.05, max_delay_s=0.1, fast_death_s=30.0)
OBEDIENT = "import signal, time; signal.signal(15, lambda *_: exit(0)); print('up', flush=True); time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
LEAVING = "print('up', flush=True)"
DYING = "print('up', flush=True); raise SystemExit(3)"
FORKING = (
    "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
    "print('up', p.pid, flush=True); time.sleep(60)"
)


class Stage:
    """A service of scripts, one per name, with what it said."""

    def __init__(self, **scripts: str) -> None:
        self.lines: list[tuple[str, str]] = []
        self.notices: list[str] = []
        kept = [supervised(self._plan(name), self._child(name, script), QUICK) for name, script in scripts.items()]
        self.children = {each.plan.name: each.child for each in kept}
        self.service = Service(kept, drain_grace_s=0.2, notice=self.notices.append)

    def _plan(self, name: str) -> ProcessPlan:
        role = Role.GATEWAY if name.startswith("gateway") else Role.WORKER
        return ProcessPlan(name=name, role=role, settings={"model": ["m"]}, metrics_port=0)

    def _child(self, name: str, script: str) -> Child:
        return Child(name, [sys.executable, "-c", script], environment(), lambda *line: self.lines.append(line))

    def num_starts(self, name: str) -> int:
        return sum(each == name and line.startswith("up") for each, line in self.lines)


async def test_a_killed_process_is_started_again_and_a_signal_ends_all_in_order() -> None:
    stage = Stage(gateway_0=OBEDIENT, worker_0=OBEDIENT)
    running = asyncio.create_task(stage.service.run())
    await until(lambda: stage.num_starts("gateway_0") == stage.num_starts("worker_0") == 1)
    stage.service.on_ready()
    first = stage.children["worker_0"].pid
    assert first is not None
    psutil.Process(first).kill()
    await until(lambda: stage.num_starts("worker_0") == 2)
    stage.service.on_signal()
    assert await running == 0
    assert stage.notices == ["worker_0 (m) died (signal 9); starting it again in 0.05 s"]
    assert not any(child.is_running for child in stage.children.values())


async def test_a_process_that_keeps_dying_after_it_served_is_started_as_often_as_it_takes() -> None:
    stage = Stage(gateway_0=OBEDIENT, worker_0=DYING)
    stage.service.on_ready()
    running = asyncio.create_task(stage.service.run())
    await until(lambda: stage.num_starts("worker_0") >= 8)
    assert not running.done()
    assert stage.children["gateway_0"].is_running
    stage.service.on_signal()
    assert await running == 0


async def test_a_host_without_room_for_a_process_does_not_end_what_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptor, memory or process to be had, for a moment: the others go on, and it is tried again."""
    stage = Stage(gateway_0=OBEDIENT, worker_0=OBEDIENT)
    running = asyncio.create_task(stage.service.run())
    await until(lambda: stage.num_starts("gateway_0") == stage.num_starts("worker_0") == 1)
    stage.service.on_ready()

    async def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    with monkeypatch.context() as full:
        full.setattr(asyncio, "create_subprocess_exec", refuse)
        stage.children["worker_0"].kill()
        await until(lambda: len(stage.notices) >= 5)
    assert stage.notices[1:3] == [
        "worker_0 (m) cannot be started: Resource temporarily unavailable",
        "worker_0 (m) could not be started; starting it again in 0.1 s",
    ]
    await until(lambda: stage.num_starts("worker_0") == 2)
    assert stage.num_starts("gateway_0") == 1
    stage.service.on_signal()
    assert await running == 0


@pytest.mark.parametrize("num_turns", range(8))
def test_what_fails_beside_a_service_ends_its_processes_however_far_they_are(num_turns: int) -> None:
    """The event loop ends then, and would cancel the start of a process, which may wait for ever."""
    stage = Stage(gateway_0=OBEDIENT, worker_0=OBEDIENT)

    async def serve() -> None:
        async with stage.service.running():
            for _ in range(num_turns):
                await asyncio.sleep(0)
            raise ImportError("half an installation")

    async def in_time() -> None:
        async with asyncio.timeout(20):
            await serve()

    with pytest.raises(ImportError, match="half an installation"):
        asyncio.run(in_time())
    assert not any(child.is_running for child in stage.children.values())


@pytest.mark.parametrize("num_signals", [1, 3])
async def test_a_signal_while_a_process_is_being_started_reaches_it(
    monkeypatch: pytest.MonkeyPatch, num_signals: int
) -> None:
    """The system has it already, and we have not heard so yet."""
    stage, spawned, spawn = Stage(gateway_0=OBEDIENT, worker_0=OBEDIENT), [], asyncio.create_subprocess_exec

    async def spawn_slowly(*command: str, **options: Any) -> asyncio.subprocess.Process:
        spawned.append(process := await spawn(*command, **options))
        await asyncio.sleep(0.1)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", spawn_slowly)
    running = asyncio.create_task(stage.service.run())
    await until(lambda: len(spawned) == 2)
    for _ in range(num_signals):
        stage.service.on_signal()
    async with asyncio.timeout(30):
        assert await running == 0
    assert not any(psutil.pid_exists(each.pid) for each in spawned)


async def test_one_of_several_gateways_that_cannot_start_ends_the_service() -> None:
    """Before all have answered once, the others of its kind are no reason to go on without a word."""
    stage = Stage(gateway_0=DYING, gateway_1=OBEDIENT, worker_0=OBEDIENT)
    async with asyncio.timeout(60):
        assert await stage.service.run() == 1
    assert stage.service.failure == "gateway_0 ended with exit code 3 before it was ready"
    assert stage.service.failed == "gateway_0"
    assert stage.notices == []  # it is told once, as the service's end
    assert not any(child.is_running for child in stage.children.values())


async def test_a_process_that_an_operator_asked_to_end_is_started_again() -> None:
    """A signal to one process, or a drain of one gateway, does not end the service."""
    stage = Stage(gateway_0=OBEDIENT, worker_0=OBEDIENT, worker_1=LEAVING)
    running = asyncio.create_task(stage.service.run())
    await until(lambda: stage.num_starts("gateway_0") == stage.num_starts("worker_0") == 1)
    stage.service.on_ready()
    stage.children["worker_0"].terminate()
    stage.children["gateway_0"].terminate()
    await until(lambda: stage.num_starts("gateway_0") == stage.num_starts("worker_0") == 2)
    await until(lambda: stage.num_starts("worker_1") >= 4)
    assert not running.done()
    again = "ended, though nobody asked the service to; starting it again in 0.05 s"
    assert {f"gateway_0 {again}", f"worker_0 (m) {again}"} <= set(stage.notices)
    stage.service.on_signal()
    assert await running == 0
    await asyncio.sleep(0.3)
    assert not any(child.is_running for child in stage.children.values())


async def test_gateways_that_an_operator_drained_stay_away_and_the_service_ends_with_the_last() -> None:
    drained = f"import time; print('up', flush=True); time.sleep(0.3); raise SystemExit({EXIT_DRAINED})"
    stage = Stage(gateway_0=drained, gateway_1=OBEDIENT, worker_0=OBEDIENT)
    running = asyncio.create_task(stage.service.run())
    await until(lambda: stage.notices == ["gateway_0 has left, drained by an operator"])
    assert not running.done()
    assert stage.num_starts("gateway_0") == 1
    stage.service.on_signal()
    assert await running == 0
    last = Stage(gateway_0=drained, worker_0=OBEDIENT)
    assert await last.service.run() == 0
    assert not any(child.is_running for child in last.children.values())


async def test_a_process_that_dies_before_the_service_was_ready_ends_it() -> None:
    stage = Stage(gateway_0=OBEDIENT, worker_0=DYING)
    assert await stage.service.run() == 1
    assert stage.num_starts("worker_0") == 1
    assert stage.service.failure == "worker_0 (m) ended with exit code 3 before it was ready"


async def test_the_second_signal_stops_at_once_and_the_third_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the time of a stage to be over: it would be ten minutes."""
    monkeypatch.setattr(octavo.cli.serve.service, "STOP_TIMEOUT_S", 600.0)
    monkeypatch.setattr(octavo.cli.serve.service, "WORKER_EXIT_TIMEOUT_S", 600.0)
    stage = Stage(gateway_0=STUBBORN, worker_0=STUBBORN)
    running = asyncio.create_task(stage.service.run())
    await until(lambda: stage.num_starts("gateway_0") == stage.num_starts("worker_0") == 1)
    for _ in range(3):
        stage.service.on_signal()
        await asyncio.sleep(0.1)
    async with asyncio.timeout(30):  # they would sleep for a minute
        assert await running == 0
    assert not any(child.is_running for child in stage.children.values())


async def test_gateways_are_asked_before_workers_so_that_requests_can_finish(tmp_path: Path) -> None:
    order = tmp_path / "order"
    script = (
        "import signal, sys, time\n"
        f"def end(*_):\n    open({str(order)!r}, 'a').write('NAME '); time.sleep(0.2); sys.exit(0)\n"
        "signal.signal(15, end); print('up', flush=True); time.sleep(60)"
    )
    stage = Stage(gateway_0=script.replace("NAME", "gateway"), worker_0=script.replace("NAME", "worker"))
    running = asyncio.create_task(stage.service.run())
    await until(lambda: stage.num_starts("gateway_0") == stage.num_starts("worker_0") == 1)
    stage.service.on_signal()
    assert await running == 0
    assert order.read_text() == "gateway worker "


async def test_the_children_of_a_process_end_with_it() -> None:
    stage = Stage(gateway_0=OBEDIENT, worker_0=FORKING)
    running = asyncio.create_task(stage.service.run())
    await until(lambda: stage.num_starts("worker_0") == 1)
    grandchild = int(next(line for name, line in stage.lines if name == "worker_0").split()[1])
    child = stage.children["worker_0"].pid
    assert child is not None
    psutil.Process(child).send_signal(signal.SIGKILL)
    assert await running == 1
    await until(lambda: not psutil.pid_exists(grandchild) or psutil.Process(grandchild).status() == "zombie")


async def test_a_line_without_end_is_dropped_and_the_next_one_arrives() -> None:
    long_line = "import sys; sys.stdout.write('x' * 3_000_000 + '\\n'); print('after', flush=True)"
    lines: list[str] = []
    child = Child("c", [sys.executable, "-c", long_line], environment(), lambda _, line: lines.append(line))
    assert await child.run() == 0
    assert lines[-1] == "after"
    assert all(len(line) < 2**20 for line in lines[:-1])


def own_pipes() -> set[str]:
    """That this process has open."""
    found = set[str]()
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was there while they were listed
            found.add(os.readlink(file))
    return {link for link in found if link.startswith("pipe:")}


async def test_a_grandchild_that_keeps_the_pipe_keeps_nothing_of_ours_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "PIPE_GRACE_S", 0.1)
    script = """
import subprocess, sys
kept = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(kept.pid, flush=True)
"""
    lines: list[str] = []
    before = own_pipes()
    child = Child("c", [sys.executable, "-c", script], environment(), lambda _, line: lines.append(line))
    assert await child.run() == 0
    await asyncio.sleep(0)  # what is closed is let go of in the next turn of the loop
    try:
        assert own_pipes() <= before
    finally:
        os.kill(int(lines[0]), signal.SIGKILL)


@pytest.mark.parametrize(("script", "code"), [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", -9)])
async def test_the_exit_code_is_told(script: str, code: int) -> None:
    assert await Child("c", [sys.executable, "-c", script], environment(), lambda *_: None).run() == code
