"""One output on its way through the worker: what was asked, and what has become of it.

    WAITING ──admitted──► PREFILLING ──last chunk planned──► DECODING ──► FINISHED
       ▲                      │                                  │
       └──────────────────────┴────────── preempted ─────────────┘

An output after the first one of a prompt is FOLLOWING its leader at first. When the leader's prompt has been scheduled
it is DECODING at once, in a fork of the leader's blocks; or, where there is no room for it, it waits as others do.

A request whose grammar is not compiled yet is COMPILING before it waits. One that blocks come back for from the host's
memory is LOADING before it is PREFILLING: it holds its slot and is in no step.

A request whose caller does not read is in no step: PAUSED while it keeps its slot and blocks, PARKED where it has none.

    PREFILLING, DECODING ◄──resumed── PAUSED ──its place is needed──► PARKED ──resumed──► WAITING, COMPILING

Per-step numbers of running requests are not here but in `worker.scheduler.slot_state`, where numpy reaches them. Knows
no blocks. Shapes: T tokens of one output · G gaps between them
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
"""The time of a token is a **tick**: a microsecond of the engine's clock in 32 bits. It wraps after 71 minutes, and so
do differences: no gap between two tokens is that long."""
NO_TICKS = np.empty(0, np.uint32)
MAX_TRACED_PREEMPTIONS = 64


def tick(now_s: float) -> int:
    """The clock, in [0, 2^32)."""
    return int(now_s * TICKS_PER_S) & 0xFFFFFFFF


def gap_percentiles(ticks_T: np.ndarray) -> tuple[float, float]:
    """Median and 99th percentile (by linear interpolation) of the seconds between two tokens; 0 below two tokens.
    ticks_T: uint32, in order."""
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
    """Blocks times the seconds that a slot held them.

    ticks_T: uint32, of all the request's tokens, prompt included (whose ticks are not looked at). num_tokens_then: what
    the blocks were taken for at since_s. num_blocks: held at now_s. A block that came later is counted from its first
    token on, which is right to within a step or two.
    """
    num_blocks_then = min(-(-num_tokens_then // block_size), num_blocks)
    seconds = num_blocks_then * (now_s - since_s)
    firsts = np.arange(num_blocks_then, num_blocks) * block_size
    firsts = firsts[firsts < len(ticks_T)]
    if len(firsts):  # a block may be older than ticks can tell, no gap is
        gaps = np.diff(ticks_T[firsts[0] :], append=np.uint32(tick(now_s)))
        ages = gaps[::-1].cumsum(dtype=np.float64)[::-1][firsts - firsts[0]]
        seconds += float(ages.sum()) / TICKS_PER_S
    return seconds


class Matcher(Protocol):
    """How far one output has come in its grammar: all that the scheduler knows of it, so that it stays free of the
    library behind it."""

    def fork(self) -> "Matcher":
        """Another output at the same place."""

    def accept(self, token_id: int) -> bool:
        """The output goes on with this token; False where the grammar does not allow it, and then this is broken."""

    def replay(self, token_ids: Iterable[int]) -> bool:
        """Output that was made elsewhere; False as in `accept`."""

    @property
    def is_complete(self) -> bool:
        """Nothing may follow, or an end token was accepted."""

    @property
    def ended_by_token(self) -> bool:
        """The last token accepted was an end token."""

    @property
    def error(self) -> str:
        """Why it is broken; empty while it is not."""

    def fill(self, bits_W: np.ndarray) -> bool:
        """Writes the mask of the next token; False where the grammar broke at it."""


class Phase(Enum):
    """Where a request is; exactly one at a time."""

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
    """Of one of its outputs. A prompt that is pooled samples one token, which is not sent."""
    if run.pooling is not None:
        return SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1)
    return sampling_of_output(run.sampling, index) if index else run.sampling


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One output of a `Run`, which it holds as it came. ``order`` counts acceptances, so it is also a unique name
    within this worker.

    sampling: the Run's, as it is for this output (`sampling_of`).
    token_ids_T: int32, prompt and what was generated before the last preemption; while it runs, `SlotState` has them.
    waited_s: spent waiting in all, without the current spell, which began at ``waiting_since_s``.
    is_aged: it waited so long that it goes first and is preempted for no younger one.
    leader, followers: outputs of one prompt whose fate is still the leader's (both in order).
    origin: whose prompt it shares since it forked, until its own first token has shown that the prompt was computed.
    num_sent_prompt_logprobs: positions of the prompt, from the second on, whose log-probabilities have been sent.
    num_paid_tokens: its first so many tokens are not charged again (`worker.scheduler.request_queue`).
    num_swaps: of its preemptions, those where its blocks went to the host. num_verified_tokens: of what went there, how
    many tokens had been followed by one whose logits were finite; None where it is back, or never went there.
    resumes_as: what a PAUSED request does when it goes on; None for all others.
    matcher: how far the output has come in its grammar; None without one, and until it is compiled.
    preempted: spells without a slot after it had one, where its Run is traced; preempted_since_s: the present one.
    slot_since_s: when it took its present slot. block_seconds: blocks held times seconds, of former slots.
    token_ticks_T: uint32, when the tokens that this worker generated came; while it runs, `SlotState` has them.
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
        """Tokens that it came with: the prompt, and output that another worker had generated before it was lost."""
        return len(self.run.prompt_ids) // TOKEN_BYTES

    @property
    def prompt_ids_T(self) -> np.ndarray:
        """int32: the prompt alone."""
        return token_ids_of(self.run)[: self.num_prompt_tokens]

    @property
    def needs_whole_prompt(self) -> bool:
        """Something is made of every token of the prompt, so that cached ones have to be computed all the same."""
        return self.run.pooling is Pooling.MEAN or self.sampling.num_prompt_logprobs is not None

    @property
    def awaits_grammar(self) -> bool:
        """It cannot run before its grammar is compiled."""
        return self.sampling.grammar is not None and self.matcher is None

    @property
    def turn_rank(self) -> tuple[bool, int, int]:
        """The smaller goes first, whether it waits or runs: the aged, then by priority, then by arrival."""
        return (not self.is_aged, 0 if self.is_aged else -self.run.priority, self.order)

    @property
    def rank(self) -> tuple[bool, bool, int, int]:
        """The smaller is more important and is preempted later: as `turn_rank`, with the paused behind all others."""
        return (self.phase is Phase.PAUSED, *self.turn_rank)

    @property
    def held_slot(self) -> Slot:
        """The slot of a running request."""
        assert self.slot is not None
        return self.slot

    @property
    def is_running(self) -> bool:
        """It holds a slot and blocks, and is in the steps, or will be once its blocks are back."""
        return self.phase in (Phase.LOADING, Phase.PREFILLING, Phase.DECODING)

    @property
    def is_paused(self) -> bool:
        """Its caller does not read: it is in no step."""
        return self.phase in (Phase.PAUSED, Phase.PARKED)

    # For traces: two notes for each preemption, none per token, and only where the request is traced.

    def note_preempted(self, now_s: float) -> None:
        """It has lost its slot."""
        self.num_preemptions += 1
        flags = self.run.traceparent[-2:]
        if flags and int(flags, 16) & 1:  # sampled: the trace is kept
            self.preempted_since_s = now_s

    def note_back(self, now_s: float) -> None:
        """It has a slot again, or ends without."""
        assert self.preempted_since_s is not None
        if len(self.preempted) < MAX_TRACED_PREEMPTIONS:
            self.preempted.append((self.preempted_since_s - self.arrival_s, now_s - self.arrival_s))
        self.preempted_since_s = None


class Ending(NamedTuple):
    """Why an output ends. error: name of an octavo.v1.ErrorReason without its prefix, where reason is ERROR."""

    reason: WireFinishReason
    stop_token_id: int | None = None
    error: str = ""
    detail: str = ""


def failure(error: str, detail: str) -> Ending:
    """An ending by error."""
    return Ending(WireFinishReason.ERROR, error=error, detail=detail)


def finished_message(request: Request, ending: Ending, now_s: float) -> Finished:
    """The end of an output with its statistics."""
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
        cached_tokens=min(request.num_cached_tokens, request.num_prompt_tokens),  # resumed output hits too
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
    """Since the start. Tokens count once each time they are computed.

    num_ended: by reason, for errors by the name of the error. num_accepted == num_ended.total() + unfinished.
    """

    num_accepted: int = 0
    num_refused: int = 0
    num_duplicates: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0  # of them
    num_pauses: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_cached_tokens: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_dropped_tokens: int = 0  # sampled for requests that had ended meanwhile
    num_ended: Counter[str] = field(default_factory=Counter)

    def count(self, finished: Finished) -> None:
        """An accepted request ended."""
        is_error = finished.reason is WireFinishReason.ERROR
        self.num_ended[finished.error if is_error else finished.reason.name] += 1
