"""Two kernels with a planted mistake each, for whoever wants to know whether a checker would find one.

    python -m bench.gpu_planted memcheck|racecheck

memcheck: a store behind the end of an allocation (triton). racecheck: two warps that exchange numbers through shared
memory without a barrier (CUDA C, compiled by torch).
"""

import sys

import torch
import triton
import triton.language as tl

RACE = """
extern "C" __global__ void planted_race(float *out) {
    __shared__ float shared[64];
    shared[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = shared[63 - threadIdx.x];
}
"""


@triton.jit
def _store_behind_the_end_kernel(out, count, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, i.to(tl.float32), mask=i <= count)


def plant(tool: str) -> None:
    """Launch the kernel that the tool must find."""
    out = torch.zeros(64, device="cuda")
    if tool == "memcheck":
        # Far behind the end: allocations are rounded up.
        _store_behind_the_end_kernel[(1,)](out, 1 << 16, BLOCK=1 << 17)
    else:
        kernel = torch.cuda._compile_kernel(RACE, "planted_race")
        kernel(grid=(1, 1, 1), block=(64, 1, 1), args=[out])
    torch.cuda.synchronize()


if __name__ == "__main__":
    plant(sys.argv[1])
