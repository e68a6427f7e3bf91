"""Which cuts, tiles and limits make whole steps fastest: one thing is varied at a time, inside the recorded step.

    python -m bench.gpu_sweep [--shape 0.5B] narrow attention split sampler prefill profile

A kernel timed alone misleads: it neither overlaps with its neighbours nor shares the cache with them.
Prints milliseconds of every variant; what is best goes into the code by hand.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch

from bench.gpu.device import need_cuda
from bench.gpu.kernels import kernels_of
from bench.gpu.steps import Bench, time_prefill
from bench.gpu.sweeps.attention import sweep_attention, sweep_prefill
from bench.gpu.sweeps.narrow import sweep_narrow, sweep_paths
from bench.gpu.sweeps.sampler import sweep_sampler
from bench.gpu.sweeps.split import sweep_split
from bench.gpu_step import profile
from bench.shapes import PUBLISHED


def profile_all(bench: Bench) -> None:
    """Kernels of some steps and of a prefill."""
    for batch, context in ((1, 256), (256, 560)):
        profile(bench, batch, context)
    for prompts, length in ((1, 8192), (8, 2048)):
        kernels = kernels_of(partial(time_prefill, bench, prompts, length))
        print(f"-- kernels of prefills {prompts} x {length}, percent")
        total_us = sum(kernel.total_us for kernel in kernels)
        for kernel in kernels[:14]:
            print(f"  {kernel.total_us / total_us:6.1%} {kernel.num_launches:6d} x  {kernel.name[:90]}")


SWEEPS: dict[str, Callable[[Bench], None]] = {
    "narrow": sweep_narrow, "attention": sweep_attention, "sampler": sweep_sampler, "prefill": sweep_prefill,
    "profile": profile_all, "paths": sweep_paths, "split": sweep_split,
}  # fmt: skip


def main() -> None:
    """Run the sweeps that were named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=PUBLISHED, default="0.5B")
    parser.add_argument("sweeps", nargs="+", choices=SWEEPS)
    arguments = parser.parse_args()
    need_cuda()
    bench = Bench(arguments.shape, pool_tokens=660_000)
    for name in arguments.sweeps:
        SWEEPS[name](bench)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
