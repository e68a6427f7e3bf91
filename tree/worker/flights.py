"""Steps that are planned and whose results are not known yet.

A result belongs to a request only if the slot still has the generation that it had when the step was planned: slots
change hands while steps are in flight. Knows no blocks.

Shapes: A rows of the step · N rows of it that a token is sampled for, the first N of A
"""

from dataclasses import dataclass

import numpy as np

from worker.plan import StepPlan
from worker.rows import Rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flight:
    """One step in flight. slots_A: intp. num_computed_A: int32, computed tokens of each row once the step is done."""

    plan: StepPlan
    num_sampled: int
    slots_A: np.ndarray
    generations_A: np.ndarray
    num_computed_A: np.ndarray

    @classmethod
    def of(cls, plan: StepPlan, rows: Rows) -> "Flight":
        """Remember who holds which slot right after planning."""
        sampled = plan.sampled_slots
        others = [chunk.slot for chunk in plan.prefill if not chunk.is_last]
        slots_A = (np.concatenate([sampled, np.asarray(others, np.int32)]) if others else sampled).astype(np.intp)
        return cls(
            plan=plan,
            num_sampled=len(sampled),
            slots_A=slots_A,
            generations_A=rows.generation_S[slots_A],
            num_computed_A=rows.num_scheduled_S[slots_A],
        )

    def is_live_A(self, rows: Rows) -> np.ndarray:
        """bool [A]: the request that the row was planned for still holds the slot."""
        return rows.generation_S[self.slots_A] == self.generations_A
