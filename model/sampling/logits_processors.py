"""What changes logits in place before filters do: penalties (repetition, presence, frequency), bias, allowed ids, bad
words.

Only rows that ask have state here, in tables of a row for each of them. Penalties count output tokens as they come: a
step gathers and scatters at the tokens that a row has seen, not over the vocabulary. Ids past the vocabulary are left
out: they cannot be sampled.

Must not know: what a request is, which token comes next, text.

Legend: R rows (stable, one per running request) · N rows of a table · V vocabulary · T longest history · S rows of this
step that have the rule · M entries of all of them · L longest of their histories, or of the words.
"""

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import numpy as np
import torch

from octavo.model.sampling.params import SamplingRows

T = TypeVar("T")
_ANYTHING = -1  # pads the front of short words; equals no token
_NONE = -1
_FIRST_PLACES = 4


class Places:
    """Assigns table rows to some of R rows. num_places: rows that the table must have."""

    def __init__(self, max_rows: int) -> None:
        self._place_R = np.full(max_rows, _NONE, np.int64)
        self._free: list[int] = []
        self.num_places = 0

    def take(self, row: int) -> int:
        """The row's place, newly assigned if it has none; the table doubles when it is full."""
        if self._place_R[row] == _NONE:
            if not self._free:
                first, self.num_places = self.num_places, max(2 * self.num_places, _FIRST_PLACES)
                self._free = list(range(self.num_places - 1, first - 1, -1))
            self._place_R[row] = self._free.pop()
        return int(self._place_R[row])

    def drop(self, row: int) -> None:
        """Free the row's place. Idempotent."""
        if self._place_R[row] != _NONE:
            self._free.append(int(self._place_R[row]))
            self._place_R[row] = _NONE

    def of(self, rows_S: np.ndarray) -> np.ndarray:
        """int64: the places of rows that have one."""
        return self._place_R[rows_S]


def wide_enough(table_NV: torch.Tensor, num_places: int) -> torch.Tensor:
    """The table with at least num_places rows; new ones are zero."""
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
        """Replace the row's tokens."""
        self.tokens_RT[row, : len(token_ids_T)] = token_ids_T
        self.num_prompt_R[row] = num_prompt_tokens


class Penalties:
    """Counts output tokens for the rows that need them, and penalises logits."""

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
        """int64 [S, L] tokens; short rows are padded with their own first token, which does not change a scatter of
        equal values."""
        longest = int(lengths_S.max())
        ids_SL = self._history.tokens_RT[rows_S, :longest].astype(np.int64)
        is_past_SL = np.arange(longest) >= lengths_S[:, None]
        return torch.from_numpy(np.where(is_past_SL, ids_SL[:, :1], ids_SL)).to(self._device)

    def _column(self, column_R: np.ndarray, rows_S: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(column_R[rows_S]).to(self._device).unsqueeze(1)


class LogitBias:
    """Biases of rows, as (row of the batch, id, value) lists that are rebuilt only when the batch changes."""

    def __init__(self, *, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._by_row: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._flat = _Kept(self._flatten)

    def put(self, row: int, bias: Mapping[int, float]) -> None:
        """The row's biases; empty for none."""
        self._flat.forget()
        self._by_row.pop(row, None)
        if known := {token: value for token, value in bias.items() if 0 <= token < self._vocab_size}:
            self._by_row[row] = np.array(list(known), np.int64), np.array(list(known.values()), np.float32)

    def apply(self, logits_SV: torch.Tensor, index_S: np.ndarray, rows_S: np.ndarray) -> None:
        """``logits_SV[index_S[i]]`` belongs to row ``rows_S[i]``."""
        which_M, ids_M, values_M = self._flat.of(rows_S)
        place = (_on(self._device, index_S[which_M]), ids_M)
        logits_SV.index_put_(place, values_M, accumulate=True)

    def _flatten(self, rows_S: np.ndarray) -> tuple[np.ndarray, torch.Tensor, torch.Tensor]:
        pairs = [self._by_row.get(row, (_NO_IDS, _NO_VALUES)) for row in rows_S.tolist()]
        which_M = np.repeat(np.arange(len(pairs)), [len(ids) for ids, _ in pairs])
        ids_M, values_M = (np.concatenate(column) for column in zip(*pairs, strict=True))
        return which_M, _on(self._device, ids_M), _on(self._device, values_M)


class AllowedIds:
    """Masks for rows that may only sample some ids."""

    def __init__(self, *, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._places = Places(max_rows)
        self._is_allowed_NV = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)

    def put(self, row: int, ids: tuple[int, ...]) -> None:
        """The row's ids; empty: all are allowed, and nothing is stored."""
        if not ids:
            self._places.drop(row)
            return
        place = self._places.take(row)
        self._is_allowed_NV = wide_enough(self._is_allowed_NV, self._places.num_places)
        known_T = np.array(ids, np.int64)
        known_T = known_T[(known_T >= 0) & (known_T < self._is_allowed_NV.shape[1])]
        self._is_allowed_NV[place].zero_()[_on(self._device, known_T)] = True

    def apply(self, logits_SV: torch.Tensor, index_S: np.ndarray, rows_S: np.ndarray) -> None:
        """``logits_SV[index_S[i]]`` belongs to row ``rows_S[i]``, which has ids."""
        index = _on(self._device, index_S)
        is_allowed_SV = self._is_allowed_NV[_on(self._device, self._places.of(rows_S))]
        logits_SV[index] = logits_SV[index].masked_fill_(~is_allowed_SV, -torch.inf)


class BadWords:
    """Token sequences that must not be completed. A word is only matched against the output, as in vLLM."""

    def __init__(self, history: TokenHistory, *, vocab_size: int, device: torch.device) -> None:
        self._history = history
        self._vocab_size = vocab_size
        self._device = device
        self._by_row: dict[int, tuple[tuple[int, ...], ...]] = {}
        self._flat = _Kept(self._flatten)

    def put(self, row: int, words: tuple[tuple[int, ...], ...]) -> None:
        """The row's words; empty: nothing is stored."""
        self._flat.forget()
        self._by_row.pop(row, None)
        if known := tuple(word for word in words if word and 0 <= word[-1] < self._vocab_size):
            self._by_row[row] = known

    def apply(self, logits_SV: torch.Tensor, index_S: np.ndarray, rows_S: np.ndarray, lengths_S: np.ndarray) -> None:
        """``logits_SV[index_S[i]]`` belongs to row ``rows_S[i]``, which holds ``lengths_S[i]`` tokens."""
        which_M, begin_ML, last_M = self._flat.of(rows_S)
        is_said_ML = (begin_ML == _ANYTHING) | (begin_ML == self._said(rows_S, lengths_S, begin_ML.shape[1])[which_M])
        hits_M = is_said_ML.all(axis=1)
        place = (_on(self._device, index_S[which_M[hits_M]]), _on(self._device, last_M[hits_M]))
        logits_SV.index_put_(place, torch.tensor(-torch.inf, device=self._device))

    def _said(self, rows_S: np.ndarray, lengths_S: np.ndarray, width: int) -> np.ndarray:
        """int64 [S, L]: the last tokens of each row's output, padded at the front with a value that no word
        contains."""
        position_SL = lengths_S[:, None] - width + np.arange(width)
        is_output_SL = position_SL >= self._history.num_prompt_R[rows_S][:, None]
        said_SL = self._history.tokens_RT[rows_S[:, None], np.maximum(position_SL, 0)]
        return np.where(is_output_SL, said_SL.astype(np.int64), _ANYTHING - 1)

    def _flatten(self, rows_S: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        words = [(at, word) for at, row in enumerate(rows_S.tolist()) for word in self._by_row.get(row, ())]
        begin_ML = np.full((len(words), max((len(word) - 1 for _, word in words), default=0)), _ANYTHING, np.int64)
        for index, (_, word) in enumerate(words):
            begin_ML[index, begin_ML.shape[1] - len(word) + 1 :] = word[:-1]
        which_M = np.array([at for at, _ in words], np.int64)
        return which_M, begin_ML, np.array([word[-1] for _, word in words], np.int64)


_NO_IDS, _NO_VALUES = np.empty(0, np.int64), np.empty(0, np.float32)


class _Kept(Generic[T]):
    """A value computed for a batch of rows, kept until the batch or a row's parameters change."""

    def __init__(self, make: Callable[[np.ndarray], T]) -> None:
        self._make = make
        self._key: bytes | None = None
        self._value: T | None = None

    def of(self, rows_S: np.ndarray) -> T:
        key = rows_S.tobytes()
        if self._value is None or key != self._key:
            self._key, self._value = key, self._make(rows_S)
        return self._value

    def forget(self) -> None:
        self._key = self._value = None


def _on(device: torch.device, array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).to(device)
