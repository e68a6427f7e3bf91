"""Whether every block is where it should be: recounts and audits at moments when they delay no step."""

from collections.abc import Callable

import structlog

from octavo.blockmgr.manager import BlockManager
from octavo.worker.engine.interfaces import Clock
from octavo.worker.scheduler.scheduler import Scheduler

log = structlog.get_logger(__name__)

RECOUNT_S = 1.0  # a recount of all blocks is spread over so long while steps are made,
RECOUNT_LOOK_S = 0.1  # with at least so much between two looks at a part of them
IDLE_S = 0.25  # without work, after which an audit delays no step,
IDLE_PER_AUDIT = 50  # and so many times what the last one took: a request that comes right then waits for it
AUDITED_AT_WORK = 1 << 14
"""Blocks that are audited between two steps, in a few milliseconds; larger pools only where there is no work."""


class BlockChecks:
    """One per engine.

        work       a part of the blocks is recounted now and then; pools of up to AUDITED_AT_WORK blocks are audited
                   whole every audit_every_steps steps
        no work    one audit, after a while that is long against what it takes: a request that comes right then waits

    num_leaked, violations: as found last. is_audit_due: something has been done since the last audit; who does it says
    so here. audit_every_steps 0: recounts alone.
    """

    def __init__(self, blocks: BlockManager, clock: Clock, *, audit_every_steps: int) -> None:
        self.num_leaked = 0
        self.violations: tuple[str, ...] = ()
        self.is_audit_due = False
        self._blocks = blocks
        self._clock = clock
        self._every = audit_every_steps
        self._recount = blocks.recount()
        self._look_every_s = max(RECOUNT_S / len(self._recount), RECOUNT_LOOK_S)
        self._is_small = blocks.config.num_blocks + blocks.config.num_host_blocks <= AUDITED_AT_WORK
        self._looked_s = self._worked_s = clock()
        self._audit_s = 0.0  # that the last one took

    def note_step(self, num_steps: int) -> None:
        """The step of this number has ended."""
        self.is_audit_due = True
        if self._every and num_steps % self._every == 0 and self._is_small:
            self.audit()

    def look(self, scheduler: Scheduler) -> None:
        """Between two steps: what is due."""
        now_s = self._clock()
        if scheduler.has_work:
            self._worked_s = now_s
            if now_s - self._looked_s >= self._look_every_s:
                self._looked_s = now_s
                self._count(self._recount.look)
        elif self.is_audit_due and now_s - self._worked_s >= max(IDLE_S, IDLE_PER_AUDIT * self._audit_s):
            self.is_audit_due = False
            if self._every:
                self.audit()
            else:
                self._count(self._recount.look_at_all)

    def audit(self) -> tuple[str, ...]:
        """Recount everything now; what is wrong, which is logged once."""
        began_s = self._clock()
        audit, former = self._blocks.audit(), self.violations
        self._audit_s = self._clock() - began_s
        self.num_leaked, self.violations = audit.num_leaked, audit.violations
        if audit.violations and audit.violations != former:
            log.error("audit_failed", num_leaked_blocks=audit.num_leaked, violations=audit.violations)
        return audit.violations

    def _count(self, look: Callable[[], None]) -> None:
        former = self._recount.num_leaked
        look()
        if self._recount.num_leaked < former:
            self.num_leaked = self._recount.num_leaked
        elif self._recount.num_leaked > former:
            self.audit()  # which names them
