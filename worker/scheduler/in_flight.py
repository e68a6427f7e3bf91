"""Steps that are planned and whose results are not known yet.

A result belongs to a request only if the slot still has the generation that it had when the step was planned: slots
change hands while steps are in flight. Knows no blocks.

Shapes: A rows of the step · N rows of it that a token is sampled for, the first N of A
"""

from dataclasses import dataclass
from enum import Enum

import numpy as np

from octavo.worker.scheduler.plan import StepPlan
from octavo.worker.scheduler.slot_state import SlotState

# Whether steps are launched whose results are not known yet, and the wish to wait for them.


class InFlight(Enum):
    """EMPTY: what is released now is free at once. BUSY: it is free when the steps in flight have ended."""

    EMPTY = "empty"
    BUSY = "busy"


class ResultsFirst(Exception):
    """No step can be planned well before those in flight have ended."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InFlightStep:
    """One step in flight. slots_A: intp. num_computed_A: int32, computed tokens of each row once the step is done."""

    plan: StepPlan
    num_sampled: int
    slots_A: np.ndarray
    generations_A: np.ndarray
    num_computed_A: np.ndarray

    @classmethod
    def of(cls, plan: StepPlan, slots: SlotState) -> "InFlightStep":
        """Remember who holds which slot right after planning."""
        sampled = plan.sampled_slots
        others = [chunk.slot for chunk in plan.prefill if not chunk.is_last]
        slots_A = (np.concatenate([sampled, np.asarray(others, np.int32)]) if others else sampled).astype(np.intp)
        return cls(
            plan=plan,
            num_sampled=len(sampled),
            slots_A=slots_A,
            generations_A=slots.generation_S[slots_A],
            num_computed_A=slots.num_scheduled_S[slots_A],
        )

    def is_live_A(self, slots: SlotState) -> np.ndarray:
        """bool [A]: the request that the row was planned for still holds the slot."""
        return slots.generation_S[self.slots_A] == self.generations_A
