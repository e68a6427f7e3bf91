"""What executes step plans: the protocol that the engine drives.

Implementations: `worker.runners.torch.runner.TorchRunner` and `worker.runners.cuda.runner.CudaRunner` (the model),
`worker.runners.group.GroupRunner` (one of these on several ranks), and `worker.runners.oracle.runner.OracleRunner` (no
torch; the next token is a hash of what the block table really holds). Knows no grammars, only their masks.

Errors that are no RunnerError (`DeviceLost`, `GroupLost`) end the worker.
"""

from typing import Protocol

from octavo.worker.scheduler.plan import StepMasks, StepPlan, StepResult


class RunnerError(Exception):
    """A step failed; every request of the plan ends with ENGINE_ERROR. The runner stays usable."""


class RunnerOutOfMemory(RunnerError):
    """Device memory ran out in a step; the engine ends the largest prefill of the plan with OUT_OF_MEMORY."""


class Runner(Protocol):
    """Executes plans in order. ``launch`` may return before the work is done: then tokens of step N feed the decodes
    of step N + 1 on the device, and at most ``max_in_flight`` plans are launched but not collected.

    A plan with sampled rows whose request has a grammar (`worker.scheduler.plan.MaskedSlots`) chooses no token until
    ``constrain`` brings their masks, which depend on the tokens of the step before: it is called once for such a plan,
    before the next launch and before the plan's own collect."""

    max_in_flight: int

    def launch(self, plan: StepPlan) -> None:
        """Start a step. Raises RunnerError, or leaves the error to the step's ``collect``. Nothing that a failed step
        wrote may be used: its requests end, or join again."""

    def constrain(self, masks: StepMasks) -> None:
        """Let the newest launched step choose its tokens. Errors are raised by its ``collect``."""

    def collect(self) -> StepResult:
        """Wait for the oldest launched step. Raises RunnerError, and LookupError if none is in flight."""

    def close(self) -> None:
        """Release the device. Idempotent."""
