"""What was written to the block table since somebody last asked.

It must not know what the rows mean.
"""

import numpy as np

_FIRST_CAPACITY = 256


class UpdateLog:
    """Rows (slot, column, block) in the order in which they were written, int32 [U, 3]."""

    def __init__(self) -> None:
        self._rows_U3 = np.empty((_FIRST_CAPACITY, 3), np.int32)
        self._count = 0

    def append(self, slots_U: np.ndarray | int, columns_U: np.ndarray | int, blocks_U: np.ndarray) -> None:
        """Note that blocks were written; a single slot or column stands for all."""
        end = self._count + len(blocks_U)
        if end > len(self._rows_U3):
            self._make_room(end)
        rows = self._rows_U3[self._count : end]
        rows[:, 0] = slots_U
        rows[:, 1] = columns_U
        rows[:, 2] = blocks_U
        self._count = end

    def drop_slot(self, slot: int) -> None:
        """Forget what was written for a slot: its owner is gone before anybody saw it."""
        if not self._count:
            return
        rows = self._rows_U3[: self._count]
        kept = rows[rows[:, 0] != slot]
        self._rows_U3[: len(kept)] = kept
        self._count = len(kept)

    def take(self) -> np.ndarray:
        """Rows since the last call, int32 [U, 3]."""
        rows = self._rows_U3[: self._count].copy()
        self._count = 0
        return rows

    def _make_room(self, wanted: int) -> None:
        grown = np.empty((max(wanted, 2 * len(self._rows_U3)), 3), np.int32)
        grown[: self._count] = self._rows_U3[: self._count]
        self._rows_U3 = grown
