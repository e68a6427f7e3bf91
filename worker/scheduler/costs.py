"""What steps and copies cost, by what was measured, and what follows from it. Pure; knows no requests, reads no clock.

What is sooner, to bring blocks back from the host, or to compute their tokens again (`CopyCosts`):

    copying n blocks     max(n · seconds a block, plans that they take · seconds a step, where others run)
    computing n blocks   n · block size · seconds a token

How many prompt tokens a step may take beside outputs that are being read (`StepPace`):

    seconds of a step    seconds without prompts + b · tokens + c · sum over tokens of what each attends to

Rates are kept as sums that fade, so that large steps count for more than small ones. Where nothing has been measured,
copying is taken to be free, and a step may take all that fits.
"""

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from octavo.worker.scheduler.plan import Chunk

_FADE = 0.9  # of what was measured before, with each new measurement
_LONG_FADE = 0.998  # of what tells tokens from what they attend to: hundreds of steps may lie between two long prompts
_NUM_SEEN = 9  # steps without prompts, of which the middle one counts
_MIN_PREFILL_TOKENS = 32  # below, a step's time says little about a token's
GAP_PER_WAIT = 1.0  # a step may take as long as the next prompt has waited
FULL_STEPS = 1.25  # but no longer than so many full steps of prompts' beginnings
MOST_SURPRISE = 8.0  # times what prompts should have added to a step: where it took longer, the process stood still
LEAST_PROMPT_TOKENS = 32
"""That a step takes of prompts however slow it is, so that they get on."""


class FadingRate:
    """Seconds for one of something. initial: before anything was measured; None: unknown."""

    def __init__(self, initial: float | None = None) -> None:
        self._initial = initial
        self._count = self._seconds = 0.0

    @property
    def seconds(self) -> float | None:
        """None where it is not known."""
        return self._seconds / self._count if self._count else self._initial

    def add(self, count: int, seconds: float) -> None:
        """So many took so long."""
        if count > 0 and seconds > 0:
            self._count = _FADE * self._count + count
            self._seconds = _FADE * self._seconds + seconds


class CopyCosts:
    """block_size: tokens. max_copies_in: blocks that one plan brings back. copy_s: seconds a block one way, as measured
    at the start; None: unknown."""

    def __init__(self, *, block_size: int, max_copies_in: int, copy_s: float | None = None) -> None:
        self._block_size = block_size
        self._max_copies_in = max_copies_in
        self.copy = FadingRate(copy_s)
        self.prefill = FadingRate()
        self.step = FadingRate()

    def note_step(self, num_prefill_tokens: int, num_decode_tokens: int, seconds: float) -> None:
        """A step with so many tokens took so long."""
        if num_prefill_tokens >= _MIN_PREFILL_TOKENS:
            self.prefill.add(num_prefill_tokens, seconds)
        elif num_decode_tokens and not num_prefill_tokens:
            self.step.add(1, seconds)

    def num_to_use(self, is_on_host_N: np.ndarray, *, num_others: int) -> int:
        """How many of a prompt's N cached blocks, some of them on the host (bool), to use, so that all N are there
        soonest; the rest is computed. num_others: requests whose steps the copies have to share."""
        token_s = self.prefill.seconds
        if token_s is None or not len(is_on_host_N):
            return len(is_on_host_N)
        num_copies_K = np.concatenate([[0], np.cumsum(is_on_host_N)])
        num_plans_K = -(-num_copies_K // self._max_copies_in)
        step_s = (self.step.seconds or 0.0) if num_others else 0.0
        copying_K = np.maximum(num_copies_K * (self.copy.seconds or 0.0), num_plans_K * step_s)
        computing_K = np.arange(len(is_on_host_N), -1, -1) * self._block_size * token_s
        cost_K = copying_K + computing_K
        return len(cost_K) - 1 - int(np.argmin(cost_K[::-1]))  # of equals the one that computes least

    def is_swap_cheaper(self, *, num_blocks: int, num_tokens: int) -> bool:
        """Whether carrying a request out and back costs less than computing it again."""
        token_s = self.prefill.seconds
        return token_s is None or 2 * num_blocks * (self.copy.seconds or 0.0) <= num_tokens * token_s


class Allowance:
    """Prompt tokens that one step may take. Made by `StepPace.allow`."""

    def __init__(self, seconds: float, token_s: float, attended_s: float) -> None:
        self._seconds, self._token_s, self._attended_s = seconds, token_s, attended_s
        self._num_taken = 0
        self.is_spent = False

    def take(self, start: int, wanted: int) -> int:
        """How many of the next tokens of a prompt, from position start on, the step takes: at least one. Fewer than are
        wanted: nothing more."""
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
        """The largest n whose cost is within the seconds left: half · n² + linear · n = seconds."""
        if not 0 < self._seconds < math.inf:
            return max(0.0, self._seconds)
        half, linear = self._attended_s / 2, self._token_s + start * self._attended_s
        root = linear + math.sqrt(linear * linear + 4 * half * self._seconds)
        return 2 * self._seconds / root if root else math.inf


def _attended(start: int, num: int) -> float:
    return num * (start + num / 2)


def _round_size(num: float) -> int:
    """Down to a power of two or one and a half of it: recorded steps have such sizes, and are filled up to them."""
    power = 1 << max(0, int(num).bit_length() - 1)
    return power + power // 2 if num >= power + power // 2 else power


class StepPace:
    """Learns what prompt tokens add to a step, and bounds them where outputs decode in it: their next tokens wait for
    the whole step.

    max_gap_s: a step beside outputs is to take no longer. least_steps: but no less than so
    many steps without prompts, since what a step costs whatever is in it is lost to prompts, nor less than the next
    prompt has waited: where they come faster than they are computed, short steps would make it worse for all. 0:
    whatever waits. max_tokens: of any step. A step full of tokens far behind a prompt's beginning, which attend to
    much, takes several times as long as one full of beginnings, and shares what it costs whatever is in it among no
    more tokens: no step is longer for these than for those, however long prompts wait.
    A flood that is being taken in holds the host up, and steps seem to take longer than they do: of those without
    prompts, which are rare then, the middle one of the last few counts.
    attended_share: of what a token costs, at least, for each that it attends to: steps of short prompts tell little of
    that, or the contrary, where each prompt costs something, too. Bounds nothing before a step
    with prompts has been seen.
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
        """A step of these chunks and so many outputs took so long."""
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

    def allow(self, num_decodes: int, *, waited_s: float = 0.0) -> Allowance:
        """For the next step, in which so many outputs decode, and prompts have waited for so long."""
        if not num_decodes or not self._products_22[0, 0]:
            return Allowance(math.inf, 0.0, 0.0)
        decode_s, target_s = self._decode_s, self._max_gap_s
        token_s, attended_s = self._rates()
        if self._least_steps:
            mean_s = self._seconds_2[0] / self._products_22[0, 0]
            full_s = decode_s + FULL_STEPS * self._max_tokens * (token_s or mean_s)
            target_s = max(target_s, min(max(self._least_steps * decode_s, GAP_PER_WAIT * waited_s), full_s))
        return Allowance(target_s - decode_s, token_s, attended_s)

    @property
    def _decode_s(self) -> float:
        """Seconds of a step without prompts; 0 before one was seen."""
        seen = sorted(self._decodes_s)
        return seen[len(seen) // 2] if seen else 0.0

    def _rates(self) -> tuple[float, float]:
        """Seconds a token, and a token attended to: least squares, neither below zero, the second no less than its
        share."""
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
