"""Measures what this CPU can do at best: bytes read per second, from small and from huge pages, and arithmetic per
second in the types that matrices are multiplied in. OCTAVO_CPU_ISA limits it (if set before torch is imported).

Must not know: models, sides. With the processor's clock, use one thread: time that others take is then not counted.
"""

import mmap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from bench.cpu.workloads import Clock

READ_BYTES = 1 << 30  # far beyond any cache
ROWS, SIZE = 512, 2048  # of a product: large enough for every kernel
TURNS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """GB/s and GFLOP/s (for int8 GOP/s, as torch multiplies them), the best of a few turns. huge_gb_s None: the system
    provides no huge pages. products: by type, without types that torch cannot multiply here."""

    read_gb_s: float
    huge_gb_s: float | None
    products: dict[str, float]


def measure_limits(clock: Clock, *, read_bytes: int = READ_BYTES, size: int = SIZE) -> Limits:
    """Measure the limits, with some seconds of work on all of torch's threads."""
    huge = getattr(mmap, "MADV_HUGEPAGE", None)
    return Limits(
        read_gb_s=_read_gb_s(clock, read_bytes, getattr(mmap, "MADV_NOHUGEPAGE", None)),
        huge_gb_s=None if huge is None else _read_gb_s(clock, read_bytes, huge),
        products=_products(clock, size),
    )


def _read_gb_s(clock: Clock, num_bytes: int, advice: int | None) -> float:
    memory = mmap.mmap(-1, num_bytes)
    with suppress(OSError):  # a kernel without huge pages
        if advice is not None:
            memory.madvise(advice)
    words = torch.from_numpy(np.frombuffer(memory, np.int64))
    words.fill_(1)
    return num_bytes / _best_s(clock, words.sum) / 1e9


def _products(clock: Clock, size: int) -> dict[str, float]:
    generator, flop = torch.Generator().manual_seed(0), 2.0 * ROWS * size * size
    a, b = (torch.randn(rows, size, generator=generator) for rows in (ROWS, size))
    found = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        x, weight = a.to(dtype), b.to(dtype)
        found[name] = flop / _best_s(clock, partial(torch.nn.functional.linear, x, weight)) / 1e9
    x, weight = (each.mul(40).clamp(-127, 127).to(torch.int8) for each in (a, b))
    with suppress(RuntimeError, NotImplementedError):
        found["int8"] = flop / _best_s(clock, lambda: torch._int_mm(x, weight.T)) / 1e9
    return found


def _best_s(clock: Clock, work: Callable[[], object]) -> float:
    work()
    found = []
    for _ in range(TURNS):
        start_s = clock()
        work()
        found.append(clock() - start_s)
    return min(found)
