"""What callers forbid or favour by token: bias, allowed ids, bad words. All change logits in place.

Only rows that ask have state here. Ids past the vocabulary are left out: they cannot be sampled.

Must not know: what a request is, which token comes next, text.

Legend: S rows of this step that have the rule · M entries of all of them · R rows · V vocabulary · L longest word.
"""

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import numpy as np
import torch

from octavo.model.sampling.penalties import Places, TokenHistory, wide_enough

T = TypeVar("T")
_ANYTHING = -1  # fills a short word's beginning; equals no token


class LogitBias:
    """Biases of rows, as (row of the batch, id, value) lists that are made anew only when the batch changes."""

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
    """Masks of rows that may sample only some ids."""

    def __init__(self, *, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._places = Places(max_rows)
        self._is_allowed_NV = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)

    def put(self, row: int, ids: tuple[int, ...]) -> None:
        """The ids of a row; none: all are allowed, and nothing is held."""
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
    """Token sequences that must not be completed. A word matches the output alone, as vLLM has it."""

    def __init__(self, history: TokenHistory, *, vocab_size: int, device: torch.device) -> None:
        self._history = history
        self._vocab_size = vocab_size
        self._device = device
        self._by_row: dict[int, tuple[tuple[int, ...], ...]] = {}
        self._flat = _Kept(self._flatten)

    def put(self, row: int, words: tuple[tuple[int, ...], ...]) -> None:
        """The row's words; none: nothing is held."""
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
        """int64 [S, L]: the last tokens of each row's output; before its begin something that no word has."""
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
    """What was made for a batch of rows, until the batch or a row's parameters change."""

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
