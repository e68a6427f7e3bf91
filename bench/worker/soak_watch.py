"""Samples of a long run, and whether memory grew: a straight line through the samples, with its 95 % interval.

Must not know: requests, the runner.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch

from bench.in_process import InProcess

WARM_UP = 0.2  # of the samples: pools and caches fill in the beginning


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Of one moment. Bytes; cuda_used: by everybody on the device. violations: what the block manager's audit found."""

    at_s: float
    rss: int
    cuda_allocated: int
    cuda_reserved: int
    cuda_used: int
    num_free: int
    num_cached: int
    num_active: int
    num_preemptions: int
    num_hit_tokens: int
    num_tokens: int
    num_steps: int
    violations: tuple[str, ...]


def sample(engine: InProcess, at_s: float) -> Sample:
    """Now. The audit recounts every block."""
    on_cuda = torch.cuda.is_available()
    free, total = torch.cuda.mem_get_info() if on_cuda else (0, 0)
    return Sample(
        at_s=at_s,
        rss=psutil.Process().memory_info().rss,
        cuda_allocated=torch.cuda.memory_allocated() if on_cuda else 0,
        cuda_reserved=torch.cuda.memory_reserved() if on_cuda else 0,
        cuda_used=total - free,
        num_free=engine.blocks.num_free,
        num_cached=engine.blocks.num_cached,
        num_active=engine.blocks.num_active,
        num_preemptions=engine.scheduler.counters.num_preemptions,
        num_hit_tokens=engine.blocks.num_hit_tokens,
        num_tokens=engine.mail.num_tokens,
        num_steps=engine.engine.num_steps,
        violations=engine.blocks.audit().violations,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Slope:
    """KiB a minute, the half width of its 95 % interval, and the mean of the samples."""

    kib_per_minute: float
    half_width: float

    level_kib: float

    @property
    def is_flat(self) -> bool:
        """Zero lies in the interval, or what grows is less than a thousandth of the whole a minute: allocators go on
        finding a better place for something for a long time."""
        return self.kib_per_minute - self.half_width <= self.level_kib / 1000


def slope(samples: list[Sample], column: str) -> Slope:
    """Of the least squares line, without the warm-up. Raises ValueError for fewer than four samples."""
    kept = samples[int(len(samples) * WARM_UP) :]
    count = len(kept)
    if count < 4:
        raise ValueError(f"{len(samples)} samples are too few for a slope")
    x = [each.at_s / 60 for each in kept]
    y = [getattr(each, column) / 1024 for each in kept]
    mean_x, mean_y = sum(x) / count, sum(y) / count
    spread = sum((each - mean_x) ** 2 for each in x)
    per_minute = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    rest = sum((b - mean_y - per_minute * (a - mean_x)) ** 2 for a, b in zip(x, y, strict=True))
    error = math.sqrt(rest / (count - 2) / spread)
    return Slope(kib_per_minute=per_minute, half_width=2.1 * error, level_kib=mean_y)


def slopes(samples: list[Sample]) -> dict[str, dict[str, Any]]:
    """Of this process's columns of bytes."""
    columns = ("rss", "cuda_allocated", "cuda_reserved")
    found = {column: slope(samples, column) for column in columns}
    return {column: {**asdict(each), "is_flat": each.is_flat} for column, each in found.items()}
