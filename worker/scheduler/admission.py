"""From the queue into a slot: who may come in now, and for whom others must leave.

Strictly the head of the queue or nobody: whoever jumped it could keep a long prompt waiting for ever. Knows no token
budget.
"""

from collections.abc import Iterable, Sequence

from octavo.blockmgr.errors import OutOfBlocks
from octavo.worker.config import SchedulerConfig
from octavo.worker.scheduler.in_flight import InFlight, ResultsFirst
from octavo.worker.scheduler.request import AddRequest, Ending, Request, failure
from octavo.worker.scheduler.request_table import RequestTable

# Whether a request can be served here at all, decided at once and without looking at what else runs.
#
# What fails here is refused before it waits, so that nothing behind it waits for it. Knows no queue and no blocks,
# only how many tokens the pool holds.


def max_total_tokens(asked: AddRequest, config: SchedulerConfig, *, pool_tokens: int) -> int:
    """Prompt and output tokens after which the output ends. The last one needs no place in the pool."""
    wanted = len(asked.prompt_ids_T) + asked.sampling.max_tokens
    return min(wanted, config.max_model_len, pool_tokens + 1)


def refusal(asked: AddRequest, config: SchedulerConfig, *, pool_tokens: int) -> Ending | None:
    """Why this request can never be served; None where it can."""
    if not len(asked.prompt_ids_T):
        return failure("INVALID_FIELD", "prompt_ids: the prompt is empty")
    token_ids_T = asked.token_ids_T
    if int(token_ids_T.min()) < 0 or int(token_ids_T.max()) >= config.vocab_size:
        wrong = token_ids_T[(token_ids_T < 0) | (token_ids_T >= config.vocab_size)]
        return failure("INVALID_FIELD", f"prompt_ids: {int(wrong[0])} is not in [0, {config.vocab_size})")
    if asked.sampling.max_tokens < 1:
        return failure("INVALID_FIELD", f"sampling.max_tokens: {asked.sampling.max_tokens} is below 1")
    if len(asked.resumed_ids_T) >= asked.sampling.max_tokens:
        return failure(
            "INVALID_FIELD", f"num_resumed_tokens: {len(asked.resumed_ids_T)} of {asked.sampling.max_tokens}"
        )
    # The last token of an output needs no place in the pool; of a prompt one free place is asked for all the same.
    return _too_long(len(token_ids_T), config, pool_tokens + 1 if len(asked.resumed_ids_T) else pool_tokens)


def _too_long(num_prompt_tokens: int, config: SchedulerConfig, pool_tokens: int) -> Ending | None:
    needed = num_prompt_tokens + 1
    for limit, name in ((config.max_model_len, "the context"), (pool_tokens, "the KV pool")):
        if needed > limit:
            detail = f"{num_prompt_tokens} prompt tokens and one to generate exceed {name} of {limit} tokens"
            return failure("EXCEEDS_CAPACITY", detail)
    return None


# Who gives way to whom. Pure choices over requests; knows no blocks and changes nothing.
#
# The most important running request (`Request.rank`) is never chosen while another one runs, so every round of
# preemptions leaves at least one that gets on: there is no livelock. Waiting makes a request aged, aged ones are the
# most important: there is no starvation either.


def least_important(running: Sequence[Request]) -> Request:
    """Who is preempted when blocks run out: the paused, then lowest priority, then latest arrival. Raises ValueError
    for nobody."""
    return max(running, key=lambda request: request.rank)


def least_disturbed(running: Sequence[Request]) -> Request:
    """Who is preempted without need, where tests ask for that: so that in the end everybody was. Raises ValueError for
    nobody."""
    return min(running, key=lambda request: (request.num_preemptions, request.rank))


def displaceable_by(head: Request, running: Sequence[Request]) -> list[Request]:
    """Who must give way to a waiting request of higher priority, first the least important; never the aged. Paused ones
    give way to everybody and are not among them."""
    below = [
        other
        for other in running
        if other.is_running and not other.is_aged and other.asked.priority < head.asked.priority
    ]
    return sorted(below, key=lambda request: request.rank, reverse=True)


def paused_first(paused: Iterable[Request], others: Sequence[Request]) -> list[Request]:
    """All who may give way to a waiting request, in order: nobody waits for those whose callers do not read."""
    return [*sorted(paused, key=lambda request: request.rank, reverse=True), *others]


class Admission:
    """Admits and displaces."""

    def __init__(self, config: SchedulerConfig, table: RequestTable) -> None:
        self._max_num_seqs = config.max_num_seqs
        self._requests = table
        self._blocks = table.blocks
        self._block_size = table.blocks.config.block_size
        self._headroom_cap = max(1, table.blocks.config.num_blocks // 50)
        self._refused: tuple[int, int] = (-1, 0)  # the head that did not fit, and the room there was
        self._hopeless: tuple[int, int] = (-1, 0)  # the same with the room there would have been without others

    def admit_head(self, pipeline: InFlight, now_s: float) -> Request | None:
        """The head of the queue with slot and blocks; None where nobody waits or it does not fit now."""
        head = self._requests.waiting.head(now_s)
        if head is None or not self._may_fit(head):
            return None
        try:
            self._requests.admit(head, now_s)
        except OutOfBlocks:
            self._refused = (head.order, self._room)
            if not self._requests.num_running and pipeline is InFlight.EMPTY:
                self._requests.end(head, failure("INTERNAL", "blocks are missing although nothing runs"), now_s)
            return None
        return head

    def _may_fit(self, head: Request) -> bool:
        """Whether trying is worth it. Cached blocks make it a guess, so a refusal is remembered until there is more
        room than then: trying again hashes the whole prompt."""
        num_running = self._requests.num_running
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
        headroom = min(self._requests.num_active, self._headroom_cap)
        return self._blocks.num_free + self._blocks.num_cached - headroom

    def may_fork(self, leader: Request, num_forked: int, now_s: float) -> bool:
        """Whether the leader's next follower can run now, after others that forked in the same plan: a slot is free,
        there is a block for each to write to, and nobody who waits goes before it."""
        if not leader.followers or self._requests.num_running >= self._max_num_seqs:
            return False
        waiting = self._requests.waiting
        head = waiting.head(now_s)
        return self._room > num_forked + 1 and (head is None or waiting.goes_before(leader.followers[0], head))

    # ------------------------------------------------------------ who gives way

    def preempt_for_head(self, pipeline: InFlight, now_s: float) -> None:
        """Preempt paused requests, then those of lower priority, until the head of the queue fits, if that can make it
        fit."""
        table = self._requests
        head = table.waiting.head(now_s)
        if head is None:
            return
        has_prey = head.asked.priority > table.lowest_running_priority
        if not (table.paused or has_prey) or self._may_fit(head):
            return
        victims = paused_first(table.paused.values(), displaceable_by(head, table.running) if has_prey else [])
        if not victims or not self._would_fit_without(head, victims):
            return
        if pipeline is InFlight.BUSY:
            raise ResultsFirst
        for victim in victims:
            self._requests.preempt(victim, now_s)
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
