"""Blocks that were released while steps were in flight, and wait until those steps have ended.

It must not know what becomes of the blocks afterwards.

    begin 1 ── begin 2 ── release of b ── end 1 ── end 2 ── b may be used again
"""

from collections import deque

import numpy as np

_NOT_HELD = 0


class StepFence:
    """Holds blocks until every step begun before their release has ended. Steps begin in rising order and end in the
    order in which they began."""

    def __init__(self, num_blocks: int) -> None:
        self._open: deque[int] = deque()
        self._last_begun: int | None = None
        self._holds: deque[tuple[int, int, np.ndarray]] = deque()  # (last step begun, number of the hold, blocks)
        self._hold_P = np.zeros(num_blocks, np.int64)  # number of the hold that a block waits in
        self._num_holds = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def is_open(self) -> bool:
        """Whether a step is in flight."""
        return bool(self._open)

    def begin(self, step: int) -> None:
        """A step is launched. ValueError where it does not follow the last one."""
        if self._last_begun is not None and step <= self._last_begun:
            raise ValueError(f"step {step} begins after step {self._last_begun}")
        self._open.append(step)
        self._last_begun = step

    def end(self, step: int) -> list[np.ndarray]:
        """The oldest step in flight has ended; the blocks that waited for it alone, in order of release.
        ValueError for any other step."""
        if not self._open or self._open[0] != step:
            raise ValueError(f"step {step} ends, in flight are {list(self._open)}")
        self._open.popleft()
        passed = []
        while self._holds and self._holds[0][0] <= step:
            _, hold, blocks = self._holds.popleft()
            passed.append(blocks[self._hold_P[blocks] == hold])
            self.discard(passed[-1])
        return passed

    def hold(self, blocks: np.ndarray) -> None:
        """Keep released blocks, int32, distinct, until all steps now in flight have ended."""
        if self._last_begun is None or not self._open:
            raise ValueError("no step is in flight")
        self._num_holds += 1
        self._holds.append((self._last_begun, self._num_holds, blocks))
        self._hold_P[blocks] = self._num_holds
        self._count += len(blocks)

    def discard(self, blocks: np.ndarray) -> None:
        """Forget held blocks: somebody uses them again."""
        self._hold_P[blocks] = _NOT_HELD
        self._count -= len(blocks)

    def contains(self, blocks: np.ndarray) -> np.ndarray:
        """bool per block: is it held."""
        return self._hold_P[blocks] != _NOT_HELD

    def to_array(self) -> np.ndarray:
        """Held blocks, int32, in order of release."""
        alive = [blocks[self._hold_P[blocks] == hold] for _, hold, blocks in self._holds]
        return np.concatenate(alive) if alive else np.empty(0, np.int32)
