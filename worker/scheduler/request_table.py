"""Every unfinished request, in exactly one place: waiting, running in a slot with blocks, or paused with or without a
slot.

All moves between these places happen here, so that request, row, block table and queue always agree. The planner and
the scheduler decide which request moves, and why.
"""

import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from octavo.blockmgr.errors import OutOfBlocks
from octavo.blockmgr.ids import PrefixLookup
from octavo.blockmgr.manager import BlockManager
from octavo.wire.messages import OutputPhase, WireFinishReason
from octavo.worker.scheduler.costs import CopyCosts
from octavo.worker.scheduler.plan import GatewayIndex, OutputBuffer, RequestKey, Slot
from octavo.worker.scheduler.request import Ending, Phase, Request, SchedulerCounters, block_seconds, finished_message
from octavo.worker.scheduler.request_queue import RequestQueue
from octavo.worker.scheduler.slot_state import SlotState, stop_ids

_OUTPUT_PHASES = {
    Phase.LOADING: OutputPhase.PREFILL,
    Phase.PREFILLING: OutputPhase.PREFILL,
    Phase.DECODING: OutputPhase.DECODE,
    Phase.PAUSED: OutputPhase.PAUSED,
    Phase.PARKED: OutputPhase.PAUSED,
}
"""Phases as reported to gateways; all others are QUEUED."""


class LeftSlot(NamedTuple):
    """A slot of an ended request that still has its blocks. token_ids_T: int32, all that the request knew.
    num_computed: how many of them are verified."""

    slot: Slot
    block_owner: str
    token_ids_T: np.ndarray
    num_computed: int


class RequestTable:
    """Requests by place.

    prefilling: running requests that still have known tokens to compute. loading: those that wait for blocks from the
    host, by slot. paused: those that hold a slot and are in no step until they are resumed, by slot. parked: paused
    ones without a slot, by order. sharing: slots whose next write may go into a block that another slot holds too.
    """

    def __init__(
        self,
        *,
        slots: SlotState,
        blocks: BlockManager,
        waiting: RequestQueue,
        eos_token_ids: tuple[int, ...],
        costs: CopyCosts,
    ) -> None:
        self.slots = slots
        self.blocks = blocks
        self.waiting = waiting
        self.outputs = OutputBuffer()
        self.counters = SchedulerCounters()
        self.prefilling: list[Request] = []
        self.loading: dict[Slot, Request] = {}
        self.sharing: set[int] = set()
        self.paused: dict[Slot, Request] = {}
        self.parked: dict[int, Request] = {}
        self._costs = costs
        self._eos_token_ids = eos_token_ids
        self._by_key: dict[RequestKey, Request] = {}
        self._by_slot: dict[int, Request] = {}
        self._running_priorities: Counter[int] = Counter()
        self._left: list[LeftSlot] = []

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._by_key.values()))

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._by_key

    def find(self, key: RequestKey) -> Request | None:
        """The unfinished request with this key; None if there is none."""
        return self._by_key.get(key)

    @property
    def running(self) -> list[Request]:
        """Requests that hold slots, including paused ones."""
        return list(self._by_slot.values())

    @property
    def num_running(self) -> int:
        """How many requests hold slots, including paused ones."""
        return len(self._by_slot)

    @property
    def num_active(self) -> int:
        """How many requests hold slots and are not paused."""
        return len(self._by_slot) - len(self.paused)

    @property
    def lowest_running_priority(self) -> float:
        """The lowest priority among requests that hold slots; infinite if none does."""
        return min(self._running_priorities, default=math.inf)

    def outputs_of(self, gateway: GatewayIndex, *, max_outputs: int) -> list[tuple[int, OutputPhase, int]]:
        """Handle, phase and number of held blocks of a gateway's unfinished outputs, oldest first."""
        found: list[tuple[int, OutputPhase, int]] = []
        block_size = self.blocks.config.block_size
        for key, request in self._by_key.items():
            if len(found) >= max_outputs:
                break
            if key.gateway == gateway:
                held = 0 if request.slot is None else self.blocks.capacity(request.slot) // block_size
                found.append((key.handle, _OUTPUT_PHASES.get(request.phase, OutputPhase.QUEUED), held))
        return found

    def in_slot(self, slot: int) -> Request:
        """The request that holds this slot. Raises KeyError if none does."""
        return self._by_slot[slot]

    # ------------------------------------------------------------ moves

    def accept(self, request: Request, now_s: float) -> None:
        """Queue a new request."""
        self._by_key[request.key] = request
        self._queue(request, now_s)
        self.counters.num_accepted += 1

    def accept_followers(self, leader: Request, followers: list[Request]) -> None:
        """Add further outputs of a prompt, which the leader computes for them."""
        for follower in followers:
            follower.phase, follower.leader = Phase.FOLLOWING, leader
            self._by_key[follower.key] = follower
        leader.followers = followers
        self.counters.num_accepted += len(followers)

    def fork(self, leader: Request, now_s: float) -> Request:
        """Give the next follower a slot in which it shares the leader's prompt, whose last chunk is being planned. It
        decodes from now on. Raises OutOfSlots, which changes nothing."""
        follower, num_tokens = leader.followers[0], leader.num_prompt_tokens
        slot = Slot(self.blocks.fork(leader.held_slot, follower.block_owner, num_tokens=num_tokens))
        del leader.followers[0]
        follower.leader, follower.origin = None, leader
        follower.slot, follower.phase = slot, Phase.DECODING
        follower.first_scheduled_s, follower.num_cached_tokens = now_s, num_tokens
        follower.slot_since_s = now_s
        self.outputs.put_started(follower.key)
        self._take_row(follower, num_tokens)
        self.slots.is_decoding_S[slot] = True
        self.slots.num_computed_S[slot] = 0  # the prompt is scheduled, but not verified before its own first token
        if num_tokens % self.blocks.config.block_size:
            self.sharing |= {int(leader.held_slot), int(slot)}
        return follower

    def promote_follower(self, leader: Request, now_s: float) -> None:
        """The remaining followers continue without the leader: the next one is queued, and leads the others."""
        if not leader.followers:
            return
        heir, *others = leader.followers
        leader.followers, heir.followers, heir.leader = [], others, None
        for other in others:
            other.leader = heir
        self._queue(heir, now_s)

    def admit(self, request: Request, now_s: float) -> None:
        """Move a request from the queue into a slot, with blocks for all its known tokens. Raises OutOfBlocks or
        OutOfSlots, which change nothing."""
        token_ids_T = request.token_ids_T
        admission = self.blocks.admit(
            request.block_owner,
            token_ids_T,
            salt=request.run.cache_salt,
            reserve_tokens=len(token_ids_T),
            lookup=PrefixLookup.NONE if request.needs_whole_prompt else PrefixLookup.LONGEST,
            num_to_use=lambda is_on_host_N: self._costs.num_to_use(is_on_host_N, num_others=self.num_active),
        )
        self.waiting.remove(request, now_s)
        request.slot, request.slot_since_s = Slot(admission.slot), now_s
        if request.preempted_since_s is not None:
            request.note_back(now_s)
        if request.num_preemptions == 0:
            request.num_cached_tokens = admission.num_cached_tokens
            self.counters.num_cached_tokens += admission.num_cached_tokens
        self._take_row(request, admission.num_cached_tokens)
        if request.num_verified_tokens is not None:
            num_verified = min(request.num_verified_tokens, admission.num_cached_tokens)  # fewer if a copy failed
            self.slots.num_computed_S[request.slot] = num_verified
            request.num_verified_tokens = None
        if self.blocks.is_awaited(admission.slot):
            request.phase, self.loading[request.slot] = Phase.LOADING, request
        else:
            self._begin_prefill(request)

    def begin_loaded(self) -> None:
        """Continue requests whose blocks are back from the host, or will be before the next step."""
        for slot, request in list(self.loading.items()):
            if not self.blocks.is_awaited(slot):
                del self.loading[slot]
                self._begin_prefill(request)

    def begin_decoding(self, request: Request) -> None:
        """Its last known token is scheduled: from now on it computes one token per step."""
        request.phase = Phase.DECODING
        self.prefilling.remove(request)
        self.slots.is_decoding_S[request.held_slot] = True

    def preempt(self, request: Request, now_s: float) -> None:
        """Take a request's slot: it is queued again, or parked if it was paused. Its blocks go to the host if there is
        room and that costs less than computing them again; otherwise only its tokens are kept."""
        slot = request.held_slot
        num_tokens, num_verified = int(self.slots.num_scheduled_S[slot]), int(self.slots.num_computed_S[slot])
        if self._may_swap(request, num_tokens):
            self.commit(request)
            was_paused = self._leave_row(request, now_s)
            try:
                self.blocks.swap_out(slot, request.block_owner, num_tokens)
                request.num_verified_tokens = num_verified
                request.num_swaps += 1
                self.counters.num_swaps += 1
            except OutOfBlocks:
                self.blocks.release(slot, request.block_owner)
            self._requeue(request, was_paused, now_s)
        else:
            self.start_over(request, now_s)

    def start_over(self, request: Request, now_s: float) -> None:
        """Preempt a request without copying its blocks to the host: all tokens that are not cached are computed
        again."""
        self.commit(request)
        slot = request.held_slot
        was_paused = self._leave_row(request, now_s)
        self.blocks.release(slot, request.block_owner)
        self._requeue(request, was_paused, now_s)

    def pause(self, request: Request, now_s: float) -> None:
        """Take a request out of the steps, or out of the queue. It keeps its slot if it has one, which still receives
        tokens of steps in flight; its followers continue without it."""
        self.promote_follower(request, now_s)
        if request.is_running:
            self._hold(request)
            return
        if request.leader is not None:
            request.leader.followers.remove(request)
            request.leader = None
        elif request.phase is Phase.WAITING:
            self.waiting.remove(request, now_s)
        self._park(request)

    def resume(self, request: Request, now_s: float) -> None:
        """Put a paused request back into the steps, or into the queue if it has no slot."""
        if request.phase is Phase.PARKED:
            del self.parked[request.order]
            self._queue(request, now_s)
            return
        assert request.resumes_as is not None
        del self.paused[request.held_slot]
        request.phase, request.resumes_as = request.resumes_as, None
        if request.phase is Phase.LOADING:
            self.loading[request.held_slot] = request
        elif request.phase is Phase.PREFILLING:
            self.prefilling.append(request)
        else:
            self.slots.is_decoding_S[request.held_slot] = True

    def end(self, request: Request, ending: Ending, now_s: float, *, keeps_blocks: bool = False) -> None:
        """End a request, wherever it is; every end goes through here. keeps_blocks: until `give_back`, so that what is
        to be sent does not wait for the prefix index and the pool."""
        if request.slot is not None:
            self._leave_slot(request, now_s)
            if not keeps_blocks:
                self.give_back()
        elif request.leader is not None:
            request.leader.followers.remove(request)
        elif request.phase is Phase.WAITING:
            self.waiting.remove(request, now_s)
        self.parked.pop(request.order, None)
        self._forget(request)
        self.promote_follower(request, now_s)
        finished = finished_message(request, ending, now_s)
        self.counters.count(finished)
        self.outputs.put_finished(request.key.gateway, finished)

    def give_back(self) -> None:
        """Give back blocks that ended requests have kept, and enter what they computed into the prefix index.
        Idempotent."""
        for left in self._left:
            self.blocks.commit(left.slot, left.token_ids_T, left.num_computed)
            self.blocks.release(left.slot, left.block_owner)
        self._left.clear()

    def end_tainted(self, request: Request, ending: Ending, now_s: float) -> None:
        """End a request such that nothing that it computed is reused."""
        if request.slot is not None:
            self.blocks.taint(request.slot)
        self.end(request, ending, now_s)

    def drop_gateway(self, gateway: GatewayIndex, now_s: float) -> None:
        """Cancel all requests of a lost gateway, without messages."""
        for key in [key for key in self._by_key if key.gateway == gateway]:
            self.end(self._by_key[key], Ending(WireFinishReason.CANCELLED), now_s)
        self.outputs.forget(gateway)

    def commit(self, request: Request) -> None:
        """Enter the verified full blocks of a running request into the prefix index, for later prompts."""
        slot = request.held_slot
        self.blocks.commit(slot, self.slots.known_tokens(slot), int(self.slots.num_computed_S[slot]))

    # ------------------------------------------------------------ inside

    def _queue(self, request: Request, now_s: float) -> None:
        """Put a request into the queue; if its grammar is still being compiled, `Constraints.ready` does that later."""
        if request.awaits_grammar:
            request.phase = Phase.COMPILING
        else:
            self.waiting.push(request, now_s)

    def _hold(self, request: Request) -> None:
        slot = request.held_slot
        if request.phase is Phase.PREFILLING:
            self.prefilling.remove(request)
        self.loading.pop(slot, None)
        self.slots.is_decoding_S[slot] = False
        request.resumes_as, request.phase = request.phase, Phase.PAUSED
        self.paused[slot] = request

    def _park(self, request: Request) -> None:
        request.phase = Phase.PARKED
        self.parked[request.order] = request

    def _take_row(self, request: Request, num_cached_tokens: int) -> None:
        slot = request.held_slot
        self._by_slot[slot] = request
        self._running_priorities[request.run.priority] += 1
        ids = stop_ids(request.sampling, self._eos_token_ids)
        self.slots.join(slot, request, num_cached_tokens=num_cached_tokens, stop_ids=ids)
        self.waiting.fairness.begin(request, num_cached_tokens=num_cached_tokens)

    def _begin_prefill(self, request: Request) -> None:
        request.phase = Phase.PREFILLING
        self.prefilling.append(request)

    def _may_swap(self, request: Request, num_tokens: int) -> bool:
        """Whether its blocks can go to the host, and that is worthwhile. Not if its result depends on every token of
        the prompt: the runner, which has the partial result, forgets it when the request leaves its slot."""
        if not (num_tokens and self.blocks.config.num_host_blocks and self.blocks.may_move):
            return False
        num_blocks = -(-num_tokens // self.blocks.config.block_size)
        is_cheaper = self._costs.is_swap_cheaper(num_blocks=num_blocks, num_tokens=num_tokens)
        return is_cheaper and not request.needs_whole_prompt

    def _requeue(self, request: Request, was_paused: bool, now_s: float) -> None:
        request.note_preempted(now_s)
        self.counters.num_preemptions += 1
        if was_paused:
            self._park(request)
        else:
            self.waiting.push(request, now_s)

    def _leave_slot(self, request: Request, now_s: float) -> None:
        slot, num_computed = request.held_slot, int(self.slots.num_computed_S[request.held_slot])
        self._leave_row(request, now_s)
        self._left.append(LeftSlot(slot, request.block_owner, request.token_ids_T, num_computed))

    def _leave_row(self, request: Request, now_s: float) -> bool:
        """Take a request out of its slot; the caller gives the blocks back. Returns whether it was paused."""
        slot, was_paused = request.held_slot, request.phase is Phase.PAUSED
        request.block_seconds += self._block_seconds(request, now_s)
        if request.phase is Phase.PREFILLING:
            self.prefilling.remove(request)
        self.waiting.fairness.end(request)
        self.slots.leave(slot, request)
        del self._by_slot[slot]
        self.sharing.discard(int(slot))
        self.paused.pop(slot, None)
        self.loading.pop(slot, None)
        self._drop_priority(request.run.priority)
        request.slot = request.resumes_as = None
        return was_paused

    def _block_seconds(self, request: Request, now_s: float) -> float:
        """Block-seconds of the slot that is being left; token_ids_T still has the tokens that it was taken with."""
        slot, block_size = request.held_slot, self.blocks.config.block_size
        return block_seconds(
            self.slots.token_ticks_SL[slot, : self.slots.num_known_S[slot]],
            since_s=request.slot_since_s,
            now_s=now_s,
            block_size=block_size,
            num_tokens_then=len(request.token_ids_T),
            num_blocks=self.blocks.capacity(slot) // block_size,
        )

    def _drop_priority(self, priority: int) -> None:
        self._running_priorities[priority] -= 1
        if not self._running_priorities[priority]:
            del self._running_priorities[priority]

    def _forget(self, request: Request) -> None:
        request.phase = Phase.FINISHED
        self.blocks.drop_swapped(request.block_owner)
        del self._by_key[request.key]
        if not self._by_slot and not len(self.waiting):
            self.waiting.fairness.forget()
