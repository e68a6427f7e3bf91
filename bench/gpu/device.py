"""The CUDA device that is measured: whether there is one, timing by its events, its copy rates, its memory, and kernels
by time.

Must not know: models, steps.
"""

import gc
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch


def elapsed_ms(run: Callable[[], object], count: int) -> float:
    """Milliseconds per call, by CUDA events."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(count):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / count


def need_cuda() -> None:
    """Raises SystemExit with one line if this machine has no CUDA device."""
    if not torch.cuda.is_available():
        raise SystemExit("error: this measures a CUDA device, and torch finds none here")


def copy_rate() -> float:
    """Bytes per second of copying 1 GiB on the device, counting both read and written bytes."""
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    ms = statistics.median(elapsed_ms(lambda: target.copy_(source), 5) for _ in range(5))
    return 2 * source.numel() * source.element_size() / (ms / 1e3)


def host_copy_rates() -> tuple[float, float]:
    """Bytes per second of a plain copy of 256 MiB to pinned host memory, and back."""
    on_device = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    pinned = torch.empty_like(on_device, device="cpu", pin_memory=True)
    pinned.copy_(on_device)
    out_ms = elapsed_ms(lambda: pinned.copy_(on_device, non_blocking=True), 8)
    in_ms = elapsed_ms(lambda: on_device.copy_(pinned, non_blocking=True), 8)
    return 1e3 * pinned.numel() / out_ms, 1e3 * pinned.numel() / in_ms


def free_memory() -> None:
    """Free memory that nothing refers to any more, also that of frozen objects."""
    gc.unfreeze()
    gc.collect()
    torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel. total_us: of all its launches together."""

    name: str
    total_us: float
    num_launches: int


def kernels_of(work: Callable[[], object]) -> list[Kernel]:
    """The kernels that the work launches, the one that takes most time first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        work()
        torch.cuda.synchronize()
    kernels = [
        Kernel(name=event.key, total_us=event.device_time_total, num_launches=event.count)
        for event in found.key_averages()
    ]
    return sorted(kernels, key=lambda kernel: -kernel.total_us)
