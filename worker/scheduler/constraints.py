"""Requests with a grammar, as the scheduler has them: they wait outside the queue until it is compiled, and rows of
theirs wait for masks.

Knows no library of grammars, and nothing of how they are compiled.
"""

from collections.abc import Sequence
from typing import NamedTuple

from octavo.worker.scheduler.in_flight import InFlightStep
from octavo.worker.scheduler.matcher import Matcher
from octavo.worker.scheduler.request import AddRequest, Ending, Phase, Request, failure
from octavo.worker.scheduler.request_table import RequestTable


class ConstrainedRow(NamedTuple):
    """A row of a step that waits for its mask. position: in the plan's sampled slots. request: None where it has ended
    meanwhile. early: tokens to leave out where that is possible."""

    position: int
    request: Request | None
    early: tuple[int, ...]


class Constraints:
    """in_flight: the scheduler's, oldest first."""

    def __init__(self, table: RequestTable, in_flight: Sequence[InFlightStep], eos_token_ids: tuple[int, ...]) -> None:
        self._requests = table
        self._in_flight = in_flight
        self._eos_token_ids = eos_token_ids

    def ready(self, asked: AddRequest, matcher: Matcher, *, now_s: float) -> None:
        """The grammar of these outputs is compiled: those that are still there get a matcher each, and queue."""
        requests = self._outputs(asked)
        for request in requests:
            request.matcher = matcher.fork()
        for request in requests:
            if request.phase is Phase.COMPILING:
                self._requests.waiting.push(request, now_s)

    def failed(self, asked: AddRequest, ending: Ending, *, now_s: float) -> None:
        """It cannot be compiled: all of these outputs end."""
        for request in self._outputs(asked):
            self._requests.end(request, ending, now_s)

    @property
    def any_in_newest(self) -> bool:
        """Whether a row of the newest step has a grammar."""
        step, has_grammar_S = self._in_flight[-1], self._requests.slots.has_grammar_S
        return bool(has_grammar_S[step.slots_A[: step.num_sampled]].any())

    def rows(self) -> list[ConstrainedRow]:
        """Of the newest step, whose former tokens must all be known."""
        step = self._in_flight[-1]
        slots_N = step.slots_A[: step.num_sampled]
        is_live_N = step.is_live_A(self._requests.slots)
        return [
            self._row(index, int(slots_N[index])) if is_live_N[index] else ConstrainedRow(index, None, ())
            for index in self._requests.slots.has_grammar_S[slots_N].nonzero()[0].tolist()
        ]

    def broken(self, request: Request, detail: str, *, now_s: float) -> None:
        """The grammar of a running output allows nothing more, or took too much work."""
        self._requests.end(request, failure("CONSTRAINT", f"constraint: {detail}"), now_s)

    def _row(self, index: int, slot: int) -> ConstrainedRow:
        request, sampling = self._requests.in_slot(slot), self._requests.in_slot(slot).asked.sampling
        num_output = int(self._requests.slots.num_known_S[slot]) - request.num_prompt_tokens
        if num_output < sampling.min_tokens:
            return ConstrainedRow(index, request, (*sampling.stop_token_ids, *self._eos_token_ids))
        return ConstrainedRow(index, request, self._eos_token_ids if sampling.ignore_eos else ())

    def _outputs(self, asked: AddRequest) -> list[Request]:
        """Keys may have been given to others meanwhile, whose grammar is another object."""
        found = [self._requests.find(key) for key in asked.keys]
        grammar = asked.sampling.grammar
        return [each for each in found if each is not None and each.asked.sampling.grammar is grammar]
