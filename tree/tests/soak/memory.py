"""Whether processes grow: one slope over all lives of processes of a kind, with its 95 % interval.

A life is what one process id saw. Each has a level of its own (fixed effects), so that a restart is no jump; the line's
slope is common to all. The interval allows for samples that resemble their neighbours (Newey and West, 1987). Pure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MIB = 1 << 20
MIN_SAMPLES_OF_A_LIFE = 3
FLAT_SHARE_PER_H = 0.06  # of the level: allocators go on finding a better place for something for a long time
NORMAL_95 = 1.96


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Of one process, when nothing ran. at_s: of the soak; age_s: of the process."""

    role: str
    pid: int
    at_s: float
    age_s: float
    rss_bytes: int
    num_fds: int
    num_threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Slope:
    """MiB an hour, half the width of its interval, and what it was found from. level_mib: the mean."""

    mib_per_h: float
    half_width: float
    level_mib: float
    num_lives: int
    num_samples: int

    @property
    def is_flat(self) -> bool:
        """Whether zero lies in the interval, or all of it below what allocators do."""
        return self.mib_per_h - self.half_width <= max(0.0, FLAT_SHARE_PER_H * self.level_mib)

    def __str__(self) -> str:
        return f"{self.mib_per_h:+.1f} ± {self.half_width:.1f}"


def slope(samples: Sequence[Sample], role: str, *, warm_up_s: float) -> Slope | None:
    """Of processes of that role, each without its first warm_up_s; None where too few samples are left."""
    lives = [
        (np.array([each.at_s / 3600 for each in life]), np.array([each.rss_bytes / MIB for each in life]))
        for life in _lives(samples, role, warm_up_s)
        if len(life) >= MIN_SAMPLES_OF_A_LIFE
    ]
    count = sum(len(x) for x, _ in lives)
    if count < len(lives) + 3:
        return None
    centred = [(x - x.mean(), y - y.mean()) for x, y in lives]
    spread = sum(float(x @ x) for x, _ in centred)
    found = sum(float(x @ y) for x, y in centred) / spread
    variance = sum(_long_run(x * (y - found * x)) for x, y in centred) / spread**2
    correction = count / (count - len(lives) - 1)
    return Slope(
        mib_per_h=found,
        half_width=NORMAL_95 * math.sqrt(variance * correction),
        level_mib=float(np.concatenate([y for _, y in lives]).mean()),
        num_lives=len(lives),
        num_samples=count,
    )


def _lives(samples: Sequence[Sample], role: str, warm_up_s: float) -> list[list[Sample]]:
    found: dict[int, list[Sample]] = {}
    for each in samples:
        if each.role == role and each.age_s >= warm_up_s:
            found.setdefault(each.pid, []).append(each)
    return list(found.values())


def _long_run(scores_T: np.ndarray) -> float:
    """The variance of the sum of one life's scores; neighbours count with weights that fall to nothing."""
    num_lags = min(len(scores_T) - 1, math.ceil(4 * (len(scores_T) / 100) ** (2 / 9)))
    total = float(scores_T @ scores_T)
    for lag in range(1, num_lags + 1):
        total += 2 * (1 - lag / (num_lags + 1)) * float(scores_T[lag:] @ scores_T[:-lag])
    return max(total, 0.0)
