"""Two kernels with a planted mistake each: a checker must find them.

    python -m bench.gpu.sanitize.planted memcheck|racecheck

memcheck: a store behind the end of an allocation (triton). racecheck: two warps that exchange numbers through shared
memory without a barrier (CUDA C, compiled by torch). Prints and writes nothing: what the checker says is the result
(`bench.gpu.sanitize` runs it under each).
"""

import argparse

import torch
import triton
import triton.language as tl

from bench.gpu.device import need_cuda

RACE = """
extern "C" __global__ void planted_race(float *out) {
    __shared__ float shared[64];
    shared[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = shared[63 - threadIdx.x];
}
"""


@triton.jit  # type: ignore[untyped-decorator]
def _store_behind_the_end_kernel(out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, BLOCK)
    tl.store(out + i, i.to(tl.float32), mask=i <= count)


def plant_memcheck() -> None:
    """Store far beyond the end, since allocations are rounded up."""
    out = torch.zeros(64, device="cuda")
    _store_behind_the_end_kernel[(1,)](out, 1 << 16, BLOCK=1 << 17)


def plant_racecheck() -> None:
    """The exchange without a barrier."""
    kernel = torch.cuda._compile_kernel(RACE, "planted_race")
    kernel(grid=(1, 1, 1), block=(64, 1, 1), args=[torch.zeros(64, device="cuda")])


PLANTED = {"memcheck": plant_memcheck, "racecheck": plant_racecheck}


def main() -> None:
    """Launch the kernel that the tool must find."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", choices=PLANTED)
    arguments = parser.parse_args()
    need_cuda()
    PLANTED[arguments.tool]()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
