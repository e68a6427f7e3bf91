"""Repetition, presence and frequency penalties, from state that grows by one token per step.

Only rows that ask for a penalty have counts. The work of a step is a gather and a scatter at the tokens that a row
has seen, not over the vocabulary.

Must not know: what a request is, which token comes next.

Legend: R rows · T longest history · V vocabulary · S rows of this step that have penalties · L longest of them.
"""

import numpy as np
import torch

from octavo.model.sampling.params import SamplingRows

# Rows of a wide table for those requests that need one: few of many rows do.
#
# Must not know: what the table holds.
#
# Legend: R rows (stable, one per running request) · N rows of the table · V its width.


_NONE = -1
_FIRST_PLACES = 4


class Places:
    """Which row of the table belongs to which of R rows. num_places: rows that the table must have."""

    def __init__(self, max_rows: int) -> None:
        self._place_R = np.full(max_rows, _NONE, np.int64)
        self._free: list[int] = []
        self.num_places = 0

    def take(self, row: int) -> int:
        """The row's place, a new one where it has none; their number doubles when none is free."""
        if self._place_R[row] == _NONE:
            if not self._free:
                first, self.num_places = self.num_places, max(2 * self.num_places, _FIRST_PLACES)
                self._free = list(range(self.num_places - 1, first - 1, -1))
            self._place_R[row] = self._free.pop()
        return int(self._place_R[row])

    def drop(self, row: int) -> None:
        """Give the place back. Idempotent."""
        if self._place_R[row] != _NONE:
            self._free.append(int(self._place_R[row]))
            self._place_R[row] = _NONE

    def of(self, rows_S: np.ndarray) -> np.ndarray:
        """int64: places of rows that have one."""
        return self._place_R[rows_S]


def wide_enough(table_NV: torch.Tensor, num_places: int) -> torch.Tensor:
    """The table with at least so many rows; new ones are zero."""
    missing = num_places - len(table_NV)
    if missing <= 0:
        return table_NV
    return torch.cat([table_NV, table_NV.new_zeros((missing, table_NV.shape[1]))])


class TokenHistory:
    """Every row's tokens, prompt and output. One numpy buffer.

    tokens_RT: int32. num_prompt_R: where the output starts. Entries past a row's length are stale.
    """

    def __init__(self, *, max_rows: int, max_len: int) -> None:
        self.tokens_RT = np.zeros((max_rows, max_len), np.int32)
        self.num_prompt_R = np.zeros(max_rows, np.int64)

    def put(self, row: int, token_ids_T: np.ndarray, num_prompt_tokens: int) -> None:
        """Forget the row's tokens and take these."""
        self.tokens_RT[row, : len(token_ids_T)] = token_ids_T
        self.num_prompt_R[row] = num_prompt_tokens


class Penalties:
    """Counts of output tokens for the rows that need them, and their use on logits."""

    def __init__(self, rows: SamplingRows, history: TokenHistory, device: torch.device) -> None:
        self._rows = rows
        self._history = history
        self._device = device
        self._places = Places(len(rows.features_R))
        self._counts_NV = torch.zeros((0, rows.vocab_size), dtype=torch.int32, device=device)

    def put(self, row: int, output_ids_T: np.ndarray) -> None:
        """Start counting for a row that already has these output tokens."""
        place = self._places.take(row)
        self._counts_NV = wide_enough(self._counts_NV, self._places.num_places)
        ids_T = torch.from_numpy(output_ids_T.astype(np.int64)).to(self._device)
        counts_V = self._counts_NV[place].zero_()
        counts_V.index_add_(0, ids_T, torch.ones_like(ids_T, dtype=torch.int32))

    def drop(self, row: int) -> None:
        """Stop counting for a row. Idempotent."""
        self._places.drop(row)

    def count(self, rows_S: np.ndarray, tokens_S: torch.Tensor) -> None:
        """One more output token (int64) for each of these rows, which are distinct."""
        places_S = torch.from_numpy(self._places.of(rows_S)).to(self._device)
        one = torch.ones((), dtype=torch.int32, device=self._device)
        self._counts_NV.index_put_((places_S, tokens_S), one, accumulate=True)

    def apply(self, logits_SV: torch.Tensor, index_S: np.ndarray, rows_S: np.ndarray, lengths_S: np.ndarray) -> None:
        """Penalise in place. ``logits_SV[index_S[i]]`` belongs to row ``rows_S[i]``, which holds ``lengths_S[i]`` >= 1
        tokens."""
        ids_SL = self._seen(rows_S, lengths_S)
        index_S1 = torch.from_numpy(index_S).to(self._device).unsqueeze(1)
        places_S = torch.from_numpy(self._places.of(rows_S)).to(self._device)
        count_SL = self._counts_NV[places_S.unsqueeze(1), ids_SL].to(torch.float32)
        score_SL = logits_SV[index_S1, ids_SL]
        factor_S1 = self._column(self._rows.columns["repetition"], rows_S)
        score_SL = torch.where(score_SL < 0, score_SL * factor_S1, score_SL / factor_S1)
        score_SL -= self._column(self._rows.columns["frequency"], rows_S) * count_SL
        score_SL -= self._column(self._rows.columns["presence"], rows_S) * (count_SL > 0)
        logits_SV.index_put_((index_S1, ids_SL), score_SL)

    def _seen(self, rows_S: np.ndarray, lengths_S: np.ndarray) -> torch.Tensor:
        """int64 [S, L] tokens; short rows are filled up with their own first token, which a scatter of equal values
        does not notice."""
        longest = int(lengths_S.max())
        ids_SL = self._history.tokens_RT[rows_S, :longest].astype(np.int64)
        is_past_SL = np.arange(longest) >= lengths_S[:, None]
        return torch.from_numpy(np.where(is_past_SL, ids_SL[:, :1], ids_SL)).to(self._device)

    def _column(self, column_R: np.ndarray, rows_S: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(column_R[rows_S]).to(self._device).unsqueeze(1)
