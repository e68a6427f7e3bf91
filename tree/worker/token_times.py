"""When the tokens of an output came, and what a request's blocks cost: kept as it goes for next to nothing, added up at
the end.

A time is a **tick**: a microsecond of the engine's clock in 32 bits. It wraps after 71 minutes, and so do differences:
no gap between two tokens is that long. Knows no requests.

Shapes: T tokens of one output · G gaps
"""

import numpy as np

TICKS_PER_S = 1_000_000
NO_TICKS = np.empty(0, np.uint32)


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
    if len(firsts):
        ages = np.uint32(tick(now_s)) - ticks_T[firsts]
        seconds += float(ages.sum(dtype=np.float64)) / TICKS_PER_S
    return seconds
