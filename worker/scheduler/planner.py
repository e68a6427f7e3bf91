"""What goes into the next step: decodes first, then prefill chunks until the token budget or the chunk limit is
reached.

There is no prefill phase and no decode phase: a step is some tokens of some requests. Blocks are taken here, all or
nothing; if there are too few, requests are preempted. No request is preempted while a step is in flight: its blocks
would not be free before that step ends, so one request after another would be preempted for nothing. Instead, the
planner raises `ResultsFirst`: no new step until those in flight have ended.

The most important running request (`Request.rank`) is never preempted while another one runs, so every round of
preemptions leaves at least one that makes progress: there is no livelock. Requests age as they wait, and aged ones are
the most important, so there is no starvation either.
"""

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np

from octavo.blockmgr.errors import OutOfBlocks
from octavo.blockmgr.manager import NO_BLOCKS
from octavo.wire.messages import WireFinishReason
from octavo.worker.config import SchedulerConfig
from octavo.worker.scheduler.costs import StepBudget, StepPace
from octavo.worker.scheduler.plan import Chunk, NewRequest, Slot, StepPlan
from octavo.worker.scheduler.request import Ending, Phase, Request, failure
from octavo.worker.scheduler.request_table import RequestTable


class InFlight(Enum):
    """EMPTY: released blocks are free at once. BUSY: they are free when the steps in flight have ended."""

    EMPTY = "empty"
    BUSY = "busy"


class ResultsFirst(Exception):
    """A step can be planned only after those in flight have ended."""


def least_important(running: Sequence[Request]) -> Request:
    """The request to preempt when blocks run out: a paused one, then the lowest priority, then the latest arrival, aged
    ones last. Raises ValueError if none runs."""
    return max(running, key=lambda request: request.rank)


def least_disturbed(running: Sequence[Request]) -> Request:
    """The request to preempt when tests force preemptions: the one that was preempted least often. Raises ValueError if
    none runs."""
    return min(running, key=lambda request: (request.num_preemptions, request.rank))


def displaceable_by(head: Request, running: Sequence[Request]) -> list[Request]:
    """Requests that may be preempted for a waiting one of higher priority, the least important first; never aged ones.
    Paused requests are preempted for any request and are not included here."""
    below = [
        other for other in running if other.is_running and not other.is_aged and other.run.priority < head.run.priority
    ]
    return sorted(below, key=lambda request: request.rank, reverse=True)


def paused_first(paused: Iterable[Request], others: Sequence[Request]) -> list[Request]:
    """All requests that may be preempted for a waiting one, in order. Paused ones come first: no request waits for one
    whose caller does not read."""
    return [*sorted(paused, key=lambda request: request.rank, reverse=True), *others]


class FailedFit(NamedTuple):
    """A request (`Request.order`) that could not be admitted although num_blocks blocks seemed enough, because
    `CopyCosts` preferred to compute some of its hits. It is not tried again with no more blocks and the same hits."""

    order: int
    num_blocks: int
    num_shared: int

    def covers(self, request: Request, num_blocks: int, num_shared: int | None) -> bool:
        """Whether this failure implies that the request does not fit into num_blocks either."""
        return (request.order, num_shared) == (self.order, self.num_shared) and num_blocks <= self.num_blocks


class Admission:
    """Admits the head of the queue, and preempts others for it."""

    def __init__(self, config: SchedulerConfig, table: RequestTable) -> None:
        self._max_num_seqs = config.max_num_seqs
        self._requests = table
        self._blocks = table.blocks
        self._block_size = table.blocks.config.block_size
        self._headroom_cap = max(1, table.blocks.config.num_blocks // 50)
        self._failed: FailedFit | None = None

    def admit_head(self, in_flight: InFlight, now_s: float) -> Request | None:
        """Admit the head of the queue, which then has a slot and blocks; None if the queue is empty or the head does
        not fit now."""
        head = self._requests.waiting.head(now_s)
        if head is None or not self._may_fit(head):
            return None
        try:
            self._requests.admit(head, now_s)
        except OutOfBlocks:
            num_shared = self._blocks.most_hits_in_use(head.block_owner)
            self._failed = None if num_shared is None else FailedFit(head.order, self._room, num_shared)
            if not self._requests.num_running and in_flight is InFlight.EMPTY:
                self._requests.end(head, failure("INTERNAL", "blocks are missing although nothing runs"), now_s)
            return None
        return head

    def _may_fit(self, head: Request) -> bool:
        """Whether an attempt is worthwhile."""
        num_running = self._requests.num_running
        if num_running >= self._max_num_seqs:
            return False
        if not num_running:
            return True
        room, failed = self._room, self._failed
        if failed is not None and failed.covers(head, room, self._blocks.most_hits_in_use(head.block_owner)):
            return False
        return self._fits(head, room)

    def _fits(self, head: Request, num_blocks: int, *, freed: np.ndarray = NO_BLOCKS) -> bool:
        """Whether the head needs no more than num_blocks blocks, of which some are still to be freed. Its prompt is
        looked up only if that may be so: for a long one this takes half a millisecond, in every step."""
        num_wanted = -(-len(head.token_ids_T) // self._block_size)
        if num_wanted <= num_blocks:
            return True
        if head.needs_whole_prompt:
            return False
        most_shared = self._blocks.most_hits_in_use(head.block_owner, besides=freed)
        if most_shared is not None and num_wanted - most_shared > num_blocks:
            return False
        num_shared = self._blocks.num_hits_in_use(
            head.block_owner, head.token_ids_T, salt=head.run.cache_salt, besides=freed
        )
        return num_wanted - num_shared <= num_blocks

    @property
    def _room(self) -> int:
        """Blocks for new requests. Running ones keep some to grow into; otherwise the new one would soon be
        preempted."""
        headroom = min(self._requests.num_active, self._headroom_cap)
        return self._blocks.num_free + self._blocks.num_cached - headroom

    def may_fork(self, leader: Request, num_forked: int, now_s: float) -> bool:
        """Whether the leader's next follower can run now, after num_forked others in the same plan: a slot is free,
        each has a block to write to, and no waiting request goes before it."""
        if not leader.followers or self._requests.num_running >= self._max_num_seqs:
            return False
        waiting = self._requests.waiting
        head = waiting.head(now_s)
        return self._room > num_forked + 1 and (head is None or waiting.goes_before(leader.followers[0], head))

    # ------------------------------------------------------------ preemption

    def preempt_for_head(self, in_flight: InFlight, now_s: float) -> None:
        """Preempt paused requests, then those of lower priority, until the head of the queue fits; none if it would
        not fit even then."""
        table = self._requests
        head = table.waiting.head(now_s)
        if head is None:
            return
        has_lower = head.run.priority > table.lowest_running_priority
        if not (table.paused or has_lower) or self._may_fit(head):
            return
        victims = paused_first(table.paused.values(), displaceable_by(head, table.running) if has_lower else [])
        if not victims or not self._would_fit_without(head, victims):
            return
        if in_flight is InFlight.BUSY:
            raise ResultsFirst
        for victim in victims:
            self._requests.preempt(victim, now_s)
            if self._may_fit(head):
                return

    def _would_fit_without(self, head: Request, victims: list[Request]) -> bool:
        freed = self._blocks.freed_by([victim.held_slot for victim in victims])
        return self._fits(head, self._room + len(freed), freed=freed)


class Planner:
    """Makes plans from the request table."""

    def __init__(self, config: SchedulerConfig, table: RequestTable) -> None:
        self._config = config
        self._max_chunks = config.max_chunks or config.max_num_seqs
        self._requests = table
        self._slots = table.slots
        self._blocks = table.blocks
        self._admission = Admission(config, table)
        self.pace: StepPace | None = None
        if (gap_s := config.max_gap_s) is not None:
            self.pace = StepPace(
                gap_s,
                least_steps=config.max_gap_steps,
                max_tokens=config.max_batch_tokens,
                attended_share=config.attended_share,
            )
        self._new_requests: list[NewRequest] = []  # in the plan that is being made
        self._budget: StepBudget | None = None  # for the same plan; None: no limit

    def plan(self, step: int, in_flight: InFlight, now_s: float) -> StepPlan | None:
        """The next step, or None if there is nothing to do. Raises ResultsFirst."""
        self._new_requests = []
        self._requests.begin_loaded()
        self._admission.preempt_for_head(in_flight, now_s)
        num_preempted = self._requests.counters.num_preemptions
        self._disturb(step, in_flight, now_s)
        decode_slots_S = self._schedule_decodes(in_flight, now_s)
        chunks: list[Chunk] = []
        if self._requests.prefilling or self._requests.waiting:
            is_undisturbed = self._requests.counters.num_preemptions == num_preempted
            chunks = self._schedule_prompts(len(decode_slots_S), in_flight, now_s, admits=is_undisturbed)
        if not (len(decode_slots_S) or chunks or self._new_requests or self._blocks.num_awaited):
            return None
        return self._seal(step, decode_slots_S, tuple(chunks))

    def _seal(self, step: int, slots_S: np.ndarray, chunks: tuple[Chunk, ...]) -> StepPlan:
        positions_S = self._slots.num_scheduled_S[slots_S]
        self._slots.num_scheduled_S[slots_S] = positions_S + 1
        self._requests.counters.num_decode_tokens += len(slots_S)
        updates_U3, copies_C2 = self._blocks.take_updates()
        copies_out_C2, copies_in_C2 = self._blocks.take_moves()
        return StepPlan(
            step=step,
            new_requests=tuple(self._new_requests),
            block_updates_U3=updates_U3,
            block_copies_C2=copies_C2,
            copies_out_C2=copies_out_C2,
            copies_in_C2=copies_in_C2,
            prefill=chunks,
            decode_slots_S=slots_S.astype(np.int32),
            decode_positions_S=positions_S,
        )

    def _disturb(self, step: int, in_flight: InFlight, now_s: float) -> None:
        every = self._config.preempt_every_steps
        if every is None or step % every:
            return
        preemptible = [request for request in self._requests.running if not request.is_paused]
        if not preemptible:
            return
        victim = least_disturbed(preemptible)
        others = (request for request in preemptible if request is not victim)
        # Another request must compute in this step. Otherwise no step would be planned, and this step number would come
        # up again and again; or blocks that return from the host, a few per step, would leave again before any request
        # has all of its blocks.
        if all(other.phase is Phase.LOADING for other in others):
            return
        if in_flight is InFlight.BUSY:
            raise ResultsFirst
        self._requests.preempt(victim, now_s)

    # ------------------------------------------------------------ decodes

    def _schedule_decodes(self, in_flight: InFlight, now_s: float) -> np.ndarray:
        slots_S = self._slots.decodable()
        short_S = self._grow(slots_S)
        if not len(short_S):
            return slots_S
        if in_flight is InFlight.BUSY:
            raise ResultsFirst
        while len(short_S):
            self._give_up_one(now_s)
            short_S = self._grow(short_S[self._slots.is_decoding_S[short_S]])
        return self._slots.decodable()

    def _grow(self, slots_S: np.ndarray) -> np.ndarray:
        if not len(slots_S):
            return slots_S
        refused_S = self._blocks.grow_many(slots_S, self._slots.num_scheduled_S[slots_S] + 1)
        return refused_S if not self._requests.sharing else self._separate(slots_S, refused_S)

    def _separate(self, slots_S: np.ndarray, refused_S: np.ndarray) -> np.ndarray:
        """Copy on write: forks that are about to write into a shared block get their own copy. Returns the slots
        without room, including those in `refused_S`."""
        sharing = [slot for slot in slots_S.tolist() if slot in self._requests.sharing and slot not in refused_S]
        if not sharing:
            return refused_S
        sharing_S = np.asarray(sharing, np.intp)
        stuck_S = self._blocks.prepare_write_many(sharing_S, self._slots.num_scheduled_S[sharing_S])
        self._requests.sharing.difference_update(sharing)
        self._requests.sharing.update(stuck_S.tolist())
        return np.concatenate([refused_S, stuck_S])

    def _give_up_one(self, now_s: float) -> None:
        running = self._requests.running
        if len(running) > 1:
            self._requests.preempt(least_important(running), now_s)
        else:  # it has the whole pool: the output cannot get longer
            self._requests.end(running[0], Ending(WireFinishReason.LENGTH), now_s)

    # ------------------------------------------------------------ prefill

    def _schedule_prompts(self, num_decodes: int, in_flight: InFlight, now_s: float, *, admits: bool) -> list[Chunk]:
        """Chunks for a step that also has num_decodes decodes. admits: requests from the queue may join."""
        chunks: list[Chunk] = []
        budget = self._config.max_batch_tokens - num_decodes
        if self.pace is not None:
            self._budget = self.pace.allow(num_decodes, waited_s=self._longest_wait_s(now_s))
        for request in sorted(self._requests.prefilling, key=lambda request: request.rank):
            if not budget or len(chunks) == self._max_chunks or self._is_spent:
                break
            chunks.append(self._next_chunk(request, budget, now_s))
            budget -= chunks[-1].num_tokens
        if admits:
            self._admit_waiting(budget, chunks, in_flight, now_s)
        return chunks

    @property
    def _is_spent(self) -> bool:
        return self._budget is not None and self._budget.is_spent

    def _longest_wait_s(self, now_s: float) -> float:
        """The longest wait for a first token among the prompts that this step may continue; 0 if the pace does not
        depend on it."""
        if not self._config.max_gap_steps:
            return 0.0
        head = self._requests.waiting.head(now_s)
        nexts = [*self._requests.prefilling, *([] if head is None else [head])]
        return max((now_s - each.arrival_s for each in nexts if each.first_token_s is None), default=0.0)

    def _next_chunk(self, request: Request, budget: int, now_s: float) -> Chunk:
        slot = request.held_slot
        start, num_known = int(self._slots.num_scheduled_S[slot]), int(self._slots.num_known_S[slot])
        num_tokens = min(num_known - start, budget, self._config.max_chunk_tokens or budget)
        if self._budget is not None:
            num_tokens = self._budget.take(start, num_tokens)
        self._slots.num_scheduled_S[slot] += num_tokens
        self._note_scheduled(request, num_tokens, now_s)
        is_last = start + num_tokens == num_known
        if is_last:
            self._requests.begin_decoding(request)
        forks = self._fork(request, now_s) if is_last and request.followers else ()
        return Chunk(slot=slot, start=start, num_tokens=num_tokens, is_last=is_last, forks=forks)

    def _fork(self, leader: Request, now_s: float) -> tuple[Slot, ...]:
        """Fork followers from the leader's blocks as long as there is room; the others keep following."""
        forks: list[Slot] = []
        while self._admission.may_fork(leader, len(forks), now_s):
            follower = self._requests.fork(leader, now_s)
            self._join(follower)
            forks.append(follower.held_slot)
        return tuple(forks)

    def _join(self, request: Request) -> None:
        self._new_requests.append(
            NewRequest(
                slot=request.held_slot,
                request_id=request.run.request_id,
                token_ids_T=request.token_ids_T,
                num_prompt_tokens=request.num_prompt_tokens,
                sampling=request.sampling,
                pooling=request.run.pooling,
            )
        )

    def _note_scheduled(self, request: Request, num_tokens: int, now_s: float) -> None:
        request.num_computed_tokens += num_tokens
        self._requests.counters.num_prefill_tokens += num_tokens
        if request.first_scheduled_s is None:
            request.first_scheduled_s = now_s
            self._requests.counters.num_prompt_tokens += request.num_prompt_tokens
            self._requests.outputs.put_started(request.key)

    # ------------------------------------------------------------ admission

    def _admit_waiting(self, budget: int, chunks: list[Chunk], in_flight: InFlight, now_s: float) -> None:
        while budget and len(chunks) < self._max_chunks and not self._is_spent:
            request = self._admission.admit_head(in_flight, now_s)
            if request is None:
                return
            self._join(request)
            if request.phase is Phase.LOADING:
                continue
            chunks.append(self._next_chunk(request, budget, now_s))
            budget -= chunks[-1].num_tokens
