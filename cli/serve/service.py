"""Keeps the processes of one service alive, and ends them in order.

    starting → serving → draining → stopped        first signal: drain, second: stop, third: kill

It starts and signals processes, waits for them and reads the clock; decisions about restarts are
`cli.serve.supervisor`'s.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from octavo.cli.serve.children import ManagedProcess
from octavo.cli.serve.launch import ProcessPlan, Role
from octavo.cli.serve.parent import EXIT_NO_PLACE, EXIT_NOT_STARTED, EXIT_PLACE_LOST
from octavo.cli.serve.supervisor import Drained, GiveUp, Restart, RestartHistory, RestartPolicy, ending

STOP_TIMEOUT_S = 5.0
WORKER_EXIT_TIMEOUT_S = 10.0
Notice = Callable[[str], None]


class Stage(IntEnum):
    """The stage of the service; it only advances."""

    RUNNING = 0
    DRAINING = 1
    STOPPING = 2
    KILLING = 3


@dataclass(slots=True, kw_only=True, eq=False)
class SupervisedProcess:
    """One process that is kept alive, with its history. is_leaving: it is to end, and not to be restarted."""

    plan: ProcessPlan
    child: ManagedProcess
    history: RestartHistory
    is_leaving: bool = False


class Service:
    """All processes of one service. notice: called with each line that users should see. on_change: called when a
    process has joined, is to leave or has left."""

    def __init__(
        self,
        kept: Sequence[SupervisedProcess],
        *,
        drain_grace_s: float,
        notice: Notice,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.failure: str | None = None
        self.failed = ""  # name of the process that was given up
        self._kept = list(kept)
        self._keepers: dict[asyncio.Task[None], SupervisedProcess] = {}
        self._drain_grace_s = drain_grace_s
        self._notice = notice
        self._on_change = on_change
        self.stage = Stage.RUNNING
        self._woken = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def processes(self) -> tuple[SupervisedProcess, ...]:
        """All of them, including those that are leaving."""
        return tuple(self._kept)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[int]]:
        """`run` as a task, which has ended when the context exits: if the body fails, the processes are killed first.
        If the event loop cancelled the task instead, a process start that it interrupts might never return (CPython
        3.11)."""
        task = asyncio.create_task(self.run())
        try:
            yield task
        finally:
            if not task.done():
                self.advance(Stage.KILLING)
                await asyncio.wait([task])

    async def run(self) -> int:
        """Start everything, and return when everything has ended: 0 if it was asked to, 1 if it could not go on. Raises
        OSError if a process that has never served cannot be started."""
        for each in sorted(self._kept, key=lambda kept: kept.plan.role is not Role.WORKER):  # workers take longest
            self._start(each)
        roles = {each.plan.role for each in self._kept}
        try:
            while self._can_go_on(roles):
                await self._ended.wait()
                self._ended.clear()
                for task in [task for task in self._keepers if task.done()]:
                    self._kept.remove(self._keepers.pop(task))
                    self._on_change()
                    if not task.cancelled():  # `retire` cancels it if the process waits for its next start
                        task.result()
            self.advance(Stage.STOPPING if self.failure else Stage.DRAINING)  # what never served has nothing to finish
            await self._end()
        finally:
            for each in self._kept:
                each.child.kill()
            await asyncio.gather(*self._keepers, return_exceptions=True)
        return 1 if self.failure else 0

    def _can_go_on(self, roles: set[Role]) -> bool:
        """Whether no one asked it to end, no process was given up, and there is at least one process of each role."""
        if self.stage is not Stage.RUNNING or self.failure:
            return False
        return {each.plan.role for each in self._keepers.values()} == roles

    def add(self, kept: SupervisedProcess) -> None:
        """Start one more process while the service runs. If it fails to start it is retried, since others serve
        already."""
        kept.history.on_ready()
        self._kept.append(kept)
        self._start(kept)
        self._on_change()

    def retire(self, kept: SupervisedProcess) -> None:
        """Let a process finish its requests and end; it is not restarted. Returns at once."""
        kept.is_leaving = True
        if not kept.child.is_running:  # it waits for its next start
            self._keeper_of(kept).cancel()
        kept.child.terminate()
        limit_s = self._drain_grace_s + WORKER_EXIT_TIMEOUT_S
        killing = asyncio.get_running_loop().call_later(limit_s, kept.child.kill)
        self._keeper_of(kept).add_done_callback(lambda _: killing.cancel())
        self._on_change()

    def _start(self, kept: SupervisedProcess) -> None:
        task = asyncio.create_task(self._keep(kept), name=kept.plan.name)
        task.add_done_callback(lambda _: self._ended.set())
        self._keepers[task] = kept

    def _keeper_of(self, kept: SupervisedProcess) -> asyncio.Task[None]:
        return next(task for task, each in self._keepers.items() if each is kept)

    def on_signal(self) -> None:
        """Ctrl-C or SIGTERM: advance by one stage."""
        self.advance(Stage(min(self.stage + 1, Stage.KILLING)))

    def advance(self, stage: Stage) -> None:
        """Advance to a later stage; no-op for an earlier one."""
        if stage > self.stage:
            self.stage = stage
            self._woken.set()
            self._ended.set()

    def on_ready(self) -> None:
        """The whole service answers."""
        for each in self._kept:
            each.history.on_ready()

    async def _keep(self, kept: SupervisedProcess) -> None:
        while self.stage is Stage.RUNNING:
            kept.history.on_start(time.monotonic())
            code = await self._run(kept)
            if self.stage is not Stage.RUNNING:
                return
            if kept.is_leaving:
                others = "gateways" if kept.plan.role is Role.GATEWAY else "workers"
                self._notice(f"{kept.plan.label} has left: fewer {others} were asked for")
                return
            match kept.history.on_exit(code, time.monotonic()):
                case Drained():
                    self._notice(f"{kept.plan.label} has left, drained by an operator")
                    return
                case GiveUp(why=why):
                    if self.failure is None:  # the others may fail for the same reason
                        self.failure, self.failed = why, kept.plan.name
                    return
                case Restart(delay_s=delay_s):
                    self._notice(f"{kept.plan.label} {_ended(code)}; starting it again in {delay_s:g} s")
                    await self._sleep(delay_s)

    async def _run(self, kept: SupervisedProcess) -> int:
        """Run the process; returns its exit code. Raises OSError if it cannot be started and has never served. If it
        has, returns EXIT_NOT_STARTED: a service must survive a moment in which its host cannot start a process."""
        try:
            return await kept.child.run()
        except OSError as error:
            if not kept.history.was_ready:
                raise
            self._notice(f"{kept.plan.label} cannot be started: {error.strerror or error}")
            return EXIT_NOT_STARTED

    async def _end(self) -> None:
        """End front ends and gateways first, while the workers finish their requests; then workers; then the rest."""
        gateways = [each.child for each in self._kept if each.plan.role is not Role.WORKER]
        workers = [each.child for each in self._kept if each.plan.role is Role.WORKER]
        if self.stage is Stage.DRAINING:
            await self._terminate(gateways, timeout_s=self._drain_grace_s + STOP_TIMEOUT_S, until=Stage.STOPPING)
            await self._terminate(workers, timeout_s=WORKER_EXIT_TIMEOUT_S, until=Stage.STOPPING)
        if self.stage < Stage.KILLING:
            self.advance(Stage.STOPPING)
            await self._terminate([*gateways, *workers], timeout_s=STOP_TIMEOUT_S, until=Stage.KILLING)

    async def _terminate(self, children: Sequence[ManagedProcess], *, timeout_s: float, until: Stage) -> None:
        """Send SIGTERM and wait until all have ended, the time is up, or the service has reached stage `until`."""
        deadline_s = time.monotonic() + timeout_s
        for child in children:
            child.terminate()
        while any(child.is_running for child in children):
            if time.monotonic() >= deadline_s or self.stage >= until:
                return
            await asyncio.sleep(0.02)

    async def _sleep(self, delay_s: float) -> None:
        """Sleep until the time is up or the stage changes."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._woken.wait()


def supervised(plan: ProcessPlan, child: ManagedProcess, policy: RestartPolicy) -> SupervisedProcess:
    """A process with an empty history."""
    return SupervisedProcess(plan=plan, child=child, history=RestartHistory(name=plan.label, policy=policy))


def _ended(code: int) -> str:
    if code == 0:
        return "ended, though nobody asked the service to"
    if code in (EXIT_PLACE_LOST, EXIT_NO_PLACE, EXIT_NOT_STARTED):
        return ending(code)
    return f"died (signal {-code})" if code < 0 else f"died (exit code {code})"
