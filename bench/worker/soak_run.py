"""A soak of an engine in this process: load, cancels and a canary, sampled every ten seconds, and checks at the end.

Must not know: the device, the runner.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil
import torch

from bench.in_process import InProcess
from bench.worker.soak_load import Canary, Load
from octavo.worker.config import Deterministic

SAMPLE_S, CANARY_S = 10.0, 5.0
NEAR_TIE_NATS = 2 / 32  # two spacings of logits between 4 and 8 in bf16
GOOD_ENDS = {"LENGTH", "STOP", "CANCELLED"}
WARM_UP = 0.2  # share of the samples, while pools and caches fill


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A sample, in bytes. cuda_used: by all processes on the device. violations: found by the block manager's audit."""

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
    """A sample of now. The audit recounts every block."""
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
    """KiB per minute, the half width of the 95 % interval, and the mean of the samples."""

    kib_per_minute: float
    half_width: float

    level_kib: float

    @property
    def is_flat(self) -> bool:
        """Whether the interval's lower end is at most a thousandth of the mean per minute: allocators keep moving
        things for a long time."""
        return self.kib_per_minute - self.half_width <= self.level_kib / 1000


def slope(samples: list[Sample], column: str) -> Slope:
    """The slope of the least squares line, without the warm-up. Raises ValueError for fewer than four samples."""
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
    """The slopes of this process's byte columns."""
    columns = ("rss", "cuda_allocated", "cuda_reserved")
    found = {column: slope(samples, column) for column in columns}
    return {column: {**asdict(each), "is_flat": each.is_flat} for column, each in found.items()}


@dataclass(kw_only=True)
class Soak:
    """A run. samples: taken so far."""

    engine: InProcess
    load: Load
    canary: Canary
    clock: Callable[[], float]
    samples: list[Sample] = field(default_factory=list)

    def run(self, seconds: float) -> None:
        """Run under load for this long, then until everything requested has ended."""
        next_sample_s = next_canary_s = 0.0
        while self.clock() < seconds:
            self.load.fill_up()
            self.load.cancel_some()
            if self.clock() >= next_canary_s:
                self.canary.ask()
                next_canary_s = self.clock() + CANARY_S
            self._step()
            if self.clock() >= next_sample_s:
                self._look()
                next_sample_s = self.clock() + SAMPLE_S
        while self.load.open or self.canary.handle is not None:
            self._step()
        for _ in range(4):  # steps in flight that no request needs
            self._step()
        self._look()

    def _step(self) -> None:
        self.engine.step()
        self.load.take_ended()
        self.canary.take()

    def _look(self) -> None:
        now = sample(self.engine, self.clock())
        self.samples.append(now)
        print(
            f"{now.at_s:7.1f} s  {now.num_tokens:9d} tokens  {now.num_steps:7d} steps  "
            f"{self.load.ended.total():6d} ended  "
            f"{now.num_preemptions:5d} preempted  RSS {now.rss / 2**20:7.1f} MiB  "
            f"CUDA {now.cuda_allocated / 2**20:8.1f} MiB  blocks {now.num_free}/{now.num_cached}/{now.num_active}  "
            f"canary {self.canary.num_answers - len(self.canary.partings)}/{self.canary.num_answers}  "
            f"violations {len(now.violations)}",
            flush=True,
        )


def verdicts(soak: Soak, mode: Deterministic) -> dict[str, bool]:
    """The checks by name: whether each holds."""
    last, ended, partings = soak.samples[-1], soak.load.ended, soak.canary.partings
    found = {
        "audits clean": not any(each.violations for each in soak.samples),
        "no block held in the end": last.num_active == 0,
        "no row without finite logits": ended["NUMERICAL"] == 0,
        "no errors": set(ended) <= GOOD_ENDS and soak.canary.num_failed == 0,
        "answers of the right length": soak.load.num_mistakes == 0,
        "preemptions and hits happened": bool(last.num_preemptions and last.num_hit_tokens),
        "cancels happened": bool(ended["CANCELLED"]),
        "memory flat": all(each["is_flat"] for each in slopes(soak.samples[:-1]).values()),
    }
    if mode is Deterministic.ON:
        found["canary gave one answer"] = not partings
    else:
        found["canary parted at near-ties only"] = all(each.gap <= NEAR_TIE_NATS for each in partings)
    return found
