"""Which rows of a step wait for the mask of a grammar, and the masks.

A runner holds the tokens of a step with such rows back until `Runner.constrain` brings the masks. Knows no grammars.

Legend: N masked rows of a step · W words of 32 tokens · R slots
"""

from dataclasses import dataclass

import numpy as np

from worker.plan import Join, StepPlan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepMasks:
    """index_N: int64 positions in ``plan.sampled_slots``, rising. bits_NW: int32 [N, ceil(vocabulary / 32)]; a token is
    allowed where its bit is set, the lowest bit of a word first."""

    index_N: np.ndarray
    bits_NW: np.ndarray


class MaskedSlots:
    """Kept from joins alone."""

    def __init__(self, *, max_slots: int) -> None:
        self._is_masked_R = np.zeros(max_slots, np.bool_)
        self._num_joined = 0

    def join(self, join: Join) -> None:
        """A request enters the slot."""
        has_grammar = join.sampling.grammar is not None
        self._num_joined += has_grammar
        self._is_masked_R[join.slot] = has_grammar

    def index_of(self, plan: StepPlan) -> np.ndarray:
        """int64: positions of sampled rows that need a mask."""
        if not self._num_joined:  # the usual case costs nothing
            return np.empty(0, np.int64)
        return np.flatnonzero(self._is_masked_R[plan.sampled_slots])
