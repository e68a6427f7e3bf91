"""The state of every row that a step needs, kept on the device from step to step.

A row is a request's stable place. Kernels of a decode step read and advance the rows; the host sends only changes:
joins, new blocks, another batch. The last row is scratch: batches are padded with it, and its block belongs to no
request.

All state is in one buffer of 32-bit words, so that the host's changes are (index, value) pairs of a single kind
(model/kernels/row_changes.py).

Legend: R rows (the runner's slots and one more) · M table width · A longest batch · W words of all of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from octavo.model.sampling.params import COLUMNS

_ALIGNMENT_WORDS = 32
SAMPLING_COLUMNS = {
    **{name: "int32" if column.dtype == "int64" else "float32" for name, column in COLUMNS.items()},
    **dict.fromkeys(("method", "num_biases", "mask", "num_words", "logprobs"), "int32"),
}
"""Names and dtypes of the columns for sampling beyond a temperature. A row with a method of its own is greedy for the
step's own sampler (`RowState.temperature_R` is 0), whose token is replaced afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """Where each column of the state begins, in words. num_words: in total.

    seed takes two words per row, table table_width words per row, batch max_batch words in all, the others one per row.
    sampling: where each of SAMPLING_COLUMNS begins.
    """

    num_rows: int
    table_width: int
    max_batch: int
    seed: int
    last_token: int
    position: int
    num_prompt: int
    temperature: int
    batch: int
    table: int
    sampling: Mapping[str, int]
    num_words: int

    @classmethod
    def of(cls, *, num_rows: int, table_width: int, max_batch: int) -> "RowLayout":
        """The columns one after another, each aligned to 128 bytes."""
        words = {
            "seed": 2 * num_rows, "last_token": num_rows, "position": num_rows, "num_prompt": num_rows,
            "temperature": num_rows, **{f"sampling {name}": num_rows for name in SAMPLING_COLUMNS},
            "batch": max_batch, "table": num_rows * table_width,
        }  # fmt: skip
        starts, end = {}, 0
        for name, count in words.items():
            starts[name] = end
            end += -(-count // _ALIGNMENT_WORDS) * _ALIGNMENT_WORDS
        sampling = {name: starts.pop(f"sampling {name}") for name in SAMPLING_COLUMNS}
        sizes = {"num_rows": num_rows, "table_width": table_width, "max_batch": max_batch, "num_words": end}
        return cls(sampling=sampling, **sizes, **starts)


class RowState:
    """position_R: number of tokens in the cache, which is where the row's last token will be written.

    last_token_R, position_R, num_prompt_R, table_RM: int32. temperature_R: float32, 0 is greedy. seed_R: int64 (bits of
    a uint64). sampling_columns: by name in SAMPLING_COLUMNS, only read after the step (model/gpu/sampling_state.py).
    batch_A: int32, the rows of the next decode step, then scratch. All are views of words_W, int32.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        table_width: int,
        scratch_block: int,
        device: torch.device | str,
        max_batch: int | None = None,
    ) -> None:
        R = num_slots + 1
        layout = RowLayout.of(num_rows=R, table_width=table_width, max_batch=max_batch or num_slots)
        self.layout = layout
        self.scratch_row = num_slots
        self.words_W = torch.zeros(layout.num_words, dtype=torch.int32, device=device)
        self.last_token_R = self._column(layout.last_token, R)
        self.position_R = self._column(layout.position, R)
        self.num_prompt_R = self._column(layout.num_prompt, R)
        self.temperature_R = self._column(layout.temperature, R).view(torch.float32)
        self.sampling_columns = {
            name: self._column(layout.sampling[name], R).view(getattr(torch, dtype))
            for name, dtype in SAMPLING_COLUMNS.items()
        }
        self.seed_R = self._column(layout.seed, 2 * R).view(torch.int64)
        self.batch_A = self._column(layout.batch, layout.max_batch).fill_(self.scratch_row)
        self.table_RM = self._column(layout.table, R * table_width).view(R, table_width).fill_(scratch_block)

    def _column(self, start: int, count: int) -> torch.Tensor:
        return self.words_W[start : start + count]
