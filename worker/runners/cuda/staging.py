"""The one copy to the device that a step may have: changes of the rows, and the inputs of a mixed step; beside it the
masks of grammars.

    | header | payload (inputs of a mixed step) | indices and values of changed rows |      int32 words

The host's buffers are pinned and used in turn: a buffer is written again only when the step that it was sent for has
been collected. The device has one, which the stream's order protects. A step that has nothing to send copies nothing:
the header's count was set to zero by the kernel that read it (model/kernels/row_changes.py). Must not know: how steps
run, how tokens are chosen.

Legend: U words of a copy, or updates of a table · C changes · R rows · M table width · A rows of a batch · W words of
the state, of a mask, or tiles · T tokens · B decode rows · S sampled rows · E ends of chunks · N masked rows.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import torch

from octavo.model.gpu.mixed_step import MixedInputs
from octavo.model.gpu.sampling_state import DeviceMasks
from octavo.model.gpu.state import SAMPLING_COLUMNS, RowLayout
from octavo.model.kernels.attention.prefill import QUERY_TILE, list_last_tiles, list_tiles
from octavo.model.kernels.row_changes import HEADER_WORDS
from octavo.model.kernels.sampling.mask import num_words
from octavo.worker.scheduler.plan import NewRequest, Slot, StepPlan

_ALIGNMENT_WORDS = 4
DECODE_SIZES = (0, 8, 32, 64, 128, 256, 512, 1024)
TOKEN_SIZES = (16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
MAX_RECORDED_CHUNKS = 32
NO_BLOCK = -1  # in the host's table only: the device keeps what it had, and nothing reads it
_MASK_ALIGNMENT_WORDS = 32  # a kernel is compiled anew for pointers of another alignment


@dataclass(frozen=True, kw_only=True)
class MixedLayout:
    """How the inputs of a mixed step lie in the payload. num_decodes: B. num_ends: sampled rows beyond the decodes.

    A recorded step has a fixed shape: decode rows are filled up with scratch, chunk tokens with tokens of no row, tiles
    with empty ones, sampled rows with scratch. A step that fits no recorded shape has a layout of exactly its own size.

        tokens    |-- decode rows --|-- scratch --|--- chunk ---|--- chunk ---|-- of no row --|
        sampled   |-- decode rows --|-- scratch --|-- ended --|-- scratch --|
    """

    num_decodes: int
    num_chunk_tokens: int
    num_tiles: int
    num_ends: int

    @classmethod
    def exact(cls, plan: StepPlan) -> "MixedLayout":
        """No padding."""
        return cls(
            num_decodes=len(plan.decode_slots_S),
            num_chunk_tokens=sum(chunk.num_tokens for chunk in plan.prefill),
            num_tiles=sum(-(-chunk.num_tokens // QUERY_TILE) for chunk in plan.prefill),
            num_ends=sum(1 + len(chunk.forks) for chunk in plan.prefill if chunk.is_last),
        )

    @property
    def num_tokens(self) -> int:
        """T, including padding."""
        return self.num_decodes + self.num_chunk_tokens

    @cached_property
    def sections(self) -> dict[str, slice]:
        """Where each field of MixedInputs is in the payload, in words."""
        num_sampled = self.num_decodes + self.num_ends
        counts = {
            "ids_T": self.num_tokens, "row_T": self.num_tokens, "position_T": self.num_tokens,
            "tiles_W4": 4 * self.num_tiles, "last_tiles_W4": 4 * self.num_tiles, "last_S": num_sampled,
            "rows_S": num_sampled, "ended_E": self.num_ends, "position_E": self.num_ends,
        }  # fmt: skip
        sections, end = {}, 0
        for name, count in counts.items():
            sections[name] = slice(end, end + count)
            end += -(-count // _ALIGNMENT_WORDS) * _ALIGNMENT_WORDS
        return sections

    @cached_property
    def num_words(self) -> int:
        """Size of the whole payload."""
        return self.sections["position_E"].stop

    def inputs(self, payload_U: torch.Tensor) -> MixedInputs:
        """Views of the payload on the device."""
        views = {name: payload_U[section] for name, section in self.sections.items()}
        views |= {name: views[name].view(-1, 4) for name in ("tiles_W4", "last_tiles_W4")}
        return MixedInputs(num_decodes=self.num_decodes, **views)

    def fill(
        self,
        words_U: np.ndarray,
        plan: StepPlan,
        tokens_R: Sequence[np.ndarray],
        *,
        scratch_row: int,
        are_all_read: bool = False,
    ) -> None:
        """Write the plan, which must fit, into the payload. tokens_R: known tokens of each slot. are_all_read: whether
        hidden states of any token may be read after the step, and not only those of sampled rows."""
        words_U[:] = 0
        part = {name: words_U[section] for name, section in self.sections.items()}
        num_decodes = len(plan.decode_slots_S)
        part["ids_T"][: self.num_decodes] = -1
        part["row_T"][:num_decodes] = plan.decode_slots_S
        part["row_T"][num_decodes : self.num_decodes] = scratch_row
        part["row_T"][self.num_decodes :] = -1
        part["last_S"][:num_decodes] = np.arange(num_decodes)
        part["rows_S"][:] = scratch_row
        part["rows_S"][:num_decodes] = plan.decode_slots_S
        part["ended_E"][:] = scratch_row
        placed = self._fill_chunks(part, plan, tokens_R)
        ended = [place for place, chunk in zip(placed, plan.prefill, strict=True) if chunk.is_last]
        tiles_W4 = list_tiles(placed)
        last_tiles_W4 = tiles_W4 if are_all_read else list_last_tiles(ended)
        part["tiles_W4"][: tiles_W4.size] = tiles_W4.ravel()
        part["last_tiles_W4"][: last_tiles_W4.size] = last_tiles_W4.ravel()

    def _fill_chunks(
        self, part: dict[str, np.ndarray], plan: StepPlan, tokens_R: Sequence[np.ndarray]
    ) -> list[tuple[Slot, int, int, int]]:
        """Returns each chunk's slot, first token in the step, position of that token, and number of tokens."""
        token, num_ended, placed = self.num_decodes, 0, []
        for chunk in plan.prefill:
            start, stop, end = chunk.start, chunk.start + chunk.num_tokens, token + chunk.num_tokens
            part["ids_T"][token:end] = tokens_R[chunk.slot][start:stop]
            part["row_T"][token:end] = chunk.slot
            part["position_T"][token:end] = np.arange(start, stop)
            placed.append((chunk.slot, token, start, chunk.num_tokens))
            for slot in (chunk.slot, *chunk.forks) if chunk.is_last else ():
                part["last_S"][self.num_decodes + num_ended] = end - 1
                part["rows_S"][self.num_decodes + num_ended] = slot
                part["ended_E"][num_ended] = slot
                part["position_E"][num_ended] = stop - 1
                num_ended += 1
            token = end
        return placed


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedShapes:
    """The shapes recorded for a runner: every pair of these sizes."""

    decode_sizes: tuple[int, ...]
    token_sizes: tuple[int, ...]

    @classmethod
    def of(cls, *, max_slots: int, max_batch_tokens: int) -> "MixedShapes":
        """Up to all slots, and up to the largest token size, beyond which launching kernels is faster than
        computing."""
        decode_sizes = (*(size for size in DECODE_SIZES if size < max_slots), max_slots)
        largest = min(max_batch_tokens, TOKEN_SIZES[-1])
        token_sizes = (*(size for size in TOKEN_SIZES if size < largest), largest)
        return cls(decode_sizes=decode_sizes, token_sizes=token_sizes)

    @property
    def max_chunks(self) -> int:
        """A step with no more chunks, and no more tokens than the largest shape, fits one of the shapes."""
        return _num_chunks(self.token_sizes[-1])

    def layouts(self) -> list[MixedLayout]:
        """Largest first: smaller recordings reuse its memory."""
        sizes = [(tokens, decodes) for tokens in self.token_sizes for decodes in self.decode_sizes]
        return [_padded(decodes, tokens) for tokens, decodes in sorted(sizes, reverse=True)]

    def find(self, exact: MixedLayout, num_chunks: int) -> MixedLayout | None:
        """The smallest shape that a step of this layout and this many chunks fits into; None if there is none. Forks of
        a prompt end with it, so there may be more of them than chunks."""
        num_chunks = max(num_chunks, exact.num_ends)
        if exact.num_chunk_tokens > self.token_sizes[-1] or exact.num_decodes > self.decode_sizes[-1]:
            return None
        decodes = self.decode_sizes[bisect_left(self.decode_sizes, exact.num_decodes)]
        for tokens in self.token_sizes[bisect_left(self.token_sizes, exact.num_chunk_tokens) :]:
            if num_chunks <= _num_chunks(tokens):
                return _padded(decodes, tokens)
        return None


def _num_chunks(num_tokens: int) -> int:
    """How many chunks a recorded step with this many chunk tokens has room for."""
    return min(MAX_RECORDED_CHUNKS, max(2, num_tokens // 16))


@cache
def _padded(num_decodes: int, num_tokens: int) -> MixedLayout:
    """The layout of a recorded shape; one object for each, which knows its sections from the first time on."""
    num_chunks = _num_chunks(num_tokens)
    return MixedLayout(
        num_decodes=num_decodes,
        num_chunk_tokens=num_tokens,
        num_tiles=num_tokens // QUERY_TILE + num_chunks,
        num_ends=num_chunks,
    )


def worst_layout(*, max_slots: int, max_batch_tokens: int) -> MixedLayout:
    """A layout at least as large as that of any step, recorded or not, in every field."""
    return MixedLayout(
        num_decodes=max_slots,
        num_chunk_tokens=max_batch_tokens,
        num_tiles=max_batch_tokens // QUERY_TILE + max(max_slots, MAX_RECORDED_CHUNKS),
        num_ends=max(max_slots, MAX_RECORDED_CHUNKS),
    )


class MaskBuffer:
    """Sends the masks of a step to the device: one pinned copy of the rows concerned.

        | column x N, filled up | words of row 0 | words of row 1 | ...        int32 words

    max_rows: masked rows of one step. num_buffers: steps that may be in flight.
    """

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
    return -(-count // _MASK_ALIGNMENT_WORDS) * _MASK_ALIGNMENT_WORDS


class StagedRows:
    """What the host changed in the rows' state and has not sent yet, with the host's copy of what it last wrote.

    Filled by a plan, emptied by the staging buffer. All numpy; views of one int32 buffer in the layout of
    model/gpu/state.py. The copy is right for what only the host writes (tables, sampling, the batch); tokens and
    positions move on the device without it. Of a word that changes twice the last value is sent twice, so the order of
    arrival does not matter.
    """

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

    def join(self, new: NewRequest, sampling: Mapping[str, float]) -> None:
        """The row stands before its last known token, with an empty table. sampling: by name in SAMPLING_COLUMNS."""
        slot, words_W, layout = new.slot, self.words_W, self.layout
        self.table_RM[slot] = NO_BLOCK
        self._seed_R[slot] = np.uint64(new.sampling.seed & 0xFFFF_FFFF_FFFF_FFFF)
        self._temperature_R[slot] = 0.0 if sampling["method"] else new.sampling.temperature
        words_W[layout.last_token + slot] = new.token_ids_T[-1]
        words_W[layout.position + slot] = len(new.token_ids_T) - 1
        words_W[layout.num_prompt + slot] = new.num_prompt_tokens
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
        """The first `size` rows of the batch are these slots (int32), then scratch. Only differences are sent."""
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
        """int32 indices and values of everything that changed; None if nothing did."""
        if not self._pending:
            return None
        index_C = self._pending[0] if len(self._pending) == 1 else np.concatenate(self._pending)
        if len(index_C) > self.layout.num_words:
            index_C = np.unique(index_C)
        self._pending.clear()
        return index_C, self.words_W[index_C]


class StagingBuffer:
    """The one copy of a step to the device. device_U: int32 there; the payload begins at HEADER_WORDS.

    num_payload: words of the largest payload. num_buffers: steps that may be in flight.
    """

    def __init__(self, changes: StagedRows, *, num_payload: int, num_buffers: int, device: torch.device) -> None:
        num_words = HEADER_WORDS + num_payload + 2 * changes.layout.num_words
        is_pinned = device.type == "cuda"
        self.device_U = torch.zeros(num_words, dtype=torch.int32, device=device)
        self._changes = changes
        self._buffers = [torch.zeros(num_words, dtype=torch.int32, pin_memory=is_pinned) for _ in range(num_buffers)]
        self._arrays = [buffer.numpy() for buffer in self._buffers]
        self._views: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._turn = 0

    def payload(self, num_words: int) -> np.ndarray:
        """int32 view of the current buffer, to be filled before `send`; contains stale words."""
        return self._arrays[self._turn][HEADER_WORDS : HEADER_WORDS + num_words]

    def send(self, num_payload: int) -> None:
        """Enqueue the copy of the payload and of all pending changes; nothing if there are none. The next step gets the
        next buffer."""
        changed = self._changes.take()
        if changed is None and not num_payload:
            return
        array, first = self._arrays[self._turn], HEADER_WORDS + num_payload
        count = 0 if changed is None else len(changed[0])
        array[0], array[1] = count, first
        if changed is not None:
            array[first : first + count], array[first + count : first + 2 * count] = changed
        device_U, host_U = self._beginnings(first + 2 * count)
        device_U.copy_(host_U, non_blocking=True)
        self._turn = (self._turn + 1) % len(self._buffers)

    def _beginnings(self, num_words: int) -> tuple[torch.Tensor, torch.Tensor]:
        """At least the first num_words there and in the current buffer. Kept for each power of two: after an idle time
        two new views take as long as the copy."""
        exponent = (num_words - 1).bit_length()
        found = self._views.get((self._turn, exponent))
        if found is None:
            found = self.device_U[: 1 << exponent], self._buffers[self._turn][: 1 << exponent]
            self._views[self._turn, exponent] = found
        return found
