"""A worker, one process after another as a supervisor starts them, each with an epoch of its own: the real engine
with all that it owns, stepped on the virtual clock.

A step happens in one go; what it says leaves when its duration has passed, and is lost where the process dies before
that. Must not know what the callers want, nor why it is frozen or killed.
"""

import asyncio
import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from octavo.blockmgr.config import BlockManagerConfig
from octavo.blockmgr.ids import PrefixCache
from octavo.blockmgr.manager import BlockManager
from octavo.wire.bundle import bundle_digest
from octavo.wire.codec import encode
from octavo.wire.messages import Capacity, Leaving, ModelCard, Register, Run
from octavo.worker.config import SchedulerConfig
from octavo.worker.engine.engine import Engine, EngineConfig
from octavo.worker.engine.interfaces import EngineStats
from octavo.worker.runners.group import GroupLost, GroupRunner
from octavo.worker.scheduler.plan import GatewayIndex, RequestKey, StepOutputs, StepResult
from octavo.worker.scheduler.scheduler import Scheduler
from octavo.worker.transport.heartbeat import heartbeat_of
from octavo.worker.transport.watchdog import Watchdog
from sim.edges.fault_points import fault_point
from sim.edges.loop import SimLoop
from sim.edges.network import Hub
from sim.journal import Journal
from sim.processes.dealer import FaultyOutbox, SimDealer, SimLink
from sim.processes.fairness import FairnessWatch
from sim.processes.runner import VOCAB_SIZE, ProcessDied, SimClock, SimRunner, oracle_model
from sim.processes.watches import WorkerWatch
from sim.scenario import Scenario

if TYPE_CHECKING:
    from sim.world import World

MAX_IDLE_TURNS = 3  # with work waiting and nothing in flight


class SimScheduler(Scheduler):
    """The real scheduler, with fault points where the process may die."""

    def add(self, gateway: GatewayIndex, run: Run, *, now_s: float) -> None:
        super().add(gateway, run, now_s=now_s)
        fault_point("engine.added")

    def pause(self, key: RequestKey, *, now_s: float) -> None:
        super().pause(key, now_s=now_s)
        fault_point("engine.paused")

    def apply(self, result: StepResult, *, now_s: float) -> StepOutputs:
        outputs = super().apply(result, now_s=now_s)
        fault_point("engine.applied")
        return outputs


def scheduler_config(scenario: Scenario) -> SchedulerConfig:
    """The scheduler's part of the scenario."""
    config = scenario.config
    return SchedulerConfig(
        max_model_len=config.max_model_len,
        vocab_size=400,
        eos_token_ids=(2,),
        max_num_seqs=config.max_num_seqs,
        max_waiting=config.max_waiting,
        max_batch_tokens=config.max_batch_tokens,
        max_chunk_tokens=config.max_chunk_tokens,
        max_in_flight=config.max_in_flight,
        aging_s=config.aging_s,
        preempt_every_steps=config.preempt_every_steps,
        copy_s_per_block=config.copy_s,
    )


def block_manager_config(scenario: Scenario) -> BlockManagerConfig:
    """The block manager's part of the scenario."""
    config = scenario.config
    return BlockManagerConfig(
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        max_slots=config.max_num_seqs,
        max_blocks_per_slot=-(-config.max_model_len // config.block_size),
        fingerprint=b"sim",
        prefix_cache=PrefixCache.ON if config.has_prefix_cache else PrefixCache.OFF,
        secret=b"sim",
        num_host_blocks=config.num_host_blocks,
        max_copies_in=config.max_copies_in,
    )


class WorkerProcess:
    """One run of a worker's process. on_death(exit code): called once, if it ends by itself rather than by ``kill``.
    on_step: called after each turn of the engine."""

    def __init__(
        self,
        scenario: Scenario,
        loop: SimLoop,
        journal: Journal,
        hubs: list[Hub],
        register: Register,
        files: dict[str, bytes],
        *,
        on_death: Callable[[int], None],
        on_step: Callable[[], None],
    ) -> None:
        config = self._config = scenario.config
        self._loop, self._journal, self._on_death, self._on_step = loop, journal, on_death, on_step
        self.name = register.worker_id
        self.register = register
        self._awake = asyncio.Event()
        self._thawed = asyncio.Event()
        self._thawed.set()
        self.dealers = [SimDealer(hub, high_water=config.high_water, on_event=self._awake.set) for hub in hubs]
        self.beats = [SimDealer(hub, high_water=config.high_water, on_event=lambda: None) for hub in hubs]
        self.clock = SimClock(loop)
        self.link = SimLink(self.dealers, register, files, self.clock)
        self.link.on_refused = self._refused
        self.outbox = FaultyOutbox(self.link, journal)
        self.blocks = BlockManager(block_manager_config(scenario))
        self.scheduler = SimScheduler(scheduler_config(scenario), self.blocks)
        self.watch = WorkerWatch(self.scheduler, journal, self.name)
        self.link.on_drained = self.watch.heard
        self.runner = SimRunner(config, scenario.rng(f"steps of {register.epoch}"), self.clock, journal, self.name)
        self.runner.on_plan = self.watch.look_at
        group = self.group = self.runner.group
        self.engine = Engine(
            config=EngineConfig(epoch=register.epoch, audit_every_steps=0),
            scheduler=self.scheduler,
            blocks=self.blocks,
            runner=self.runner if group is None else GroupRunner(self.runner, group, close=group.close),
            inbox=self.link,
            outbox=self.outbox,
            clock=self.clock,
        )
        self.fairness = FairnessWatch(self.scheduler, journal, self.name, scenario)
        self.exit_code = 0
        self.is_alive = True
        self._computing_since: int | None = None  # how many steps there were before the one that takes its time now
        self._num_idle_turns = 0
        self._tasks = [
            asyncio.create_task(self._live(), name=f"process of {self.name}"),
            asyncio.create_task(self._beat(), name=f"heart of {self.name}"),
        ]

    # ------------------------------------------------------------ what is done to it

    def freeze(self) -> None:
        """SIGSTOP."""
        self._thawed.clear()

    def thaw(self) -> None:
        """SIGCONT."""
        self._thawed.set()

    def kill(self) -> None:
        """SIGKILL. Idempotent."""
        if self.is_alive:
            self.is_alive = False
            for socket in (*self.dealers, *self.beats):
                socket.close()
            for task in self._tasks:
                if task is not asyncio.current_task():
                    task.cancel()

    def _die(self, code: int) -> None:
        if self.is_alive:
            self.exit_code = code
            self.kill()
            self._on_death(code)

    @property
    def is_computing(self) -> bool:
        """Whether it is in the middle of a step."""
        return self._computing_since is not None

    @property
    def stats(self) -> EngineStats:
        """What the heartbeat thread sees: during a step, the work but not yet the step."""
        if self._computing_since is None:
            return self.engine.stats
        return self.engine.stats._replace(num_steps=self._computing_since, num_in_flight=1)

    # ------------------------------------------------------------ its threads

    async def _live(self) -> None:
        try:
            while not self.engine.is_done:
                num_steps = self.engine.num_steps
                await self._step()
                if self.engine.num_steps == num_steps and not self.engine.is_done and not self.engine.has_kv_events:
                    await self._wait(self.link.patience_s)
            reason = "STOPPED" if self.engine._is_stopping else "DRAINED"
            self.outbox.put_all(Leaving(epoch=self.register.epoch, reason=reason))
            await asyncio.sleep(0.05)  # lingering
            self._die(self.exit_code)
        except ProcessDied:
            self._die(139)
        except GroupLost:
            self._journal.outcomes["group lost"] += 1
            self._die(70)
        except Exception as error:
            self._journal.violate(f"the engine of {self.name} failed: {error!r}")
            self._die(70)

    async def _step(self) -> None:
        num_steps = self.engine.num_steps
        for dealer in self.dealers:
            dealer.compute()
        self.engine.step()
        self.watch.look()
        self._on_step()
        if self.clock.ahead_s:
            self._computing_since = num_steps
            await asyncio.sleep(self.clock.ahead_s)
            self.clock.ahead_s = 0.0
        await self._thawed.wait()
        self._computing_since = None
        for dealer in self.dealers:
            dealer.release()
        self._check(num_steps)

    async def _wait(self, limit_s: float) -> None:
        self._awake.clear()
        handle = self._loop.call_later(limit_s, self._awake.set)
        try:
            await self._awake.wait()
        finally:
            handle.cancel()
        await self._thawed.wait()

    async def _beat(self) -> None:
        watchdog = Watchdog(stall_timeout_s=self._config.stall_exit_s)
        while True:
            await asyncio.sleep(self._config.heartbeat_interval_s)
            await self._thawed.wait()
            if watchdog.is_stalled(self.stats, self._loop.time()):
                self._journal.outcomes["watchdog"] += 1
                self._die(75)
                return
            frame = encode(heartbeat_of(self.stats, self.register.epoch))
            for dealer, is_welcomed in zip(self.beats, self.link.welcomed.values(), strict=True):
                dealer.transitions()
                if is_welcomed:
                    dealer._try_send(frame)

    def _refused(self, reason: str) -> None:
        self.exit_code = 76
        self.engine.request_stop()

    # ------------------------------------------------------------ invariants

    def _check(self, num_steps: int) -> None:
        if self._config.poisons:
            leaving = {*self.blocks.host.outs.values(), *self.runner.leaving}  # the next plans copy them out first
            blank = self.blocks._pool.blank_blocks()
            self.runner.poison(blank[~np.isin(blank, list(leaving))] if leaving else blank)
        if self._config.tenants:
            self.fairness.look()
        every = self._config.audit_every_steps
        if every and self.engine.num_steps % every == 0:
            self.audit()
        stuck = self.scheduler.has_work and self.engine.num_steps == num_steps
        self._num_idle_turns = self._num_idle_turns + 1 if stuck else 0
        self._journal.check(self._num_idle_turns <= MAX_IDLE_TURNS, lambda: f"{self.name} has work and makes no steps")

    def audit(self) -> None:
        """Recount everything, and compare with the counters."""
        journal, blocks, counters = self._journal, self.blocks, self.scheduler.counters
        self.watch.recount()
        if self.group is not None:
            self.group.audit(self.runner)
        violations = blocks.audit().violations
        journal.check(not violations, lambda: f"audit of {self.name}: {violations}")
        total = blocks.num_free + blocks.num_cached + blocks.num_active
        journal.check(total == self._config.num_blocks, lambda: f"{total} blocks of {self._config.num_blocks}")
        host, wait = blocks.host, {request.block_owner for request in self.scheduler.requests if request.slot is None}
        journal.check(
            host.swapped.keys() <= wait, lambda: f"{sorted(host.swapped.keys() - wait)} left blocks on the host"
        )
        journal.counts["copied out"] = max(journal.counts["copied out"], host.num_copied_out)
        journal.counts["copied in"] = max(journal.counts["copied in"], host.num_copied_in)
        journal.counts["swaps"] = max(journal.counts["swaps"], counters.num_swaps)
        unfinished = self.scheduler.num_running + self.scheduler.num_waiting + self.scheduler.num_paused
        ended = counters.num_ended.total()
        is_whole = counters.num_accepted == ended + unfinished
        journal.check(is_whole, lambda: f"{counters} with {unfinished} unfinished")

    def check_quiet(self) -> None:
        """Without requests, it must hold nothing."""
        self.audit()
        journal, scheduler = self._journal, self.scheduler
        journal.check(scheduler.is_empty, f"{self.name} still has {list(scheduler.requests)}")
        journal.check(self.blocks.num_active == 0, f"{self.name} holds {self.blocks.num_active} blocks for nobody")
        num_held = self._config.num_host_blocks - self.blocks.host.pool.num_available
        journal.check(num_held == 0, f"{self.name} holds {num_held} host blocks for nobody")


class SimWorker:
    """A worker across restarts. ``process`` is None between two runs."""

    def __init__(self, world: "World", index: int, files: dict[str, bytes]) -> None:
        self.name = f"w{index}"
        self.process: WorkerProcess | None = None
        self._world, self._index, self._files = world, index, files
        self._num_runs = 0
        self._is_closed = False

    @property
    def is_quiet(self) -> bool:
        """Whether it is alive, known to every gateway, and idle."""
        process = self.process
        return (
            process is not None
            and all(process.link.welcomed.values())
            and not process.stats.has_work
            and process.scheduler.is_empty
        )

    def start(self) -> None:
        """Start a new run."""
        if self._is_closed:
            return
        self._num_runs += 1
        register = self._register()
        self._world.processes.alive.add(register.pid)
        process = self.process = WorkerProcess(
            self._world.scenario,
            self._world.loop,
            self._world.journal,
            self._world.hubs,
            register,
            self._files,
            on_death=self._died,
            on_step=lambda: self._world.chaos.look(self._index),
        )
        self._world.journal.note(f"{process.name} lives as {register.pid}")

    def crash(self) -> None:
        """SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self._died(-9)

    def close(self) -> None:
        """The end of the simulation."""
        self._is_closed = True
        if self.process is not None:
            self.process.kill()
            self.process = None

    def _died(self, code: int) -> None:
        process, self.process = self.process, None
        assert process is not None
        self._world.journal.note(f"{process.name} died with {code}")
        self._world.processes.ended(process.register.pid)
        self._world.loop.call_later(self._world.scenario.config.restart_s, self.start)

    def _register(self) -> Register:
        config, pid = self._world.scenario.config, 10_000 * (self._index + 1) + self._num_runs
        fingerprint = hashlib.blake2b(repr(oracle_model(config)).encode(), digest_size=32).hexdigest()
        return Register(
            worker_id=self.name,
            epoch=f"{pid:032x}",
            card=ModelCard(
                name="oracle",
                fingerprint=fingerprint,
                architecture="Oracle",
                dtype="oracle",
                max_model_len=config.max_model_len,
                vocab_size=VOCAB_SIZE,
                eos_token_ids=(2,),
                default_sampling={},
                tokenizer_digest=bundle_digest(self._files),
                tensor_parallel_size=config.num_ranks,
            ),
            capacity=Capacity(
                num_blocks=config.num_blocks,
                block_size=config.block_size,
                max_num_seqs=config.max_num_seqs,
                max_waiting=config.max_waiting,
                max_batch_tokens=config.max_batch_tokens,
            ),
            pid=pid,
            pid_namespace="sim",
        )
