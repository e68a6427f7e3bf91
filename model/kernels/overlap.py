"""How kernels of a step overlap on the device.

At few rows a step only reads weights, and the time between one kernel's last byte and the next one's first is what is
left to save. So a kernel that overlaps says at once that its successor may start, asks for its weights, and only then
waits for its predecessor's results (programmatic dependent launch, CUDA's guide §4.5). Before the wait it may read
weights, and what no kernel of the step writes before sampling: positions and tables, and cached tokens of former steps.
That holds because a step's first kernel is launched the ordinary way, behind everything older; and each program that
has something to do waits, and each kernel has one, so that a kernel that has ended has seen all its predecessors end.

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
        """What the tensor's device can do: dependent launch needs compute capability 9.0."""
        return cls(tensor.is_cuda and _capability(tensor.device) >= (9, 0))


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@triton.jit
def start_next(PDL: tl.constexpr):
    """First of all: the next kernel may be launched."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Until the previous kernel's results are there."""
    if PDL:
        tl.extra.cuda.gdc_wait()
