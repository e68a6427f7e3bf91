"""The one copy to the device that a step may have: changes of the rows, and the inputs of a mixed step.

    | header | payload (inputs of a mixed step) | indices and values of changed rows |      int32 words

The host's buffers are pinned and used in turn: a buffer is written again only when the step that it was sent for has
been collected. The device has one, which the stream's order protects. A step that has nothing to send copies nothing:
the header's count was set to zero by the kernel that read it (model/kernels/row_changes.py).

Legend: U words of the upload · C changes.
"""

import numpy as np
import torch

from model.kernels.row_changes import HEADER_WORDS
from worker.cuda_changes import RowChanges


class Upload:
    """device_U: int32 on the device; the payload begins at HEADER_WORDS.

    num_payload: words of the largest payload. num_buffers: steps that may be in flight.
    """

    def __init__(self, changes: RowChanges, *, num_payload: int, num_buffers: int, device: torch.device) -> None:
        num_words = HEADER_WORDS + num_payload + 2 * changes.layout.num_words
        is_pinned = device.type == "cuda"
        self.device_U = torch.zeros(num_words, dtype=torch.int32, device=device)
        self._changes = changes
        self._buffers = [torch.zeros(num_words, dtype=torch.int32, pin_memory=is_pinned) for _ in range(num_buffers)]
        self._arrays = [buffer.numpy() for buffer in self._buffers]
        self._turn = 0

    def payload(self, num_words: int) -> np.ndarray:
        """int32 view of the present buffer, to be filled before `send`; holds stale words."""
        return self._arrays[self._turn][HEADER_WORDS : HEADER_WORDS + num_words]

    def send(self, num_payload: int) -> None:
        """Enqueue the copy of the payload and of all pending changes; nothing where there are neither. The next step
        gets the next buffer."""
        changed = self._changes.take()
        if changed is None and not num_payload:
            return
        array, first = self._arrays[self._turn], HEADER_WORDS + num_payload
        count = 0 if changed is None else len(changed[0])
        array[0], array[1] = count, first
        if changed is not None:
            array[first : first + count], array[first + count : first + 2 * count] = changed
        num_words = first + 2 * count
        self.device_U[:num_words].copy_(self._buffers[self._turn][:num_words], non_blocking=True)
        self._turn = (self._turn + 1) % len(self._buffers)
