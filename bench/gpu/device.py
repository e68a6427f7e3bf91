"""The CUDA device that is measured: whether there is one, how fast it copies, its memory given back.

Must not know: models, steps.
"""

import gc
import statistics

import torch

from bench.gpu.clock import elapsed_ms


def need_cuda() -> None:
    """Raises SystemExit with one line where this machine has no CUDA device."""
    if not torch.cuda.is_available():
        raise SystemExit("error: this measures a CUDA device, and torch finds none here")


def copy_rate() -> float:
    """Bytes a second of a copy of 1 GiB on the device, read and written bytes counted."""
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    ms = statistics.median(elapsed_ms(lambda: target.copy_(source), 5) for _ in range(5))
    return 2 * source.numel() * source.element_size() / (ms / 1e3)


def free_memory() -> None:
    """Give back what nobody refers to any more, frozen objects among it."""
    gc.unfreeze()
    gc.collect()
    torch.cuda.empty_cache()
