"""One output on its way through the worker: what was requested, and its state.

    WAITING ──admitted──► PREFILLING ──last chunk planned──► DECODING ──► FINISHED
       ▲                      │                                  │
       └──────────────────────┴────────── preempted ─────────────┘

Further outputs of a prompt start as FOLLOWING the first one, their leader. Once the leader's prompt has been scheduled,
a follower is DECODING at once, in a fork of the leader's blocks; if there is no room for it, it waits like others.

A request whose grammar is not compiled yet is COMPILING before it is WAITING. One whose blocks come back from the
host's memory is LOADING before it is PREFILLING: it holds its slot and is in no step.

A request whose caller does not read is in no step: PAUSED while it keeps its slot and blocks, PARKED if it has none.

    PREFILLING, DECODING ◄──resumed── PAUSED ──its place is needed──► PARKED ──resumed──► WAITING, COMPILING

Per-step numbers of running requests are in `worker.scheduler.slot_state`, as numpy arrays. Knows no blocks.
Shapes: T tokens of one output · G gaps between them
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np

from octavo.wire.codec import TOKEN_BYTES
from octavo.wire.messages import Finished, Pooling, Run, SamplingParams, WireFinishReason, sampling_of_output
from octavo.worker.scheduler.plan import RequestKey, Slot

TICKS_PER_S = 1_000_000
"""The time of a token is kept in **ticks**: microseconds of the engine's clock in 32 bits. Ticks and their differences
wrap after 71 minutes; no gap between two tokens is that long."""
NO_TICKS = np.empty(0, np.uint32)
MAX_TRACED_PREEMPTIONS = 64


def tick(now_s: float) -> int:
    """The clock's time in ticks, in [0, 2^32)."""
    return int(now_s * TICKS_PER_S) & 0xFFFFFFFF


def gap_percentiles(ticks_T: np.ndarray) -> tuple[float, float]:
    """Median and 99th percentile (linearly interpolated) of the seconds between successive tokens; 0 for fewer than two
    tokens. ticks_T: uint32, in order."""
    gaps_G = np.sort(np.diff(ticks_T))
    if not len(gaps_G):
        return 0.0, 0.0
    return _percentile(gaps_G, 0.5), _percentile(gaps_G, 0.99)


def _percentile(sorted_G: np.ndarray, share: float) -> float:
    place = share * (len(sorted_G) - 1)
    below = int(place)
    low, high = float(sorted_G[below]), float(sorted_G[min(below + 1, len(sorted_G) - 1)])
    return (low + (high - low) * (place - below)) / TICKS_PER_S


def block_seconds(
    ticks_T: np.ndarray, *, since_s: float, now_s: float, block_size: int, num_tokens_then: int, num_blocks: int
) -> float:
    """Block-seconds: for how long a slot held each of its blocks, summed.

    ticks_T: uint32, of all the request's tokens, including the prompt (whose ticks are not read). num_tokens_then:
    tokens that the slot's blocks were allocated for at since_s. num_blocks: held at now_s. A block added later counts
    from its first token on, which is right to within a step or two.
    """
    num_blocks_then = min(-(-num_tokens_then // block_size), num_blocks)
    seconds = num_blocks_then * (now_s - since_s)
    firsts = np.arange(num_blocks_then, num_blocks) * block_size
    firsts = firsts[firsts < len(ticks_T)]
    if len(firsts):  # a block's age may exceed the range of ticks; no gap does
        gaps = np.diff(ticks_T[firsts[0] :], append=np.uint32(tick(now_s)))
        ages = gaps[::-1].cumsum(dtype=np.float64)[::-1][firsts - firsts[0]]
        seconds += float(ages.sum()) / TICKS_PER_S
    return seconds


class Matcher(Protocol):
    """The position of one output in its grammar. This is all that the scheduler knows of grammars, so that it does not
    depend on the library that implements them."""

    def fork(self) -> "Matcher":
        """A matcher for another output at the same position."""

    def accept(self, token_id: int) -> bool:
        """Advance by this token. False if the grammar does not allow it; then the matcher is broken."""

    def replay(self, token_ids: Iterable[int]) -> bool:
        """Advance by output generated elsewhere; False as in `accept`."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow, or an end token was accepted."""

    @property
    def ended_by_token(self) -> bool:
        """Whether the last token accepted was an end token."""

    @property
    def error(self) -> str:
        """Why it is broken; empty if it is not."""

    def fill(self, bits_W: np.ndarray) -> bool:
        """Write the mask of the next token. False if the grammar failed at it."""


class Phase(Enum):
    """The state of a request."""

    FOLLOWING = "following"
    COMPILING = "compiling"
    WAITING = "waiting"
    LOADING = "loading"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    PAUSED = "paused"
    PARKED = "parked"
    FINISHED = "finished"


def token_ids_of(run: Run) -> np.ndarray:
    """int32: prompt and resumed output."""
    return np.frombuffer(run.prompt_ids, np.dtype("<i4"))


def sampling_of(run: Run, index: int) -> SamplingParams:
    """The sampling parameters of one of a Run's outputs. A pooled prompt samples one token, which is not sent."""
    if run.pooling is not None:
        return SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1)
    return sampling_of_output(run.sampling, index) if index else run.sampling


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One output of a `Run`, which is kept as received. ``order`` counts acceptances, so it is also a unique name
    within this worker.

    sampling: the Run's parameters for this output (`sampling_of`).
    token_ids_T: int32, the prompt and what was generated before the last preemption; while the request holds a slot,
      `SlotState` has the current tokens.
    waited_s: total time spent waiting, without the current wait, which began at ``waiting_since_s``.
    is_aged: it has waited so long that it goes first and is preempted last.
    leader, followers: a follower's leader, and a leader's followers in order, until they fork or go on separately.
    origin: the request whose prompt it has shared since it forked; None once its own first token has shown that the
      prompt was computed.
    num_sent_prompt_logprobs: positions of the prompt, from the second on, whose log-probabilities have been sent.
    num_paid_tokens: this many of its first tokens are not charged again (`worker.scheduler.request_queue`).
    num_swaps: preemptions in which its blocks went to the host. num_verified_tokens: how many of the tokens that went
      there are verified (`worker.scheduler.slot_state`); None if nothing is there.
    resumes_as: the phase in which a PAUSED request continues; None for all others.
    matcher: the output's position in its grammar; None without a grammar, and until it is compiled.
    preempted: times without a slot after it had one, if its Run is traced; preempted_since_s: start of the current one.
    slot_since_s: when it took its current slot. block_seconds: blocks held times seconds, over former slots.
    token_ticks_T: uint32, when this worker generated each token; while it holds a slot, `SlotState` has the current
      ones.
    Times are the engine's monotonic seconds; None: not yet.
    """

    run: Run
    key: RequestKey
    sampling: SamplingParams
    order: int
    arrival_s: float
    deadline_s: float | None
    max_total_tokens: int
    token_ids_T: np.ndarray
    phase: Phase = Phase.WAITING
    slot: Slot | None = None
    waiting_since_s: float = 0.0
    waited_s: float = 0.0
    is_aged: bool = False
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0
    num_verified_tokens: int | None = None
    preempted: list[tuple[float, float]] = field(default_factory=list)
    preempted_since_s: float | None = None
    slot_since_s: float = 0.0
    block_seconds: float = 0.0
    token_ticks_T: np.ndarray = field(default_factory=lambda: NO_TICKS)
    leader: "Request | None" = None
    followers: "list[Request]" = field(default_factory=list)
    origin: "Request | None" = None
    num_sent_prompt_logprobs: int = 0
    num_paid_tokens: int = 0
    matcher: Matcher | None = None
    resumes_as: Phase | None = None
    block_owner: str = field(init=False)

    def __post_init__(self) -> None:
        self.block_owner = str(self.order)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.num_given_tokens - self.run.num_resumed_tokens

    @property
    def num_given_tokens(self) -> int:
        """Tokens that its Run has: the prompt, and output that another worker had generated before that was lost."""
        return len(self.run.prompt_ids) // TOKEN_BYTES

    @property
    def prompt_ids_T(self) -> np.ndarray:
        """int32: the prompt alone."""
        return token_ids_of(self.run)[: self.num_prompt_tokens]

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether the result depends on every token of the prompt, so that even cached ones must be computed."""
        return self.run.pooling is Pooling.MEAN or self.sampling.num_prompt_logprobs is not None

    @property
    def awaits_grammar(self) -> bool:
        """Whether it cannot run until its grammar is compiled."""
        return self.sampling.grammar is not None and self.matcher is None

    @property
    def turn_rank(self) -> tuple[bool, int, int]:
        """Smaller goes first, waiting or running: aged ones, then by priority, then by arrival."""
        return (not self.is_aged, 0 if self.is_aged else -self.run.priority, self.order)

    @property
    def rank(self) -> tuple[bool, bool, int, int]:
        """Smaller is more important and is preempted later: `turn_rank`, with paused requests after all others."""
        return (self.phase is Phase.PAUSED, *self.turn_rank)

    @property
    def held_slot(self) -> Slot:
        """The slot of a running request."""
        assert self.slot is not None
        return self.slot

    @property
    def is_running(self) -> bool:
        """Whether it holds a slot and is not paused: it is in the steps, or will be once its blocks are back."""
        return self.phase in (Phase.LOADING, Phase.PREFILLING, Phase.DECODING)

    @property
    def is_paused(self) -> bool:
        """Whether its caller does not read: it is in no step."""
        return self.phase in (Phase.PAUSED, Phase.PARKED)

    # For traces: two notes for each preemption, none per token; kept only if the request is traced.

    def note_preempted(self, now_s: float) -> None:
        """It has lost its slot."""
        self.num_preemptions += 1
        flags = self.run.traceparent[-2:]
        if flags and int(flags, 16) & 1:  # sampled: the trace is kept
            self.preempted_since_s = now_s

    def note_back(self, now_s: float) -> None:
        """It has a slot again, or ends without one."""
        assert self.preempted_since_s is not None
        if len(self.preempted) < MAX_TRACED_PREEMPTIONS:
            self.preempted.append((self.preempted_since_s - self.arrival_s, now_s - self.arrival_s))
        self.preempted_since_s = None


class Ending(NamedTuple):
    """Why an output ends. error: name of an octavo.v1.ErrorReason without its prefix, if reason is ERROR."""

    reason: WireFinishReason
    stop_token_id: int | None = None
    error: str = ""
    detail: str = ""


def failure(error: str, detail: str) -> Ending:
    """An ending with an error."""
    return Ending(WireFinishReason.ERROR, error=error, detail=detail)


def finished_message(request: Request, ending: Ending, now_s: float) -> Finished:
    """The message that an output has ended, with its statistics."""
    scheduled_s = request.first_scheduled_s
    first_s, last_s = request.first_token_s, request.last_token_s
    p50_s, p99_s = gap_percentiles(request.token_ticks_T)
    if request.preempted_since_s is not None:
        request.note_back(now_s)
    return Finished(
        handle=request.key.handle,
        reason=ending.reason,
        stop_token_id=ending.stop_token_id,
        error=ending.error,
        detail=ending.detail,
        prompt_tokens=request.num_prompt_tokens,
        completion_tokens=0 if request.run.pooling else len(request.token_ids_T) - request.num_prompt_tokens,
        cached_tokens=min(request.num_cached_tokens, request.num_prompt_tokens),  # resumed output may be cached too
        computed_tokens=request.num_computed_tokens,
        preemptions=request.num_preemptions,
        swaps=request.num_swaps,
        queue_s=(now_s if scheduled_s is None else scheduled_s) - request.arrival_s,
        prefill_s=0.0 if scheduled_s is None else (now_s if first_s is None else first_s) - scheduled_s,
        decode_s=0.0 if first_s is None or last_s is None else last_s - first_s,
        inter_token_p50_s=p50_s,
        inter_token_p99_s=p99_s,
        block_seconds=request.block_seconds,
        preempted=tuple(request.preempted),
    )


@dataclass(slots=True, kw_only=True)
class SchedulerCounters:
    """Counts since the start. A token counts each time it is computed.

    num_ended: by reason, for errors by the error's name. num_accepted == num_ended.total() + unfinished requests.
    """

    num_accepted: int = 0
    num_refused: int = 0
    num_duplicates: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0  # preemptions in which blocks went to the host
    num_pauses: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_cached_tokens: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_dropped_tokens: int = 0  # sampled for requests that had left their slot meanwhile
    num_ended: Counter[str] = field(default_factory=Counter)

    def count(self, finished: Finished) -> None:
        """An accepted request ended."""
        is_error = finished.reason is WireFinishReason.ERROR
        self.num_ended[finished.error if is_error else finished.reason.name] += 1
