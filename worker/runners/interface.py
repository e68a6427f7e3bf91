"""What executes step plans: the protocol that the engine drives.

Implementations: `worker.runners.torch.runner.TorchRunner` (the model) and `worker.runners.oracle.runner.OracleRunner`
(no torch; the next token is a hash of what the block table really holds). Knows no grammars, only their masks.

Legend: N masked rows of a step · W words of 32 tokens · R slots
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from octavo.worker.scheduler.plan import NewRequest, StepPlan, StepResult


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepMasks:
    """The masks of a step whose rows have grammars.

    index_N: int64 positions in ``plan.sampled_slots``, rising. bits_NW: int32 [N, ceil(vocabulary / 32)]; a token is
    allowed where its bit is set, the lowest bit of a word first.
    """

    index_N: np.ndarray
    bits_NW: np.ndarray


class MaskedSlots:
    """Which slots have a grammar, so that their rows wait for a mask; kept from joins alone."""

    def __init__(self, *, max_slots: int) -> None:
        self._is_masked_R = np.zeros(max_slots, np.bool_)
        self._num_joined = 0

    def join(self, join: NewRequest) -> None:
        """A request enters the slot."""
        has_grammar = join.sampling.grammar is not None
        self._num_joined += has_grammar
        self._is_masked_R[join.slot] = has_grammar

    def index_of(self, plan: StepPlan) -> np.ndarray:
        """int64: positions of sampled rows that need a mask."""
        if not self._num_joined:  # the usual case costs nothing
            return np.empty(0, np.int64)
        return np.flatnonzero(self._is_masked_R[plan.sampled_slots])


class RunnerError(Exception):
    """A step failed; every request of the plan ends with ENGINE_ERROR. The runner stays usable."""


class RunnerOutOfMemory(RunnerError):
    """Device memory ran out in a step; the engine ends the largest prefill of the plan with OUT_OF_MEMORY."""


class Runner(Protocol):
    """Executes plans in order. ``launch`` may return before the work is done: then tokens of step N feed the decodes
    of step N + 1 on the device, and at most ``max_in_flight`` plans are launched but not collected.

    A plan with sampled rows whose request has a grammar (`worker.runners.interface.MaskedSlots`) chooses no token until
    ``constrain`` brings their masks, which depend on the tokens of the step before: it is called once for such a plan,
    before the next launch and before the plan's own collect."""

    max_in_flight: int

    def launch(self, plan: StepPlan) -> None:
        """Start a step. Raises RunnerError (nothing of the step happened then)."""

    def constrain(self, masks: StepMasks) -> None:
        """Let the newest launched step choose its tokens. What goes wrong is raised by its ``collect``."""

    def collect(self) -> StepResult:
        """Wait for the oldest launched step. Raises RunnerError; raises LookupError where none is in flight."""

    def close(self) -> None:
        """Give the device back. Idempotent."""
