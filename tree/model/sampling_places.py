"""Rows of a wide table for those requests that need one: few of many rows do.

Must not know: what the table holds.

Legend: R rows (stable, one per running request) · N rows of the table · V its width.
"""

import numpy as np
import torch

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
