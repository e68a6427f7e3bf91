"""How a step's tokens come back: a copy behind the step into pinned memory, and an event to wait for.

The copy is in the step's own stream. A side stream would have to be waited for before the next step may overwrite the
result, which costs the device more than these few hundred bytes (two events against about two microseconds).

Legend: B rows of the step.
"""

import numpy as np
import torch

from model.gpu.decode_step import RESULT_BYTES


class Results:
    """Buffers used in turn, one for each step in flight.

    result: uint8 on the device, max_batch tokens (int32) and as many flags (int8).
    """

    def __init__(self, result: torch.Tensor, *, num_buffers: int) -> None:
        self._result = result
        self._max_batch = len(result) // RESULT_BYTES
        is_cuda = result.is_cuda
        self._buffers = [torch.zeros_like(result, device="cpu", pin_memory=is_cuda) for _ in range(num_buffers)]
        self._arrays = [buffer.numpy() for buffer in self._buffers]
        self._events = [torch.cuda.Event() for _ in range(num_buffers)] if is_cuda else []
        self._turn = 0

    def send(self) -> int:
        """Enqueue the copy of the whole result; returns what to `wait` for."""
        turn = self._turn
        self._buffers[turn].copy_(self._result, non_blocking=True)
        if self._events:
            self._events[turn].record()
        self._turn = (turn + 1) % len(self._buffers)
        return turn

    def wait(self, turn: int) -> tuple[np.ndarray, np.ndarray]:
        """Wait for that copy: tokens_B (int32) and is_finite_B (bool), views that the next step but one overwrites."""
        if self._events:
            self._events[turn].synchronize()
        array = self._arrays[turn]
        return array[: 4 * self._max_batch].view(np.int32), array[4 * self._max_batch :].view(np.bool_)
