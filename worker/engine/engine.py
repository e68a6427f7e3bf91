"""The engine loop: messages to the scheduler, steps to the runner, outputs to the gateways.

It decides nothing (the scheduler does) and knows no sockets (`worker.engine.interfaces`), tensors or text. One thread
owns it; other threads may read ``num_steps`` and ``stats`` and call ``request_drain`` and ``request_stop``.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from octavo.blockmgr.block_map import HostBlockMap
from octavo.blockmgr.manager import BlockManager
from octavo.wire.messages import AdminQuery, AdminReply, Cancel, Drain, HostBlocks, Leaving, Pause, Resume, Run
from octavo.worker.engine.block_checks import BlockChecks
from octavo.worker.engine.interfaces import (
    Clock,
    EngineStats,
    GatewayJoined,
    GatewayLost,
    Inbox,
    InboxMessage,
    NullObserver,
    Observer,
    Outbox,
    StepReport,
    step_output,
)
from octavo.worker.engine.kv_events import KvEventPublisher
from octavo.worker.grammar.manager import GrammarManager
from octavo.worker.runners.interface import Runner, RunnerError, RunnerOutOfMemory
from octavo.worker.scheduler.plan import GatewayIndex, RequestKey, StepOutputs
from octavo.worker.scheduler.request import failure
from octavo.worker.scheduler.scheduler import Scheduler
from octavo.worker.scheduler.slot_state import InFlightStep


class StepPipeline:
    """The steps launched on the runner, up to ``runner.max_in_flight``.

        plan ──► launch ──► (masks, if an output has a grammar) ──► collect ──► on_end(step, outputs)

    on_end: called with each step that has ended, in order, and with its outputs by gateway.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        runner: Runner,
        grammars: GrammarManager | None,
        clock: Clock,
        on_end: Callable[[InFlightStep, StepOutputs], None],
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._grammars = grammars
        self._clock = clock
        self._on_end = on_end
        self._launched: deque[InFlightStep] = deque()
        self._awaits_masks = False  # whether the newest launched step waits for masks

    def __len__(self) -> int:
        return len(self._launched)

    def launch_ahead(self) -> None:
        """Launch as many steps as the runner takes and the scheduler plans."""
        while len(self._launched) < self._runner.max_in_flight and not self._awaits_masks:
            plan = self._scheduler.plan(now_s=self._clock())
            if plan is None:
                return
            step = self._scheduler.newest_step
            step.launched_s = self._clock()
            self._launched.append(step)
            try:
                self._runner.launch(plan)
            except RunnerError as error:
                self._fail_launch(error)
                return
            self._awaits_masks = self._grammars is not None and self._scheduler.constraints.any_in_newest
            self._constrain()

    def collect(self) -> None:
        """Wait for the oldest step and hand its outputs to `on_end`. Masks that depend on its tokens are made first,
        since the device waits for them."""
        step = self._launched.popleft()
        try:
            result = self._runner.collect()
        except RunnerError as error:
            outputs = self._failed(step, error)
        else:
            step.ended_s = self._clock()
            outputs = self._scheduler.apply(result, now_s=step.ended_s)
        self._constrain()
        self._on_end(step, outputs)

    def _constrain(self) -> None:
        """Make the masks of the newest step once the tokens of all earlier ones are known. Until then the device is
        busy with the rest of the step."""
        if self._awaits_masks and len(self._launched) == 1 and self._grammars is not None:
            self._awaits_masks = False
            self._runner.constrain(self._grammars.masks(self._scheduler, self._clock()))

    def _fail_launch(self, error: RunnerError) -> None:
        """The newest plan did not start: collect the steps launched before it first, since they are good."""
        refused = self._launched.pop()
        while self._launched:
            self.collect()
        self._on_end(refused, self._failed(refused, error))

    def _failed(self, step: InFlightStep, error: RunnerError) -> StepOutputs:
        fail = self._scheduler.fail_out_of_memory if isinstance(error, RunnerOutOfMemory) else self._scheduler.fail
        outputs = fail(step.plan.step, str(error), now_s=self._clock())
        step.ended_s, step.failed = self._clock(), type(error).__name__
        return outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """epoch: identifies this run of the process. audit_every_steps: see `BlockChecks`; 0: no audits, not even without
    work. idle_wait_s: longest wait for messages at a time."""

    epoch: str
    audit_every_steps: int = 1000
    idle_wait_s: float = 0.5


class Engine:
    """One per worker process."""

    def __init__(
        self,
        *,
        config: EngineConfig,
        scheduler: Scheduler,
        blocks: BlockManager,
        runner: Runner,
        inbox: Inbox,
        outbox: Outbox,
        clock: Clock,
        observer: Observer | None = None,
        grammars: GrammarManager | None = None,
    ) -> None:
        self._config = config
        self._scheduler = scheduler
        self._blocks = blocks
        self._runner = runner
        self._inbox = inbox
        self._outbox = outbox
        self._clock = clock
        self._observer = observer or NullObserver()
        self._grammars = grammars
        self._kv_events = KvEventPublisher(blocks, outbox, epoch=config.epoch)
        self._pipeline = StepPipeline(
            scheduler=scheduler,
            runner=runner,
            grammars=grammars,
            clock=clock,
            on_end=self._step_ended,
        )
        self._seq: dict[GatewayIndex, int] = {}
        self._drain_until_s: float | None = None
        self._wanted_grace_s: float | None = None
        self._is_stopping = False
        self._checks = BlockChecks(blocks, clock, audit_every_steps=config.audit_every_steps)
        self.num_steps = 0
        self.stats = self._snapshot()

    # ------------------------------------------------------------ the loop

    def run(self) -> None:
        """Step until drained or stopped, then send Leaving and close the runner."""
        try:
            while not self.is_done:
                num_steps = self.num_steps
                self.step()
                if self.num_steps == num_steps and not self.is_done and not self.has_kv_events:
                    self._inbox.wait(self._config.idle_wait_s)
            self._outbox.put_all(
                Leaving(epoch=self._config.epoch, reason="STOPPED" if self._is_stopping else "DRAINED")
            )
        finally:
            self._runner.close()
            if self._grammars is not None:
                self._grammars.close()

    def step(self) -> None:
        """Do everything that can be done now. Blocks only while the device works."""
        for gateway, message in self._inbox.drain():
            self._handle(gateway, message)
        if self._grammars is not None and self._grammars.waiting:
            self._grammars.deliver(self._scheduler, self._clock())
        self._apply_drain()
        if self._scheduler.has_work and not self.stats.has_work:
            running, waiting = self._scheduler.num_running, self._scheduler.num_waiting
            # If this very step hangs, the watchdog must know that there was work.
            self.stats = self.stats._replace(num_running=running, num_waiting=waiting, awaits_grammars=False)
        self._pipeline.launch_ahead()
        if len(self._pipeline):
            self._pipeline.collect()
        else:
            self._send(self._scheduler.flush())
        self._scheduler.finish_result()
        self._kv_events.publish()
        self._checks.look(self._scheduler)
        self.stats = self._snapshot()

    @property
    def is_done(self) -> bool:
        """Whether it has been stopped, or is drained with nothing left to do."""
        is_drained = self._scheduler.is_draining and self._scheduler.is_empty and not len(self._pipeline)
        return self._is_stopping or is_drained

    @property
    def has_kv_events(self) -> bool:
        """Whether a gateway has not received all of the cache's contents yet: work that `has_work` does not count."""
        return self._kv_events.is_due

    def request_drain(self, grace_s: float) -> None:
        """Refuse new requests, finish the others within ``grace_s`` seconds, then end. What is left by then ends with
        DRAINING."""
        self._wanted_grace_s = grace_s

    def request_stop(self) -> None:
        """End after the current step; unfinished requests are lost."""
        self._is_stopping = True

    # ------------------------------------------------------------ messages

    def _handle(self, gateway: GatewayIndex, message: InboxMessage) -> None:
        now_s = self._clock()
        if not isinstance(message, AdminQuery) or message.flush_prefix_cache:
            self._checks.is_audit_due = True
        match message:
            case Run():
                self._add(gateway, message, now_s)
            case Cancel():
                for handle in message.handles:
                    self._scheduler.cancel(RequestKey(gateway, handle), now_s=now_s)
            case Pause():
                for handle in message.handles:
                    self._scheduler.pause(RequestKey(gateway, handle), now_s=now_s)
            case Resume():
                for handle in message.handles:
                    self._scheduler.resume(RequestKey(gateway, handle), now_s=now_s)
            case AdminQuery():
                self._outbox.put(gateway, self._answer(gateway, message))
            case Drain():
                self.request_drain(message.grace_s)
            case GatewayJoined():
                self._kv_events.begin(gateway)
            case GatewayLost():
                self._scheduler.drop_gateway(gateway, now_s=now_s)
                self._seq.pop(gateway, None)
                self._kv_events.end(gateway)

    def _add(self, gateway: GatewayIndex, run: Run, now_s: float) -> None:
        self._scheduler.add(gateway, run, now_s=now_s)
        constraints = self._scheduler.constraints
        if run.sampling.grammar is not None and constraints.awaits(gateway, run):
            if self._grammars is None:
                ending = failure("CONSTRAINT", "constraint: this worker compiles no grammars")
                constraints.failed(gateway, run, ending, now_s=now_s)
            else:
                self._grammars.submit(gateway, run, now_s)

    def _answer(self, gateway: GatewayIndex, query: AdminQuery) -> AdminReply:
        num_flushed = self._blocks.flush_prefix_cache() if query.flush_prefix_cache else 0
        violations = self._checks.audit() if query.audit else ()
        block_map = self._blocks.map(query.max_cells) if query.max_cells > 0 else None
        rows = self._scheduler.requests.outputs_of(gateway, max_outputs=query.max_outputs)
        return AdminReply(
            epoch=self._config.epoch,
            query_id=query.query_id,
            num_blocks=self._blocks.config.num_blocks,
            num_free_blocks=self._blocks.num_free,
            num_cached_blocks=self._blocks.num_cached,
            num_active_blocks=self._blocks.num_active,
            num_flushed_blocks=num_flushed,
            violations=violations,
            blocks_per_cell=block_map.blocks_per_cell if block_map else 0,
            cells=block_map.cells_C.tobytes() if block_map else b"",
            num_shared_blocks=block_map.num_shared if block_map else 0,
            host=_host_blocks(self._blocks.map_host(query.max_cells)) if block_map else None,
            handles=np.array([handle for handle, _, _ in rows], "<i8").tobytes(),
            phases=bytes(phase for _, phase, _ in rows),
            held_blocks=np.array([num_blocks for _, _, num_blocks in rows], "<i4").tobytes(),
        )

    def _apply_drain(self) -> None:
        if self._wanted_grace_s is not None:
            self._scheduler.drain()
            self._drain_until_s = self._clock() + self._wanted_grace_s
            self._wanted_grace_s = None
        if self._drain_until_s is not None and self._clock() >= self._drain_until_s:
            self._scheduler.end_all(failure("DRAINING", "the worker shut down before the end"), now_s=self._clock())

    # ------------------------------------------------------------ outputs

    def _step_ended(self, step: InFlightStep, outputs: StepOutputs) -> None:
        """Send the step's tokens before it is audited and reported."""
        self.num_steps += 1
        self._send(outputs)
        plan = step.plan
        self._checks.note_step(self.num_steps)
        self._observer.on_step(
            StepReport(
                step=plan.step,
                num_prefill_tokens=plan.num_tokens - len(plan.decode_slots_S),
                num_decode_tokens=len(plan.decode_slots_S),
                num_sampled=len(plan.sampled_slots),
                step_s=step.ended_s - step.launched_s,
                host_s=self._clock() - step.ended_s,
                failed=step.failed,
            )
        )

    def _send(self, outputs: StepOutputs) -> None:
        for gateway, output in outputs.items():
            seq = self._seq[gateway] = self._seq.get(gateway, 0) + 1
            message = step_output(output, epoch=self._config.epoch, seq=seq, step=self.num_steps)
            self._outbox.put(gateway, message)
            for finished in output.finished:
                self._observer.on_finished(finished)

    def _snapshot(self) -> EngineStats:
        """Gauges and counters as they are now; leaks and violations as last found."""
        counters = self._scheduler.counters
        return EngineStats(
            num_steps=self.num_steps,
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            waiting_since_s=self._scheduler.waiting_since_s if self._scheduler.num_waiting else None,
            num_paused=self._scheduler.num_paused,
            num_in_flight=self._scheduler.num_in_flight,
            awaits_grammars=self._scheduler.awaits_grammars,
            is_draining=self._scheduler.is_draining,
            num_blocks=self._blocks.config.num_blocks,
            num_free_blocks=self._blocks.num_free,
            num_cached_blocks=self._blocks.num_cached,
            num_active_blocks=max(0, self._blocks.num_active - self._checks.num_leaked),
            num_leaked_blocks=self._checks.num_leaked,
            num_violations=len(self._checks.violations),
            num_queried_tokens=self._blocks.num_queried_tokens,
            num_hit_tokens=self._blocks.num_hit_tokens,
            num_preemptions=counters.num_preemptions,
            num_swaps=counters.num_swaps,
            num_host_blocks=self._blocks.config.num_host_blocks,
            num_free_host_blocks=self._blocks.host.pool.num_blank,
            num_cached_host_blocks=self._blocks.host.pool.num_cached,
            num_copied_out_blocks=self._blocks.host.num_copied_out,
            num_copied_in_blocks=self._blocks.host.num_copied_in,
            num_pauses=counters.num_pauses,
            num_prefill_tokens=counters.num_prefill_tokens,
            num_decode_tokens=counters.num_decode_tokens,
            num_generated_tokens=counters.num_generated_tokens,
        )


def _host_blocks(found: HostBlockMap | None) -> HostBlocks | None:
    """The host map as a message; None if there is no second tier."""
    if found is None:
        return None
    return HostBlocks(
        num_blocks=found.num_blocks,
        num_free=found.num_free,
        num_cached=found.num_cached,
        num_swapped=found.num_swapped,
        blocks_per_cell=found.blocks_per_cell,
        cells=found.cells_C.tobytes(),
    )
