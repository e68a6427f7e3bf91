"""From the queue into a slot: who may come in now, and for whom others must leave.

Strictly the head of the queue or nobody: whoever jumped it could keep a long prompt waiting for ever. Knows no token
budget.
"""

from blockmgr.errors import OutOfBlocks
from worker.config import SchedulerConfig
from worker.pipeline import Pipeline, ResultsFirst
from worker.preemption import displaceable_by, paused_first
from worker.request import Request, failure
from worker.roster import Roster


class Entrance:
    """Admits and displaces."""

    def __init__(self, config: SchedulerConfig, roster: Roster) -> None:
        self._max_num_seqs = config.max_num_seqs
        self._roster = roster
        self._blocks = roster.blocks
        self._block_size = roster.blocks.config.block_size
        self._headroom_cap = max(1, roster.blocks.config.num_blocks // 50)
        self._refused: tuple[int, int] = (-1, 0)  # the head that did not fit, and the room there was
        self._hopeless: tuple[int, int] = (-1, 0)  # the same with the room there would have been without others

    def admit_head(self, pipeline: Pipeline, now_s: float) -> Request | None:
        """The head of the queue with slot and blocks; None where nobody waits or it does not fit now."""
        head = self._roster.waiting.head(now_s)
        if head is None or not self._may_fit(head):
            return None
        try:
            self._roster.admit(head, now_s)
        except OutOfBlocks:
            self._refused = (head.order, self._room)
            if not self._roster.num_running and pipeline is Pipeline.EMPTY:
                self._roster.end(head, failure("INTERNAL", "blocks are missing although nothing runs"), now_s)
            return None
        return head

    def _may_fit(self, head: Request) -> bool:
        """Whether trying is worth it. Cached blocks make it a guess, so a refusal is remembered until there is more
        room than then: trying again hashes the whole prompt."""
        num_running = self._roster.num_running
        if num_running >= self._max_num_seqs:
            return False
        if not num_running:
            return True
        room = self._room
        if self._refused[0] == head.order and room <= self._refused[1]:
            return False
        if self._fits(head, room):
            return True
        self._refused = (head.order, room)
        return False

    def _fits(self, head: Request, num_blocks: int) -> bool:
        num_wanted = -(-len(head.token_ids_T) // self._block_size)
        if num_wanted <= num_blocks:
            return True
        if head.needs_whole_prompt:
            return False
        num_hit = self._blocks.match(head.token_ids_T, salt=head.asked.cache_salt) // self._block_size
        return num_wanted - num_hit <= num_blocks

    @property
    def _room(self) -> int:
        """Blocks for newcomers: those that run keep some to grow, or the newcomer would soon be preempted."""
        headroom = min(self._roster.num_active, self._headroom_cap)
        return self._blocks.num_free + self._blocks.num_cached - headroom

    def may_fork(self, leader: Request, num_forked: int, now_s: float) -> bool:
        """Whether the leader's next follower can run now, after others that forked in the same plan: a slot is free,
        there is a block for each to write to, and nobody who waits goes before it."""
        if not leader.followers or self._roster.num_running >= self._max_num_seqs:
            return False
        waiting = self._roster.waiting
        head = waiting.head(now_s)
        return self._room > num_forked + 1 and (head is None or waiting.goes_before(leader.followers[0], head))

    # ------------------------------------------------------------ who gives way

    def make_way(self, pipeline: Pipeline, now_s: float) -> None:
        """Preempt paused requests, then those of lower priority, until the head of the queue fits, if that can make it
        fit."""
        roster = self._roster
        head = roster.waiting.head(now_s)
        if head is None:
            return
        has_prey = head.asked.priority > roster.lowest_running_priority
        if not (roster.paused or has_prey) or self._may_fit(head):
            return
        victims = paused_first(roster.paused.values(), displaceable_by(head, roster.running) if has_prey else [])
        if not victims or not self._would_fit_without(head, victims):
            return
        if pipeline is Pipeline.BUSY:
            raise ResultsFirst
        for victim in victims:
            self._roster.preempt(victim, now_s)
            if self._may_fit(head):
                return

    def _would_fit_without(self, head: Request, victims: list[Request]) -> bool:
        num_held = sum(self._blocks.capacity(victim.held_slot) for victim in victims) // self._block_size
        room = self._room + num_held
        if self._hopeless[0] == head.order and room <= self._hopeless[1]:
            return False
        if self._fits(head, room):
            return True
        self._hopeless = (head.order, room)
        return False
