"""The engine's desk for grammars: requests wait here until theirs is compiled, and every step gets its masks.

Owned by the engine's thread; compiled grammars come in from other threads through one queue. A request that is
compiled for longer than it may be fails alone.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from grammar.errors import GrammarRefused, Refusal
from wire.messages import Grammar
from worker.grammar_compiler import GrammarCompiler, Outcome
from worker.grammar_masks import MaskFiller
from worker.masks import StepMasks
from worker.request import AddRequest, failure
from worker.scheduler import Scheduler


class GrammarObserver(Protocol):
    """Told in the engine's thread."""

    def on_masks(self, *, seconds: float, num_rows: int) -> None:
        """The masks of one step were filled."""

    def on_refused(self, refusal: Refusal) -> None:
        """A request's grammar could not be compiled."""


@dataclass(slots=True, eq=False)
class _Ticket:
    """A request whose grammar is being compiled. outcome: written once, by another thread."""

    asked: AddRequest
    grammar: Grammar
    until_s: float
    outcome: Outcome | None = None
    is_answered: bool = False


class GrammarDesk:
    """wake: lets a waiting engine look again; called from other threads."""

    def __init__(
        self,
        compiler: GrammarCompiler,
        *,
        timeout_s: float,
        observer: GrammarObserver,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._compiler = compiler
        self._timeout_s = timeout_s
        self._observer = observer
        self._wake = wake
        self._filler = MaskFiller()
        self._waiting: deque[_Ticket] = deque()  # in the order of their timeouts
        self._ready: deque[_Ticket] = deque()

    def submit(self, asked: AddRequest, now_s: float) -> None:
        """A request that the scheduler keeps until its grammar is there."""
        grammar = asked.sampling.grammar
        assert grammar is not None
        ticket = _Ticket(asked, grammar, now_s + self._timeout_s)
        self._waiting.append(ticket)
        self._compiler.submit(grammar, lambda outcome: self._take(ticket, outcome))

    def deliver(self, scheduler: Scheduler, now_s: float) -> None:
        """Hand over what is compiled, and end what took too long."""
        while self._ready:
            self._answer(self._ready.popleft(), scheduler, now_s)
        while self._waiting and (self._waiting[0].is_answered or self._waiting[0].until_s <= now_s):
            ticket = self._waiting.popleft()
            if not ticket.is_answered:
                late = GrammarRefused(Refusal.TIMEOUT, f"took longer than {self._timeout_s:g} s to compile")
                ticket.outcome = late if ticket.outcome is None else ticket.outcome
                self._answer(ticket, scheduler, now_s)

    def masks(self, scheduler: Scheduler, now_s: float) -> StepMasks:
        """For the newest step, once all tokens before it are known. A request whose grammar breaks here ends."""
        started_s = time.perf_counter()
        masks, broken = self._filler.fill(scheduler.constraints.rows(), self._compiler.vocabulary)
        for request, detail in broken:
            scheduler.constraints.broken(request, detail, now_s=now_s)
        self._observer.on_masks(seconds=time.perf_counter() - started_s, num_rows=len(masks.index_N))
        return masks

    def close(self) -> None:
        """Take no more work. Idempotent."""
        self._compiler.close()

    def _take(self, ticket: _Ticket, outcome: Outcome) -> None:
        """In a thread of the compiler."""
        ticket.outcome = outcome
        self._ready.append(ticket)
        self._wake()

    def _answer(self, ticket: _Ticket, scheduler: Scheduler, now_s: float) -> None:
        if ticket.is_answered:
            return
        ticket.is_answered = True
        outcome = ticket.outcome
        assert outcome is not None
        if isinstance(outcome, GrammarRefused):
            self._observer.on_refused(outcome.refusal)
            scheduler.constraints.failed(ticket.asked, failure("CONSTRAINT", f"constraint: {outcome}"), now_s=now_s)
        elif len(ticket.asked.resumed_ids_T) and not outcome.replay(ticket.asked.resumed_ids_T.tolist()):
            scheduler.constraints.failed(
                ticket.asked, failure("CONSTRAINT", "constraint: the output so far does not match it"), now_s=now_s
            )
        else:
            scheduler.constraints.ready(ticket.asked, outcome, now_s=now_s)
