"""The steps that the runner has: launched ahead, constrained once they can be, collected in their order, or failed.

    plan ──► launch ──► (masks, where an output has a grammar) ──► collect ──► the scheduler's outputs

Decides nothing, and knows no gateways: what a step gave goes to whoever asked for it. One thread owns it.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from wire.fault_points import fault_point
from worker.grammar_desk import GrammarDesk
from worker.outputs import StepOutputs
from worker.plan import StepPlan
from worker.ports import Clock
from worker.runner import Runner, RunnerError, RunnerOutOfMemory
from worker.scheduler import Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedStep:
    """Times are the clock's. landed_s: when its result was there. failed: "" or the name of the error that ended it."""

    plan: StepPlan
    launched_s: float
    landed_s: float
    failed: str = ""


@dataclass(frozen=True, slots=True)
class _Launched:
    plan: StepPlan
    launched_s: float

    def ended(self, landed_s: float, failed: str = "") -> EndedStep:
        return EndedStep(plan=self.plan, launched_s=self.launched_s, landed_s=landed_s, failed=failed)


class Steps:
    """Keeps up to ``runner.max_in_flight`` steps launched. on_end: told of each step once its outputs are known. send:
    takes the outputs of the steps that a failed launch ends."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        runner: Runner,
        grammars: GrammarDesk | None,
        clock: Clock,
        on_end: Callable[[EndedStep], None],
        send: Callable[[StepOutputs], None],
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._grammars = grammars
        self._clock = clock
        self._on_end = on_end
        self._send = send
        self._launched: deque[_Launched] = deque()
        self._awaits_masks = False  # the newest launched step does

    def __len__(self) -> int:
        return len(self._launched)

    def launch_ahead(self) -> None:
        """As many as the runner takes and the scheduler plans."""
        while len(self._launched) < self._runner.max_in_flight and not self._awaits_masks:
            plan = self._scheduler.plan(now_s=self._clock())
            if plan is None:
                return
            self._launched.append(_Launched(plan, self._clock()))
            try:
                self._runner.launch(plan)
            except RunnerError as error:
                self._fail_launch(error)
                return
            fault_point("engine.launched")
            self._awaits_masks = self._grammars is not None and self._scheduler.constraints.any_in_newest
            self._constrain()

    def collect(self) -> StepOutputs:
        """What the oldest step gave; waits for it."""
        launched = self._launched.popleft()
        try:
            result = self._runner.collect()
        except RunnerError as error:
            outputs = self._failed(launched.plan, error)
            self._constrain()
            self._on_end(launched.ended(self._clock(), type(error).__name__))
            return outputs
        landed_s = self._clock()
        outputs = self._scheduler.apply(result, now_s=landed_s)
        self._constrain()
        fault_point("engine.applied")
        self._on_end(launched.ended(landed_s))
        return outputs

    def _constrain(self) -> None:
        """Masks for the newest step, once the tokens of all former ones are known: until then the device is busy with
        the rest of it."""
        if self._awaits_masks and len(self._launched) == 1 and self._grammars is not None:
            self._awaits_masks = False
            self._runner.constrain(self._grammars.masks(self._scheduler, self._clock()))

    def _fail_launch(self, error: RunnerError) -> None:
        """The newest plan did not start: what was launched before it is collected first, for it is good."""
        refused = self._launched.pop()
        while self._launched:
            self._send(self.collect())
        self._send(self._failed(refused.plan, error))
        self._on_end(refused.ended(self._clock(), type(error).__name__))

    def _failed(self, plan: StepPlan, error: RunnerError) -> StepOutputs:
        if isinstance(error, RunnerOutOfMemory):
            return self._scheduler.fail_out_of_memory(plan.step, str(error), now_s=self._clock())
        return self._scheduler.fail(plan.step, str(error), now_s=self._clock())
