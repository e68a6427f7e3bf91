"""Which outputs end with the token that they just got: by a stop token, or by length.

The vectorised check and its slow obvious twin, which tests compare. Text stops are the gateway's.
"""

from enum import Enum

import numpy as np

from wire.messages import Sampling
from worker.rows import Rows


class TokenVerdict(Enum):
    """What one token does to its output."""

    GOES_ON = 0
    STOPS = 1
    FILLS = 2  # the last one that fits


def stop_ids(sampling: Sampling, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens that end an output of this sampling, sorted."""
    return tuple(sorted({*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}))


def find_ends(rows: Rows, slots_N: np.ndarray, tokens_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bool [N] twice: stopped by the token just appended to the row, and ended at all (stopped, or full)."""
    num_known_N = rows.num_known_S[slots_N]
    is_stop_N = (rows.stops_KS.take(slots_N, axis=1) == tokens_N).any(axis=0)
    is_stop_N &= num_known_N > rows.first_stop_S[slots_N]
    return is_stop_N, is_stop_N | (num_known_N >= rows.limit_S[slots_N])


def judge(
    sampling: Sampling, eos_token_ids: tuple[int, ...], *, num_prompt_tokens: int, output: list[int], limit: int
) -> TokenVerdict:
    """The twin: what the last token of ``output`` does. limit: tokens of prompt and output."""
    is_stop = output[-1] in sampling.stop_token_ids or (not sampling.ignore_eos and output[-1] in eos_token_ids)
    if is_stop and len(output) > sampling.min_tokens:
        return TokenVerdict.STOPS
    return TokenVerdict.FILLS if num_prompt_tokens + len(output) >= limit else TokenVerdict.GOES_ON
