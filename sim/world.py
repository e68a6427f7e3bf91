"""Puts a scenario on stage: gateways, workers, callers, chaos; then quiet; then the reckoning."""

import asyncio
import gc
from typing import Any

from octavo.gateway.text.model_text import ModelText
from octavo.worker.runners.oracle.tokenizer import oracle_tokenizer_files
from sim.callers.caller import Caller
from sim.callers.excuses import Excuses
from sim.callers.expectation import Expectation
from sim.edges import fault_points
from sim.edges.loop import START_S, Deadlock, Livelock, LogLine, SimLoop, isolated
from sim.edges.network import Hub
from sim.faults.chaos import Chaos
from sim.journal import Journal, Report
from sim.processes.gateway import Processes, SimGateway
from sim.processes.runner import VOCAB_SIZE
from sim.processes.worker import SimWorker
from sim.scenario import FaultKind, RequestSpec, Scenario

READY_S = 30.0
LIVENESS_S = 900.0
SETTLE_S = 120.0
DEFECTS = {
    "defect",
    "message_failed",
    "tick_failed",
    "sink_failed",
    "on_change_failed",
    "on_model_failed",
    "audit_failed",
}


class World:
    """Everything of one run."""

    def __init__(self, scenario: Scenario, loop: SimLoop, journal: Journal) -> None:
        config = scenario.config
        self.scenario, self.loop, self.journal = scenario, loop, journal
        self.hubs = [
            Hub(loop, scenario.rng(f"link {index}"), journal, delay_s=config.link_delay_s)
            for index in range(config.num_gateways)
        ]
        self.processes = Processes(loop, is_watched=config.is_watched)
        files = oracle_tokenizer_files(VOCAB_SIZE)
        text = ModelText(files, num_ids=VOCAB_SIZE)
        self.expectation = Expectation(config, text.table.visible_bytes)
        self.excuses = Excuses(scenario)
        self.workers = [SimWorker(self, index, files) for index in range(config.num_workers)]
        self.gateways: list[SimGateway | None] = [None] * config.num_gateways
        self.chaos = Chaos(self)
        self._tasks: set[asyncio.Task[Any]] = set()

    # ------------------------------------------------------------ the play

    async def run(self) -> None:
        """From the start of the first process to the end of the last."""
        for index in range(len(self.gateways)):
            await self._start_gateway(index)
        for worker in self.workers:
            worker.start()
        await self._until_ready()
        start_s = self.loop.time()
        chaos = asyncio.create_task(self.chaos.run(self.scenario.faults, start_s), name="chaos")
        callers = [
            asyncio.create_task(self._call(spec, start_s), name=f"caller {spec.index}")
            for spec in self.scenario.requests
        ]
        await chaos
        last_s = max((spec.at_s for spec in self.scenario.requests), default=0.0)
        await asyncio.sleep(max(0.0, start_s + last_s - self.loop.time()))
        self.chaos.stop()
        await self._everything_ends(callers)
        await self._settle()
        await self._canary()
        await asyncio.sleep(1.0)
        self._check_end()
        await self._close()

    async def _until_ready(self) -> None:
        end_s = self.loop.time() + READY_S
        while self.loop.time() < end_s:
            if all(gateway is not None and gateway.is_ready() for gateway in self.gateways):
                return
            await asyncio.sleep(0.1)
        self.journal.violate("the service is not ready")

    async def _call(self, spec: RequestSpec, start_s: float) -> None:
        await asyncio.sleep(max(0.0, start_s + spec.at_s - self.loop.time()))
        self.expectation.remember(spec)
        await Caller(
            spec, self.loop, self.journal, lambda index: self.gateways[index], self.expectation, self.excuses
        ).run()

    async def _everything_ends(self, callers: list["asyncio.Task[None]"]) -> None:
        if not callers:
            return
        _, pending = await asyncio.wait(callers, timeout=LIVENESS_S)
        for task in callers:
            if task in pending:
                self.journal.violate(f"{task.get_name()} waits for ever")
                task.cancel()
            elif (error := task.exception()) is not None:
                self.journal.violate(f"{task.get_name()}: {error!r}")
        self.journal.counts["checks"] += len(callers)

    async def _settle(self) -> None:
        """What hangs is found and replaced, what is late arrives."""
        end_s = self.loop.time() + SETTLE_S
        while self.loop.time() < end_s:
            await asyncio.sleep(1.0)
            if all(worker.is_quiet for worker in self.workers) and all(map(self._is_quiet, self.gateways)):
                return

    def _is_quiet(self, gateway: SimGateway | None) -> bool:
        """It has the present process of every worker, and nothing in flight."""
        if gateway is None or not gateway.is_ready():
            return False
        epochs = {worker.process.register.epoch for worker in self.workers if worker.process is not None}
        workers = gateway.pool.workers()
        return {worker.epoch for worker in workers} == epochs and not any(worker.in_flight for worker in workers)

    async def _canary(self) -> None:
        for index in range(len(self.gateways)):
            before = self.journal.outcomes["OK"]
            spec = RequestSpec(
                index=1_000_000 + index,
                at_s=0,
                prompt=(3, 4),
                max_tokens=2,
                seed=1,
                gateway=index,
                timeout_s=30.0,
                retries=5,
            )
            self.expectation.remember(spec)
            caller = Caller(
                spec, self.loop, self.journal, lambda index: self.gateways[index], self.expectation, self.excuses
            )
            await caller.run()
            self.journal.check(self.journal.outcomes["OK"] == before + 1, f"the canary ended {caller.status}")

    def _check_end(self) -> None:
        for worker in self.workers:
            self.journal.check(worker.process is not None, f"{worker.name} was not started again")
            if worker.process is not None:
                worker.process.check_quiet()
        for index, gateway in enumerate(self.gateways):
            self.journal.check(gateway is not None, f"g{index} was not started again")
            if gateway is not None:
                gateway.check_quiet(f"g{index}")

    async def _close(self) -> None:
        for gateway in self.gateways:
            if gateway is not None:
                await gateway.stop()
        for worker in self.workers:
            worker.close()
        await asyncio.sleep(1.0)
        left = [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        self.journal.check(not left, f"tasks are left: {left}")

    # ------------------------------------------------------------ gateways

    async def _start_gateway(self, index: int) -> None:
        gateway = SimGateway(self.scenario.config, self.loop, self.journal, self.hubs[index], self.processes)
        await gateway.start()
        self.gateways[index] = gateway

    def kill_gateway(self, index: int) -> None:
        """Its next process follows."""
        gateway = self.gateways[index]
        if gateway is not None:
            self.gateways[index] = None
            gateway.kill()
            self.loop.call_later(self.scenario.config.restart_s, self._spawn, index)

    def drain_gateway(self, index: int, grace_s: float) -> None:
        """Its process is asked to end; its next process follows."""
        gateway = self.gateways[index]
        if gateway is not None and not gateway.tracker.is_draining:
            self._keep(asyncio.create_task(self._drain(index, gateway, grace_s), name=f"drain of g{index}"))

    async def _drain(self, index: int, gateway: SimGateway, grace_s: float) -> None:
        gateway.begin_drain(grace_s)
        await gateway.drained.wait()
        if gateway.is_dead:
            return
        await gateway.stop()
        if self.gateways[index] is gateway:
            self.gateways[index] = None
            gateway.check_stopped(f"g{index}")
            await asyncio.sleep(self.scenario.config.restart_s)
            await self._start_gateway(index)

    def _spawn(self, index: int) -> None:
        self._keep(asyncio.create_task(self._start_gateway(index), name=f"start of g{index}"))

    def _keep(self, task: "asyncio.Task[None]") -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def simulate(scenario: Scenario, *, story_lines: int = 0) -> Report:
    """Run a scenario. Never raises for what it finds; that is in the report."""
    loop = SimLoop()
    journal = Journal(loop, story_lines=story_lines)
    asyncio.set_event_loop(loop)
    with isolated(loop, scenario.seed) as lines:
        loop.set_exception_handler(lambda _, context: journal.violate(f"event loop: {_told(context)}"))
        try:
            world = World(scenario, loop, journal)
            fault_points.arm(world.chaos.at_point)
            loop.run_until_complete(world.run())
        except (Deadlock, Livelock) as error:
            journal.violate(f"{type(error).__name__} {error}")
        finally:
            fault_points.disarm()
            _close_loop(loop)
            asyncio.set_event_loop(None)
        _judge_log(lines, scenario, journal)
    return Report(
        seed=scenario.seed,
        trace=journal.trace,
        violations=tuple(journal.violations),
        virtual_s=loop.time() - START_S,
        requests=journal.counts["requests"],
        tokens=journal.counts["tokens"],
        steps=journal.counts["steps"],
        checks=journal.counts["checks"],
        faults=journal.faults,
        outcomes=journal.outcomes,
        points=journal.points,
        story=tuple(journal.story),
    )


def _told(context: dict[str, Any]) -> str:
    return f"{context.get('message')} {context.get('exception')!r}"


def _judge_log(lines: list[LogLine], scenario: Scenario, journal: Journal) -> None:
    """What the product calls a defect of its own is one, unless it was planted."""
    planted = {FaultKind.DEFECT, FaultKind.LIE} & {fault.kind for fault in scenario.faults}
    for line in lines:
        if line["event"] in DEFECTS and not (planted and line["event"] == "defect"):
            journal.violate(f"log: {line}")


def _close_loop(loop: SimLoop) -> None:
    loop.set_exception_handler(lambda _, context: None)
    for task in asyncio.all_tasks(loop):
        task.cancel()
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    for _ in range(20):
        if not asyncio.all_tasks(loop):
            break
        loop.call_soon(loop.stop)
        loop.run_forever()
    loop.close()
    gc.collect(0)
