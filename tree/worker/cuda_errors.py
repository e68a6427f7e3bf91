"""What becomes of an error in a step on a CUDA device: the step's own, or the end of the process.

After an illegal access, a device-side assertion or a lost device every further call fails with the same error: the
context is gone and only a new process gets another one.
"""

import torch

from worker.runner import RunnerError, RunnerOutOfMemory
from worker.torch_runner import as_runner_error


class DeviceLost(Exception):
    """The CUDA context is unusable. Not a RunnerError on purpose: the engine must end, and its supervisor start it
    again."""


def runner_error(error: Exception, device: torch.device) -> RunnerError:
    """The error for the step, where the device still works; frees what the allocator hoards after a lack of memory.
    Raises DeviceLost where it does not."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as dead:
            raise DeviceLost(f"the CUDA device no longer answers: {error}") from dead
    wrapped = as_runner_error(error)
    if isinstance(wrapped, RunnerOutOfMemory) and device.type == "cuda":
        torch.cuda.empty_cache()
    return wrapped
