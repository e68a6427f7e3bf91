"""The scheduler: requests, cancels and results in; plans and outputs out.

Pure: it never waits, reads no clock (``now_s`` is passed), and knows no sockets, tensors or text. Up to
``max_in_flight`` plans may be outstanding, so step N + 1 can be planned before the tokens of step N are known:

    plan N ── plan N+1 ── apply N ── plan N+2 ── apply N+1 …

If a request turns out to have ended at step N, its token of step N + 1 is dropped. Results must come in the order of
the plans.
"""

import heapq
import math
from collections import deque

from octavo.blockmgr.manager import BlockManager
from octavo.wire.codec import TOKEN_BYTES
from octavo.wire.messages import Finished, Run, WireFinishReason
from octavo.worker.config import SchedulerConfig
from octavo.worker.scheduler.costs import CopyCosts
from octavo.worker.scheduler.plan import GatewayIndex, RequestKey, StepOutputs, StepPlan, StepResult
from octavo.worker.scheduler.planner import InFlight, Planner, ResultsFirst
from octavo.worker.scheduler.request import (
    Ending,
    Request,
    SchedulerCounters,
    failure,
    finished_message,
    sampling_of,
    token_ids_of,
)
from octavo.worker.scheduler.request_queue import MAX_WEIGHT, RequestQueue, TenantFairness
from octavo.worker.scheduler.request_table import RequestTable
from octavo.worker.scheduler.results import Constraints, Results
from octavo.worker.scheduler.slot_state import InFlightStep, SlotState

_SLACK = 64  # stale deadlines that are allowed in any case, so that a small heap is rarely cleaned
_Deadline = tuple[float, int, RequestKey]
"""Time in seconds, and the request's order and key."""


def malformed(run: Run) -> str:
    """What is wrong with a Run that no gateway should have sent; empty if it is well formed, so that its other fields
    can be read."""
    num_tokens, rest = divmod(len(run.prompt_ids), TOKEN_BYTES)
    if rest:
        return f"prompt_ids: {len(run.prompt_ids)} bytes are no int32 array"
    if not 0 <= run.num_resumed_tokens <= num_tokens:
        return f"num_resumed_tokens: {run.num_resumed_tokens} of {num_tokens} tokens"
    if run.fork_handles and (run.num_resumed_tokens or run.pooling is not None):
        return "fork_handles: with resumed output or pooling"
    if len({run.handle, *run.fork_handles}) <= len(run.fork_handles):
        return "fork_handles: not distinct"
    return "" if 1 <= run.weight <= MAX_WEIGHT else f"weight: {run.weight} is not in [1, {MAX_WEIGHT}]"


def refusal(request: Request, config: SchedulerConfig, *, pool_tokens: int) -> Ending | None:
    """Why this request can never be served, whatever else runs; None if it can. Such requests are refused before they
    are queued, so that no other request waits behind them. pool_tokens: tokens that one request can have in the
    pool."""
    if not request.num_prompt_tokens:
        return failure("INVALID_FIELD", "prompt_ids: the prompt is empty")
    token_ids_T, num_resumed = request.token_ids_T, request.run.num_resumed_tokens
    if int(token_ids_T.min()) < 0 or int(token_ids_T.max()) >= config.vocab_size:
        wrong = token_ids_T[(token_ids_T < 0) | (token_ids_T >= config.vocab_size)]
        return failure("INVALID_FIELD", f"prompt_ids: {int(wrong[0])} is not in [0, {config.vocab_size})")
    if request.sampling.max_tokens < 1:
        return failure("INVALID_FIELD", f"sampling.max_tokens: {request.sampling.max_tokens} is below 1")
    if not 0 <= request.sampling.min_tokens <= config.max_model_len:
        wrong_min = request.sampling.min_tokens
        return failure("INVALID_FIELD", f"sampling.min_tokens: {wrong_min} is not in [0, {config.max_model_len}]")
    if wrong_stop := [stop for stop in request.sampling.stop_token_ids if not 0 <= stop < config.vocab_size]:
        detail = f"sampling.stop_token_ids: {wrong_stop[0]} is not in [0, {config.vocab_size})"
        return failure("INVALID_FIELD", detail)
    if num_resumed >= request.sampling.max_tokens:
        return failure("INVALID_FIELD", f"num_resumed_tokens: {num_resumed} of {request.sampling.max_tokens}")
    # The last token of an output needs no place in the pool. A prompt without output must still leave one place free.
    return _too_long(len(token_ids_T), config, pool_tokens + 1 if num_resumed else pool_tokens)


def _too_long(num_prompt_tokens: int, config: SchedulerConfig, pool_tokens: int) -> Ending | None:
    needed = num_prompt_tokens + 1
    for limit, name in ((config.max_model_len, "the context"), (pool_tokens, "the KV pool")):
        if needed > limit:
            detail = f"{num_prompt_tokens} prompt tokens and one to generate exceed {name} of {limit} tokens"
            return failure("EXCEEDS_CAPACITY", detail)
    return None


class Scheduler:
    """Decides what each step computes. It alone gives blocks of its block manager to requests, and takes them back.

    Raises ValueError if the block manager has fewer slots than ``max_num_seqs``.
    """

    def __init__(self, config: SchedulerConfig, blocks: BlockManager) -> None:
        self._config = config
        self._blocks = blocks
        pool = blocks.config
        if pool.max_slots < config.max_num_seqs:
            raise ValueError(f"max_num_seqs ({config.max_num_seqs}) is more than the {pool.max_slots} slots")
        self._pool_tokens = pool.block_size * min(pool.num_blocks, pool.max_blocks_per_slot)
        longest = min(config.max_model_len, self._pool_tokens + 1)
        self._slots = SlotState(num_slots=pool.max_slots, max_total_tokens=longest)
        waiting = RequestQueue(aging_s=config.aging_s, fairness=TenantFairness(self._slots))
        self.costs = CopyCosts(
            block_size=pool.block_size, max_copies_in=pool.max_copies_in, copy_s=config.copy_s_per_block
        )
        self._requests = RequestTable(
            slots=self._slots, blocks=blocks, waiting=waiting, eos_token_ids=config.eos_token_ids, costs=self.costs
        )
        self._planner = Planner(config, self._requests)
        self._results = Results(self._requests)
        self._in_flight: deque[InFlightStep] = deque()
        self.constraints = Constraints(self._requests, self._in_flight, config.eos_token_ids)
        self._deadlines: list[_Deadline] = []  # a heap
        self._num_accepted = 0
        self._step = 0
        self._applied_s = -math.inf  # the last result
        self._is_draining = False

    # ------------------------------------------------------------ what can be seen

    @property
    def num_running(self) -> int:
        """Requests that hold a slot and are not paused."""
        return self._requests.num_active

    @property
    def num_waiting(self) -> int:
        """Requests without a slot that are not paused: queued (also after a preemption), waiting for a grammar, or
        following an output of the same prompt."""
        return len(self._requests) - self._requests.num_running - len(self._requests.parked)

    @property
    def waiting_since_s(self) -> float | None:
        """When the queued request that has waited longest began to wait; None if the queue is empty."""
        return self._requests.waiting.waiting_since_s()

    @property
    def awaits_grammars(self) -> bool:
        """Whether nothing can be done until a grammar is compiled: requests wait, but none of them is queued."""
        return bool(self.num_waiting) and not (self._in_flight or self.num_running or len(self._requests.waiting))

    @property
    def num_paused(self) -> int:
        """Requests that are in no step until their callers read again, with or without a slot."""
        return len(self._requests.paused) + len(self._requests.parked)

    @property
    def num_in_flight(self) -> int:
        """Plans whose results have not been applied."""
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        """Whether there are steps to run: a request that is not paused is unfinished, or a step is in flight."""
        return bool(self._in_flight or self.num_running or self.num_waiting)

    @property
    def is_empty(self) -> bool:
        """Whether there is no unfinished request and no step in flight."""
        return not (self._requests or self._in_flight)

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused."""
        return self._is_draining

    @property
    def counters(self) -> SchedulerCounters:
        """The counters since the start."""
        return self._requests.counters

    @property
    def requests(self) -> RequestTable:
        """Every unfinished request, for tests and the engine to read, not to change."""
        return self._requests

    # ------------------------------------------------------------ events

    def add(self, gateway: GatewayIndex, run: Run, *, now_s: float) -> None:
        """Queue a new request, or put its refusal into the next outputs. A Run with a handle that is already in use is
        counted and ignored as a whole."""
        keys = [RequestKey(gateway, handle) for handle in (run.handle, *run.fork_handles)]
        if any(key in self._requests for key in keys):
            self.counters.num_duplicates += 1
            return
        if detail := malformed(run):
            self._refuse_malformed(keys, detail)
            return
        requests = [self._new_request(run, key, index, now_s) for index, key in enumerate(keys)]
        if ending := self._refusal(requests[0]):
            self.counters.num_refused += len(requests)
            for request in requests:
                self._requests.outputs.put_finished(gateway, finished_message(request, ending, now_s))
            return
        self._num_accepted += len(requests)
        self._requests.accept(requests[0], now_s)
        self._requests.accept_followers(requests[0], requests[1:])
        for request in requests:
            if request.deadline_s is not None:
                self._note_deadline(request, request.deadline_s)

    def cancel(self, key: RequestKey, *, now_s: float) -> None:
        """End a request, whatever its phase; its blocks are free once no step in flight can touch them. Keys of unknown
        and finished requests are ignored."""
        if request := self._requests.find(key):
            self._requests.end(request, Ending(WireFinishReason.CANCELLED), now_s)

    def pause(self, key: RequestKey, *, now_s: float) -> None:
        """The caller does not read: leave this request out of all steps until `resume`. It keeps its slot and blocks
        until others need them. Keys of unknown, finished and paused requests are ignored."""
        request = self._requests.find(key)
        if request is not None and not request.is_paused:
            self.counters.num_pauses += 1
            self._requests.pause(request, now_s)

    def resume(self, key: RequestKey, *, now_s: float) -> None:
        """Continue a paused request where it was. All other keys are ignored."""
        request = self._requests.find(key)
        if request is not None and request.is_paused:
            self._requests.resume(request, now_s)

    def drop_gateway(self, gateway: GatewayIndex, *, now_s: float) -> None:
        """Cancel all requests of a lost gateway, without messages."""
        self._requests.drop_gateway(gateway, now_s)

    def drain(self) -> None:
        """Refuse new requests from now on. Idempotent."""
        self._is_draining = True

    def end_all(self, ending: Ending, *, now_s: float) -> None:
        """End every request, for example at the end of a drain's grace period."""
        for request in self._requests:
            self._requests.end(request, ending, now_s)

    # ------------------------------------------------------------ decisions

    def plan(self, *, now_s: float) -> StepPlan | None:
        """The next step; None if there is nothing to do now, or if results must be applied first. Requests whose
        deadline has passed end here, before anything is scheduled for them."""
        self.finish_result()
        self._expire(now_s)
        if len(self._in_flight) >= self._config.max_in_flight:
            return None
        in_flight = InFlight.BUSY if self._in_flight else InFlight.EMPTY
        try:
            plan = self._planner.plan(self._step + 1, in_flight, now_s)
        except ResultsFirst:
            return None
        if plan is not None:
            self._step = plan.step
            self._in_flight.append(InFlightStep.of(plan, self._slots, now_s))
            self._blocks.begin_step(plan.step)
        return plan

    @property
    def newest_step(self) -> InFlightStep:
        """The step of the most recent plan, whose result has not been applied."""
        return self._in_flight[-1]

    def apply(self, result: StepResult, *, now_s: float) -> StepOutputs:
        """Apply the result of the oldest plan in flight. Returns all news since the last outputs. Raises ValueError for
        the result of another step."""
        step = self._take_oldest(result.step)
        self._note_costs(step, result, now_s)
        self._results.succeed(step, result, now_s)
        return self._requests.outputs.take()

    def finish_result(self) -> None:
        """Do what the last result left to be done behind its tokens: enter prompts that it completed into the prefix
        index, of which a thousand tokens take half a millisecond, and give back the blocks of requests that it ended.
        Call it after the tokens are sent, for every stream waits for them. If it is not called, the next plan or result
        does it."""
        self._results.finish()

    def flush(self) -> StepOutputs:
        """Take news that came without a result: refusals, cancels, deadlines, starts."""
        return self._requests.outputs.take()

    # ------------------------------------------------------------ failed steps

    def fail(self, step: int, detail: str, *, now_s: float) -> StepOutputs:
        """The oldest plan failed: every request in it ends with ENGINE_ERROR, and what it computed is not reused."""
        self._results.fail(self._take_oldest(step), detail, now_s)
        return self._requests.outputs.take()

    def fail_out_of_memory(self, step: int, detail: str, *, now_s: float) -> StepOutputs:
        """The oldest plan did not fit into the device's memory: its largest prefill (or its longest request, if it has
        no prefill) ends with OUT_OF_MEMORY; the others are computed again."""
        self._results.run_out_of_memory(self._take_oldest(step), detail, now_s)
        return self._requests.outputs.take()

    # ------------------------------------------------------------ inside

    def _new_request(self, run: Run, key: RequestKey, index: int, now_s: float) -> Request:
        token_ids_T, sampling = token_ids_of(run), sampling_of(run, index)
        # Prompt and output together. The last token needs no place in the pool.
        wanted = len(token_ids_T) - run.num_resumed_tokens + sampling.max_tokens
        return Request(
            run=run,
            key=key,
            sampling=sampling,
            order=self._num_accepted + index,
            arrival_s=now_s,
            deadline_s=None if run.timeout_s is None else now_s + run.timeout_s,
            max_total_tokens=min(wanted, self._config.max_model_len, self._pool_tokens + 1),
            token_ids_T=token_ids_T,
        )

    def _refuse_malformed(self, keys: list[RequestKey], detail: str) -> None:
        distinct = dict.fromkeys(keys)
        self.counters.num_refused += len(distinct)
        for key in distinct:
            finished = Finished(handle=key.handle, reason=WireFinishReason.ERROR, error="INVALID_FIELD", detail=detail)
            self._requests.outputs.put_finished(key.gateway, finished)

    def _refusal(self, request: Request) -> Ending | None:
        run = request.run
        if self._is_draining:
            return failure("DRAINING", "the worker takes no new requests")
        if run.timeout_s is not None and run.timeout_s <= 0:
            return Ending(WireFinishReason.DEADLINE)
        if ending := refusal(request, self._config, pool_tokens=self._pool_tokens):
            return ending
        if len(self._requests) + len(run.fork_handles) >= self._config.max_waiting + self._config.max_num_seqs:
            return failure("QUEUE_FULL", f"{self.num_waiting} requests are waiting, {self.num_paused} paused")
        return None

    def _note_deadline(self, request: Request, deadline_s: float) -> None:
        """Push it onto the heap. Deadlines of ended requests are removed once they outnumber those of live ones."""
        if len(self._deadlines) > 2 * len(self._requests) + _SLACK:
            self._deadlines = [each for each in self._deadlines if self._unfinished(each) is not None]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (deadline_s, request.order, request.key))

    def _unfinished(self, deadline: _Deadline) -> Request | None:
        """The request with this deadline; None if it has ended, even if its key belongs to another request by now."""
        _, order, key = deadline
        request = self._requests.find(key)
        return request if request is not None and request.order == order else None

    def _expire(self, now_s: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now_s:
            if request := self._unfinished(heapq.heappop(self._deadlines)):
                self._requests.end(request, Ending(WireFinishReason.DEADLINE), now_s)

    def _note_costs(self, step: InFlightStep, result: StepResult, now_s: float) -> None:
        num_decodes, seconds = len(step.plan.decode_slots_S), now_s - max(step.planned_s, self._applied_s)
        self._applied_s = now_s
        if self._planner.pace is not None:
            self._planner.pace.note(step.plan.prefill, num_decodes, seconds)
        if self._blocks.config.num_host_blocks:
            self.costs.note_step(step.plan.num_tokens - num_decodes, num_decodes, seconds)
            self.costs.copy.add(result.num_copied_blocks, result.copy_s)

    def _take_oldest(self, step: int) -> InFlightStep:
        if not self._in_flight or self._in_flight[0].plan.step != step:
            raise ValueError(f"step {step} ended, in flight are {[each.plan.step for each in self._in_flight]}")
        self.finish_result()
        self._blocks.end_step(step)
        return self._in_flight.popleft()
