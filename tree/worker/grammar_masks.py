"""Fills the masks of one step, on several threads where it has several rows.

A token that would end an output too soon (min_tokens, ignore_eos) is left out where the grammar has another one;
where it has none the grammar is complete, and the output ends.

Legend: N rows of the step that have a grammar · W words of 32 tokens
"""

import numpy as np
from llguidance import LLExecutor

from worker.constraints import ConstrainedRow
from worker.grammar_matcher import GrammarMatcher
from worker.grammar_vocabulary import Vocabulary
from worker.masks import StepMasks
from worker.matching import Matcher
from worker.request import Request

_MIN_PARALLEL = 4
_EVERYTHING = np.int32(-1)


class MaskFiller:
    """One per engine."""

    def __init__(self) -> None:
        self._executor: LLExecutor | None = None

    def fill(self, rows: list[ConstrainedRow], vocabulary: Vocabulary) -> tuple[StepMasks, list[tuple[Request, str]]]:
        """The masks, and the requests whose grammar broke, with the reason: their rows allow everything, for nobody
        reads their tokens."""
        bits_NW = np.full((len(rows), vocabulary.num_words), _EVERYTHING, np.int32)
        matchers = [(row.request.matcher, n) for n, row in enumerate(rows) if row.request is not None]
        self._compute([(matcher, n) for matcher, n in matchers if matcher is not None], bits_NW)
        broken: list[tuple[Request, str]] = []
        for n, row in enumerate(rows):
            if row.request is None or row.request.matcher is None:
                continue
            if row.request.matcher.error:
                broken.append((row.request, row.request.matcher.error))
                bits_NW[n] = _EVERYTHING
            elif row.early:
                _leave_out(bits_NW[n], vocabulary.bits(row.early))
        return StepMasks(index_N=np.array([row.position for row in rows], np.int64), bits_NW=bits_NW), broken

    def _compute(self, matchers: list[tuple[Matcher, int]], bits_NW: np.ndarray) -> None:
        pairs = [(matcher.matcher, n) for matcher, n in matchers if isinstance(matcher, GrammarMatcher)]
        if len(pairs) < max(_MIN_PARALLEL, len(matchers)):
            for matcher, n in matchers:
                matcher.fill(bits_NW[n])
            return
        if self._executor is None:
            self._executor = LLExecutor()
        num_bytes = bits_NW.shape[1] * bits_NW.itemsize
        self._executor.unsafe_compute_mask_ptr(pairs, bits_NW.ctypes.data, num_bytes, len(bits_NW))


def _leave_out(bits_W: np.ndarray, early_W: np.ndarray) -> None:
    others_W = bits_W & ~early_W
    if others_W.any():
        bits_W[:] = others_W
