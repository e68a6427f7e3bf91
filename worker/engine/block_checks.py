"""Checks that every block is accounted for: recounts and audits at moments when they delay no step."""

from collections.abc import Callable

import structlog

from octavo.blockmgr.manager import BlockManager
from octavo.worker.engine.interfaces import Clock
from octavo.worker.scheduler.scheduler import Scheduler

log = structlog.get_logger(__name__)

RECOUNT_S = 1.0  # while there is work, a recount of all blocks is spread over this time,
RECOUNT_LOOK_S = 0.1  # with at least this much between two looks at a part of them
IDLE_S = 0.25  # an audit waits until there has been no work for this long,
IDLE_PER_AUDIT = 50  # and for this many times the last audit's duration: a request that arrives meanwhile has to wait
AUDITED_AT_WORK = 1 << 14
"""Pools of up to this many blocks are audited between two steps, in milliseconds; larger ones only without work."""


class BlockChecks:
    """One per engine.

        work       a part of the blocks is recounted now and then; pools of up to AUDITED_AT_WORK blocks are audited
                   as a whole every audit_every_steps steps
        no work    one audit, after an idle time that is long compared with an audit

    num_leaked, violations: as last found. is_audit_due: something has changed since the last audit; set by whoever
    changes it. audit_every_steps 0: recounts only.
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
        self._audit_s = 0.0  # duration of the last audit

    def note_step(self, num_steps: int) -> None:
        """A step has ended, the num_steps-th since the start."""
        self.is_audit_due = True
        self._worked_s = self._clock()  # `look` finds no work behind a request that began and ended in this step
        if self._every and num_steps % self._every == 0 and self._is_small:
            self.audit()

    def look(self, scheduler: Scheduler) -> None:
        """Do what is due. To be called between two steps."""
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
        """Recount everything now. Returns the violations, which are logged if they differ from the last ones."""
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
            self.audit()  # it names the leaked blocks
