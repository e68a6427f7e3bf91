"""What is sooner: to bring blocks back from the host, or to compute their tokens again. By what was measured.

    copying n blocks     max(n · seconds a block, plans that they take · seconds a step, where others run)
    computing n blocks   n · block size · seconds a token

Rates are kept as sums that fade, so that large steps count for more than small ones. Where nothing has been measured,
copying is taken to be free. Pure; knows no requests.
"""

import numpy as np

_FADE = 0.9  # of what was measured before, with each new measurement
_MIN_PREFILL_TOKENS = 32  # below, a step's time says little about a token's


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
