"""Measured costs of steps and copies, and decisions based on them. Pure; knows no requests, reads no clock.

Which is faster, copying blocks back from the host or computing their tokens again (`CopyCosts`):

    copying n blocks     max(n · seconds per block, plans needed · seconds per step if other requests run)
    computing n blocks   n · block size · seconds per token

How many prompt tokens a step may take if outputs decode in it, too (`StepPace`):

    seconds of a step    seconds without prompts + b · tokens + c · sum over tokens of what each attends to

Rates are kept as exponentially decaying sums, so that large steps count for more than small ones. As long as nothing
has been measured, copying is assumed to be free, and a step may take all that fits.
"""

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from octavo.worker.scheduler.plan import Chunk

_FADE = 0.9  # weight that earlier measurements keep with each new one
_LONG_FADE = 0.998  # the same for StepPace's rates: hundreds of steps may lie between two long prompts
_NUM_SEEN = 9  # steps without prompts whose median is used
_MIN_PREFILL_TOKENS = 32  # with fewer, a step's time says little about a token's
GAP_PER_WAIT = 1.0  # a step may take as long as the next prompt has waited
FULL_STEPS = 1.25  # but no longer than this many full steps of prompts' first tokens
MOST_SURPRISE = 8.0  # times the time that prompts should have added to a step: if it took longer, the process stalled
LEAST_PROMPT_TOKENS = 32
"""Prompt tokens that a step takes however slow it is, so that prompts make progress."""


class DecayingRate:
    """Seconds per item. initial: the rate before anything has been measured; None: unknown."""

    def __init__(self, initial: float | None = None) -> None:
        self._initial = initial
        self._count = self._seconds = 0.0

    @property
    def seconds(self) -> float | None:
        """Seconds per item; None if unknown."""
        return self._seconds / self._count if self._count else self._initial

    def add(self, count: int, seconds: float) -> None:
        """Note that count items took this long. Ignored unless both are positive."""
        if count > 0 and seconds > 0:
            self._count = _FADE * self._count + count
            self._seconds = _FADE * self._seconds + seconds


class CopyCosts:
    """block_size: tokens. max_copies_in: blocks that one plan can bring back. copy_s: seconds per block one way, as
    measured at the start; None: unknown."""

    def __init__(self, *, block_size: int, max_copies_in: int, copy_s: float | None = None) -> None:
        self._block_size = block_size
        self._max_copies_in = max_copies_in
        self.copy = DecayingRate(copy_s)
        self.prefill = DecayingRate()
        self.step = DecayingRate()

    def note_step(self, num_prefill_tokens: int, num_decode_tokens: int, seconds: float) -> None:
        """Note that a step with these numbers of tokens took this long."""
        if num_prefill_tokens >= _MIN_PREFILL_TOKENS:
            self.prefill.add(num_prefill_tokens, seconds)
        elif num_decode_tokens and not num_prefill_tokens:
            self.step.add(1, seconds)

    def num_to_use(self, is_on_host_N: np.ndarray, *, num_others: int) -> int:
        """How many of a prompt's N cached blocks to use so that all N are ready soonest; the rest are computed.
        is_on_host_N: bool. num_others: other requests in the steps that the copies take."""
        token_s = self.prefill.seconds
        if token_s is None or not len(is_on_host_N):
            return len(is_on_host_N)
        num_copies_K = np.concatenate([[0], np.cumsum(is_on_host_N)])
        num_plans_K = -(-num_copies_K // self._max_copies_in)
        step_s = (self.step.seconds or 0.0) if num_others else 0.0
        copying_K = np.maximum(num_copies_K * (self.copy.seconds or 0.0), num_plans_K * step_s)
        computing_K = np.arange(len(is_on_host_N), -1, -1) * self._block_size * token_s
        cost_K = copying_K + computing_K
        return len(cost_K) - 1 - int(np.argmin(cost_K[::-1]))  # of equal costs, the one that computes least

    def is_swap_cheaper(self, *, num_blocks: int, num_tokens: int) -> bool:
        """Whether copying a request out and back costs no more than computing it again; True if that is unknown."""
        token_s = self.prefill.seconds
        return token_s is None or 2 * num_blocks * (self.copy.seconds or 0.0) <= num_tokens * token_s


class StepBudget:
    """Prompt tokens that one step may take. Made by `StepPace.allow`."""

    def __init__(self, seconds: float, token_s: float, attended_s: float) -> None:
        self._seconds, self._token_s, self._attended_s = seconds, token_s, attended_s
        self._num_taken = 0
        self.is_spent = False

    def take(self, start: int, wanted: int) -> int:
        """How many of a prompt's tokens, from position start on, the step takes: at least one. If fewer than wanted,
        the budget is spent."""
        fitting = self._fitting(start)
        if fitting < wanted:
            self.is_spent = True
            total = max(_round_size(self._num_taken + fitting), LEAST_PROMPT_TOKENS)
            wanted = max(1, min(total - self._num_taken, wanted))
        else:
            self._seconds -= self._cost(start, wanted)
        self._num_taken += wanted
        return wanted

    def _cost(self, start: int, num: int) -> float:
        return num * self._token_s + _attended(start, num) * self._attended_s

    def _fitting(self, start: int) -> float:
        """The largest n whose cost is within the remaining seconds: half · n² + linear · n = seconds."""
        if not 0 < self._seconds < math.inf:
            return max(0.0, self._seconds)
        half, linear = self._attended_s / 2, self._token_s + start * self._attended_s
        root = linear + math.sqrt(linear * linear + 4 * half * self._seconds)
        return 2 * self._seconds / root if root else math.inf


def _attended(start: int, num: int) -> float:
    return num * (start + num / 2)


def _round_size(num: float) -> int:
    """Round down to 2^k or 1.5 · 2^k: recorded steps have these sizes, and others are padded to them."""
    power = 1 << max(0, int(num).bit_length() - 1)
    return power + power // 2 if num >= power + power // 2 else power


class StepPace:
    """Learns how much time prompt tokens add to a step, and limits them if outputs decode in it: the next tokens of
    these wait for the whole step. There is no limit before a step with prompts has been seen.

    max_gap_s: longest duration of a step in which outputs decode, unless least_steps allows more.
    least_steps: if not 0, such a step may take as long as this many steps without prompts, since prompts gain nothing
      from a step's fixed cost, or as long as the next prompt has waited: if prompts arrive faster than they are
      computed, short steps would make it worse for all. But it may take no longer than FULL_STEPS full steps of
      prompts' first tokens, however long prompts wait: a step full of later tokens, which attend to many others, takes
      several times as long, and spreads its fixed cost over no more tokens.
    max_tokens: of any step.
    attended_share: least cost of each token attended to, as a share of a token's own cost. Steps of short prompts say
      little about it, and may even suggest the contrary, as each prompt has a cost of its own.

    While a flood of requests arrives, the host is busy and steps seem to take longer than they do. Steps without
    prompts are rare then, so their median over the last few is used.
    """

    def __init__(
        self, max_gap_s: float, *, least_steps: float = 0.0, max_tokens: float = math.inf, attended_share: float = 0.0
    ) -> None:
        self._max_gap_s, self._least_steps, self._max_tokens = max_gap_s, least_steps, max_tokens
        self._attended_share = attended_share
        self._decodes_s: deque[float] = deque(maxlen=_NUM_SEEN)
        self._products_22 = np.zeros((2, 2))  # of tokens and attended tokens
        self._seconds_2 = np.zeros(2)

    def note(self, chunks: Sequence[Chunk], num_decodes: int, seconds: float) -> None:
        """Note that a step with these chunks and this many decodes took this long."""
        if seconds <= 0:
            return
        if not chunks:
            if num_decodes:
                self._decodes_s.append(seconds)
            return
        tokens = sum(chunk.num_tokens for chunk in chunks)
        if tokens < _MIN_PREFILL_TOKENS:
            return
        seen_2 = np.array([tokens, sum(_attended(chunk.start, chunk.num_tokens) for chunk in chunks)])
        added_s = max(0.0, seconds - self._decode_s)
        if self._products_22[0, 0]:
            added_s = min(added_s, MOST_SURPRISE * max(float(seen_2 @ self._rates()), self._max_gap_s))
        self._products_22 = _LONG_FADE * self._products_22 + np.outer(seen_2, seen_2)
        self._seconds_2 = _LONG_FADE * self._seconds_2 + seen_2 * added_s

    def allow(self, num_decodes: int, *, waited_s: float = 0.0) -> StepBudget:
        """The budget of the next step. num_decodes: outputs that decode in it. waited_s: longest wait of a prompt
        for its first token."""
        if not num_decodes or not self._products_22[0, 0]:
            return StepBudget(math.inf, 0.0, 0.0)
        decode_s, target_s = self._decode_s, self._max_gap_s
        token_s, attended_s = self._rates()
        if self._least_steps:
            mean_s = self._seconds_2[0] / self._products_22[0, 0]
            full_s = decode_s + FULL_STEPS * self._max_tokens * (token_s or mean_s)
            target_s = max(target_s, min(max(self._least_steps * decode_s, GAP_PER_WAIT * waited_s), full_s))
        return StepBudget(target_s - decode_s, token_s, attended_s)

    @property
    def _decode_s(self) -> float:
        """Median seconds of recent steps without prompts; 0 before any was seen."""
        seen = sorted(self._decodes_s)
        return seen[len(seen) // 2] if seen else 0.0

    def _rates(self) -> tuple[float, float]:
        """Seconds per token and per token attended to, by least squares: neither is below zero, and the second is at
        least its share of the first."""
        (tokens, mixed), (_, attended) = self._products_22.tolist()
        of_tokens, of_attended = self._seconds_2.tolist()
        share, determinant = self._attended_share, tokens * attended - mixed * mixed
        if determinant > 1e-6 * tokens * attended:
            token_s = (attended * of_tokens - mixed * of_attended) / determinant
            attended_s = (tokens * of_attended - mixed * of_tokens) / determinant
            if token_s >= 0 and attended_s >= share * token_s:
                return token_s, attended_s
            if token_s < 0 and attended:
                return 0.0, of_attended / attended
        together_s = (of_tokens + share * of_attended) / (tokens + 2 * share * mixed + share * share * attended)
        return together_s, share * together_s
