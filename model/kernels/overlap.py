"""How the kernels of a step overlap on the device.

With few rows a step only reads weights, and what is left to save is the time between one kernel's last byte and the
next one's first. So an overlapping kernel first signals that its successor may start, then requests its weights, and
only then waits for its predecessor's results (programmatic dependent launch, CUDA's guide §4.5). Before the wait it may
read weights, and anything that no kernel of the step writes before sampling: positions, tables, and tokens that earlier
steps cached. This is safe because a step's first kernel is launched normally, after all earlier work, and because every
program with work to do waits and every kernel has such a program: a kernel only ends after all its predecessors have.

    previous   |---- run ----|
    this one        |launch| weights ... |wait| run |

Must not know: any particular kernel.
"""

from enum import Enum
from functools import cache

import torch
import triton
import triton.language as tl


class Overlap(Enum):
    """Whether a kernel may start before its predecessor has ended."""

    NONE = False
    DEPENDENT = True

    @classmethod
    def on(cls, tensor: torch.Tensor) -> "Overlap":
        """What the tensor's device supports: dependent launch needs compute capability 9.0."""
        return cls(tensor.is_cuda and _capability(tensor.device) >= (9, 0))


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@triton.jit
def start_next(PDL: tl.constexpr):
    """Allow the next kernel to be launched. To be called first."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until the previous kernel's results are visible."""
    if PDL:
        tl.extra.cuda.gdc_wait()
