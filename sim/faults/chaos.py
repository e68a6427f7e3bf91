"""Makes faults happen, and takes them all back. Knows what each kind does to which part, not when."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from octavo.gateway.errors import RequestAborted
from octavo.gateway.workers.errors import PoolError
from octavo.worker.runners.interface import RunnerError, RunnerOutOfMemory
from sim.faults.triggered import TriggeredFaults
from sim.processes.runner import ProcessDied
from sim.scenario import TRIGGERED, Fault, FaultKind

if TYPE_CHECKING:
    from sim.world import World

CUT_AFTER_S = 10.0  # wire.options.PING_TIMEOUT_MS


class Chaos:
    """Injects the faults of one world."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._pending: Counter[tuple[str, str]] = Counter()  # (task or "", point) that something happens at
        self._queries: set[asyncio.Task[None]] = set()
        self._triggered = TriggeredFaults(world)
        self.look = self._triggered.look
        self._actions: dict[FaultKind, Callable[[Fault], None]] = {
            FaultKind.CRASH: self._crash,
            FaultKind.CRASH_AT: self._crash_at,
            FaultKind.FREEZE: self._freeze,
            FaultKind.SLOW: self._slow,
            FaultKind.HANG: self._hang,
            FaultKind.OUT_OF_MEMORY: self._fail_step,
            FaultKind.ENGINE_ERROR: self._fail_step,
            FaultKind.LIE: self._lie,
            FaultKind.DISCONNECT: self._disconnect,
            FaultKind.PARTITION: self._partition,
            FaultKind.LAG: self._partition,
            FaultKind.DRAIN_WORKER: self._drain_worker,
            FaultKind.KILL_GATEWAY: self._kill_gateway,
            FaultKind.DRAIN_GATEWAY: self._drain_gateway,
            FaultKind.ABORT: self._abort,
            FaultKind.FLUSH: self._flush,
            **dict.fromkeys(TRIGGERED, self._triggered.add),
            FaultKind.DEFECT: self._defect,
            FaultKind.RANK_DIES: self._lose_rank,
            FaultKind.RANK_STOPS: self._lose_rank,
        }

    async def run(self, faults: tuple[Fault, ...], start_s: float) -> None:
        """Inject all faults, each at its time."""
        loop = self._world.loop
        for fault in faults:
            await asyncio.sleep(max(0.0, start_s + fault.at_s - loop.time()))
            self._world.journal.note(f"fault {fault}")
            self._world.journal.faults[fault.kind.value] += 1
            self._actions[fault.kind](fault)

    def stop(self) -> None:
        """End all faults, and replace what they destroyed."""
        self._pending.clear()
        self._triggered.clear()
        for worker in self._world.workers:
            if (process := worker.process) is not None:
                process.thaw()
                process.outbox.lie = ""
                process.runner.hangs, process.runner.next_error, process.runner.slow_until_s = False, None, 0.0
                if process.group is not None and not process.group.is_whole and not process.is_computing:
                    worker.crash()  # nobody would notice before the next step; a step under way is the watchdog's

    def at_point(self, name: str) -> None:
        """The product passes a fault point."""
        self._world.journal.points[name] += 1
        if not self._pending:
            return
        task = asyncio.current_task()
        key = (task.get_name() if task is not None and name.startswith("engine.") else "", name)
        if self._pending[key] > 0:
            self._pending[key] -= 1
            if key[0]:
                raise ProcessDied(f"killed at {name}")
            raise RuntimeError(f"planted at {name}")

    # ------------------------------------------------------------ workers

    def _crash(self, fault: Fault) -> None:
        self._world.workers[fault.worker].crash()

    def _crash_at(self, fault: Fault) -> None:
        self._pending[(f"process of w{fault.worker}", fault.detail)] += 1

    def _freeze(self, fault: Fault) -> None:
        process = self._world.workers[fault.worker].process
        if process is not None:
            process.freeze()
            self._world.loop.call_later(fault.duration_s, process.thaw)

    def _slow(self, fault: Fault) -> None:
        process = self._world.workers[fault.worker].process
        if process is not None:
            process.runner.slow_until_s = self._world.loop.time() + fault.duration_s

    def _hang(self, fault: Fault) -> None:
        process = self._world.workers[fault.worker].process
        if process is not None:
            process.runner.hangs = True

    def _lose_rank(self, fault: Fault) -> None:
        process = self._world.workers[fault.worker].process
        if process is not None and process.group is not None:
            lose = process.group.kill if fault.kind is FaultKind.RANK_DIES else process.group.stop
            lose(int(fault.detail or 1))

    def _fail_step(self, fault: Fault) -> None:
        process = self._world.workers[fault.worker].process
        if process is not None:
            kind = RunnerOutOfMemory if fault.kind is FaultKind.OUT_OF_MEMORY else RunnerError
            process.runner.next_error = kind("planted")

    def _lie(self, fault: Fault) -> None:
        process = self._world.workers[fault.worker].process
        if process is not None:
            process.outbox.lie = fault.detail

    def _drain_worker(self, fault: Fault) -> None:
        process = self._world.workers[fault.worker].process
        if process is not None:
            process.engine.request_drain(fault.duration_s)

    # ------------------------------------------------------------ connections

    def _disconnect(self, fault: Fault) -> None:
        process = self._world.workers[fault.worker].process
        if process is not None:
            process.dealers[fault.gateway].cut()

    def _partition(self, fault: Fault) -> None:
        process, until_s = self._world.workers[fault.worker].process, self._world.loop.time() + fault.duration_s
        if process is not None:
            for dealer in (process.dealers[fault.gateway], process.beats[fault.gateway]):
                dealer.partition(until_s, cut_after_s=CUT_AFTER_S)

    # ------------------------------------------------------------ gateways

    def _kill_gateway(self, fault: Fault) -> None:
        self._world.kill_gateway(fault.gateway)

    def _drain_gateway(self, fault: Fault) -> None:
        self._world.drain_gateway(fault.gateway, fault.duration_s)

    def _abort(self, fault: Fault) -> None:
        gateway = self._world.gateways[fault.gateway]
        if gateway is not None:
            for request_id in gateway.tracker.admission.request_ids():
                gateway.tracker.abort(request_id)
            gateway.tracker.fail_all(RequestAborted("an operator ended it"))

    def _flush(self, fault: Fault) -> None:
        task = asyncio.create_task(self._ask(fault.gateway), name="operator")
        self._queries.add(task)
        task.add_done_callback(self._queries.discard)

    async def _ask(self, index: int) -> None:
        gateway = self._world.gateways[index]
        if gateway is None:
            return
        try:
            replies = await gateway.pool.query(audit=True, flush=True, timeout_s=5.0)
        except PoolError:
            return
        for name, reply in replies:
            self._world.journal.check(not reply.violations, f"audit of {name}: {reply.violations}")

    def _defect(self, fault: Fault) -> None:
        self._pending[("", fault.detail)] += 1
