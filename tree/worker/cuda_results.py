"""How a step's tokens come back: a copy behind the step into pinned memory, and an event to wait for.

The copy is in the step's own stream. A side stream would have to be waited for before the next step may overwrite the
result, which costs the device more than these few hundred bytes (two events against about two microseconds).

Legend: B rows of the step · X words of a row's log-probabilities (model/kernels/logprobs.py).
"""

from dataclasses import dataclass

import numpy as np
import torch

from model.gpu.decode_step import RESULT_BYTES
from model.kernels.filter_sample import EXHAUSTED

_FINITE = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Landed:
    """Of every row of the step as it was run: token_B (int32), is_finite_B and is_exhausted_B (bool; new arrays),
    answer_BX (int32). Views are overwritten by the next step but one."""

    token_B: np.ndarray
    is_finite_B: np.ndarray
    is_exhausted_B: np.ndarray
    answer_BX: np.ndarray


class Results:
    """Buffers used in turn, one for each step in flight.

    result: uint8 on the device, max_batch tokens (int32) and as many flags (int8). answer_BX: int32 on the device.
    """

    def __init__(self, result: torch.Tensor, answer_BX: torch.Tensor, *, num_buffers: int) -> None:
        self._result, self._answer_BX = result, answer_BX
        self._max_batch = len(result) // RESULT_BYTES
        is_cuda = result.is_cuda
        self._buffers = [torch.zeros_like(result, device="cpu", pin_memory=is_cuda) for _ in range(num_buffers)]
        self._answers = [torch.zeros_like(answer_BX, device="cpu", pin_memory=is_cuda) for _ in range(num_buffers)]
        self._events = [torch.cuda.Event() for _ in range(num_buffers)] if is_cuda else []
        self._turn = 0

    def send(self, *, num_answers: int) -> int:
        """Enqueue the copy of the result and of the first rows' log-probabilities; returns what to `wait` for."""
        turn = self._turn
        self._buffers[turn].copy_(self._result, non_blocking=True)
        if num_answers:
            self._answers[turn][:num_answers].copy_(self._answer_BX[:num_answers], non_blocking=True)
        if self._events:
            self._events[turn].record()
        self._turn = (turn + 1) % len(self._buffers)
        return turn

    def wait(self, turn: int) -> Landed:
        """Wait for that copy."""
        if self._events:
            self._events[turn].synchronize()
        array = self._buffers[turn].numpy()
        flags_B = array[4 * self._max_batch :]
        return Landed(
            token_B=array[: 4 * self._max_batch].view(np.int32),
            is_finite_B=(flags_B & _FINITE).view(np.bool_),
            is_exhausted_B=(flags_B & EXHAUSTED) != 0,
            answer_BX=self._answers[turn].numpy(),
        )
