"""Where the device's time goes: the kernels of some work, by torch's profiler.

Must not know: models, steps.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """total_us: of all its launches together."""

    name: str
    total_us: float
    num_launches: int


def kernels_of(work: Callable[[], object]) -> list[Kernel]:
    """Those that the work launches, the one with most time first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        work()
        torch.cuda.synchronize()
    kernels = [
        Kernel(name=event.key, total_us=event.device_time_total, num_launches=event.count)
        for event in found.key_averages()
    ]
    return sorted(kernels, key=lambda kernel: -kernel.total_us)
