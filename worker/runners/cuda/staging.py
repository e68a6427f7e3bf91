"""The one copy to the device that a step may have: changes of the rows, and the inputs of a mixed step.

    | header | payload (inputs of a mixed step) | indices and values of changed rows |      int32 words

The host's buffers are pinned and used in turn: a buffer is written again only when the step that it was sent for has
been collected. The device has one, which the stream's order protects. A step that has nothing to send copies nothing:
the header's count was set to zero by the kernel that read it (model/kernels/row_changes.py).

Legend: U words of the upload · C changes.
"""

from collections.abc import Mapping

import numpy as np
import torch

from octavo.model.gpu.sampling_state import DeviceMasks
from octavo.model.gpu.state import SAMPLING_COLUMNS, RowLayout
from octavo.model.kernels.row_changes import HEADER_WORDS
from octavo.model.kernels.sampling.mask import num_words
from octavo.worker.scheduler.plan import NewRequest

# What the host changed in the rows' state and has not sent yet, with the host's copy of what it last wrote.
#
# The state's layout is model/gpu/state.py's. The copy is right for what only the host writes (tables, sampling, the
# batch); tokens and positions move on the device without it. Of a word that changes twice the last value is sent twice,
# so the order of arrival does not matter.
#
# Legend: R rows · M table width · U updates · A rows of a batch · W words of the state · C changes.


NO_BLOCK = -1  # in the host's table only: the device keeps what it had, and nothing reads it


# The way of a step's masks to the device: one pinned copy of the rows concerned.
#
#     | column x N, filled up | words of row 0 | words of row 1 | ...        int32 words
#
# The host's buffers are used in turn, as in worker/runners/cuda/staging.py; the device has one, which the stream's
# order protects.
#
# Legend: N masked rows of a step · W words of a mask.


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


class RowChanges:
    """Filled by a plan, emptied by the upload. All numpy; views of one int32 buffer."""

    def __init__(self, layout: RowLayout) -> None:
        self.layout = layout
        self.words_W = np.zeros(layout.num_words, np.int32)
        R, M = layout.num_rows, layout.table_width
        self.scratch_row = R - 1
        self.table_RM = self.words_W[layout.table : layout.table + R * M].reshape(R, M)
        self.table_RM[:] = NO_BLOCK
        self._batch_A = self.words_W[layout.batch : layout.batch + layout.max_batch]
        self._batch_A[:] = self.scratch_row
        self._seed_R = self.words_W[layout.seed : layout.seed + 2 * R].view(np.uint64)
        self._temperature_R = self.words_W[layout.temperature : layout.temperature + R].view(np.float32)
        self._sampling = {name: self._column(name).view(dtype) for name, dtype in SAMPLING_COLUMNS.items()}
        single = [layout.last_token, layout.position, layout.num_prompt, layout.temperature, *layout.sampling.values()]
        self._places_of_join = np.asarray([*single, layout.seed, layout.seed + 1], np.int32)
        self._strides_of_join = np.asarray([1] * len(single) + [2, 2], np.int32)
        self._pending: list[np.ndarray] = []

    def join(self, join: NewRequest, sampling: Mapping[str, float]) -> None:
        """The row stands before its last known token, with an empty table. sampling: by name of SAMPLING_COLUMNS."""
        slot, words_W, layout = join.slot, self.words_W, self.layout
        self.table_RM[slot] = NO_BLOCK
        self._seed_R[slot] = np.uint64(join.sampling.seed & 0xFFFF_FFFF_FFFF_FFFF)
        self._temperature_R[slot] = 0.0 if sampling["method"] else join.sampling.temperature
        words_W[layout.last_token + slot] = join.token_ids_T[-1]
        words_W[layout.position + slot] = len(join.token_ids_T) - 1
        words_W[layout.num_prompt + slot] = join.num_prompt_tokens
        for name, column_R in self._sampling.items():
            column_R[slot] = sampling[name]
        self._pending.append(self._places_of_join + slot * self._strides_of_join)

    def _column(self, name: str) -> np.ndarray:
        start = self.layout.sampling[name]
        return self.words_W[start : start + self.layout.num_rows]

    def put_blocks(self, updates_U3: np.ndarray) -> None:
        """int32 (slot, column, block), in order."""
        if len(updates_U3):
            slot_U, column_U, block_U = updates_U3.T
            self.table_RM[slot_U, column_U] = block_U
            self._pending.append(self.layout.table + slot_U * self.layout.table_width + column_U)

    def set_batch(self, slots_S: np.ndarray, size: int) -> None:
        """The first `size` rows of the batch are these slots (int32), then scratch; only what differs is sent."""
        batch_A = self._batch_A[:size]
        num_rows = len(slots_S)
        if (batch_A[:num_rows] == slots_S).all() and (batch_A[num_rows:] == self.scratch_row).all():
            return
        wanted_A = np.full(size, self.scratch_row, np.int32)
        wanted_A[:num_rows] = slots_S
        differs_C = np.flatnonzero(batch_A != wanted_A).astype(np.int32)
        batch_A[differs_C] = wanted_A[differs_C]
        self._pending.append(self.layout.batch + differs_C)

    def take(self) -> tuple[np.ndarray, np.ndarray] | None:
        """int32 indices and values of everything that changed, None where nothing did."""
        if not self._pending:
            return None
        index_C = self._pending[0] if len(self._pending) == 1 else np.concatenate(self._pending)
        if len(index_C) > self.layout.num_words:
            index_C = np.unique(index_C)
        self._pending.clear()
        return index_C, self.words_W[index_C]


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
