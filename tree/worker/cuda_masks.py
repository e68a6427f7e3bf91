"""The way of a step's masks to the device: one pinned copy of the rows concerned.

    | column x N, filled up | words of row 0 | words of row 1 | ...        int32 words

The host's buffers are used in turn, as in worker/cuda_upload.py; the device has one, which the stream's order protects.

Legend: N masked rows of a step · W words of a mask.
"""

import numpy as np
import torch

from model.gpu.wishes import DeviceMasks
from model.kernels.mask import num_words

_ALIGNMENT_WORDS = 32  # a kernel is compiled anew for pointers of another alignment


class MaskUpload:
    """max_rows: masked rows of one step. num_buffers: steps that may be in flight."""

    def __init__(self, *, max_rows: int, vocab_size: int, num_buffers: int, device: torch.device) -> None:
        self._words = num_words(vocab_size)
        size = _aligned(max_rows) + max_rows * self._words
        is_pinned = device.type == "cuda"
        self._device_U = torch.zeros(size, dtype=torch.int32, device=device)
        self._buffers = [torch.zeros(size, dtype=torch.int32, pin_memory=is_pinned) for _ in range(num_buffers)]
        self._turn = 0

    def send(self, column_N: np.ndarray, bits_NW: np.ndarray) -> DeviceMasks:
        """Enqueue the copy. column_N: rows of the batch as it was run. bits_NW: int32, at least as wide as a mask."""
        N, buffer = len(column_N), self._buffers[self._turn]
        first, array = _aligned(N), buffer.numpy()
        end = first + N * self._words
        array[:N] = column_N
        array[first:end].reshape(N, self._words)[:] = bits_NW[:, : self._words]
        self._device_U[:end].copy_(buffer[:end], non_blocking=True)
        self._turn = (self._turn + 1) % len(self._buffers)
        return DeviceMasks(column_N=self._device_U[:N], mask_NW=self._device_U[first:end].view(N, self._words))


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT_WORDS) * _ALIGNMENT_WORDS
