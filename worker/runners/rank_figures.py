"""What the ranks of a group measure of themselves, for rank 0's /metrics: a row of numbers for each, in memory that the
processes share. A rank writes its own row and waits for nobody.

Must not know: models, metrics, how a rank was started.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from octavo.worker.scheduler.plan import StepMasks, StepPlan, StepResult

MEMORY_EVERY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFigures:
    """num_steps: launched since the start.
    step_s: time spent in them, as seen by the rank's own thread.
    exchange_s: part of it spent exchanging tensors with other ranks, waiting for the slowest included; if a device
      does this by itself, the time to launch it.
    memory_bytes: held on the rank's device now.
    """

    num_steps: int
    step_s: float
    exchange_s: float
    memory_bytes: int


class RankBoard:
    """The rows of all ranks, in a file that each of them maps."""

    def __init__(self, rows_RF: np.ndarray) -> None:
        self._rows_RF = rows_RF

    @classmethod
    def create(cls, path: Path, *, size: int) -> "RankBoard":
        """Call once, on rank 0, before the others open it."""
        return cls(np.memmap(path, np.float64, "w+", shape=(size, len(RankFigures.__slots__))))

    @classmethod
    def open(cls, path: Path, *, size: int) -> "RankBoard":
        """Call on the other ranks."""
        return cls(np.memmap(path, np.float64, "r+", shape=(size, len(RankFigures.__slots__))))

    def write(self, rank: int, figures: RankFigures) -> None:
        """Replace a rank's row."""
        self._rows_RF[rank] = [getattr(figures, name) for name in RankFigures.__slots__]

    def read(self) -> list[RankFigures]:
        """Of every rank, in order; zeros if a rank has written nothing yet."""
        return [
            RankFigures(num_steps=int(steps), step_s=float(step_s), exchange_s=float(wait_s), memory_bytes=int(held))
            for steps, step_s, wait_s, held in self._rows_RF.tolist()
        ]


class MeasuredRunner:
    """A Runner that records its figures and otherwise forwards to `runner`. exchange_s, memory_bytes: see
    RankFigures."""

    def __init__(
        self,
        runner: Any,
        board: RankBoard,
        rank: int,
        *,
        exchange_s: Callable[[], float],
        memory_bytes: Callable[[], int],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runner, self._board, self._rank = runner, board, rank
        self._exchange_s, self._memory_bytes, self._clock = exchange_s, memory_bytes, clock
        self._num_steps, self._step_s = 0, 0.0
        self._memory, self._memory_at_s = memory_bytes(), clock()
        self._write()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, plan: StepPlan) -> None:
        """See Runner.launch."""
        self._num_steps += 1
        self._measured(lambda: self._runner.launch(plan))
        self._write()  # here too: ranks other than the first collect much later

    def constrain(self, masks: StepMasks) -> None:
        """See Runner.constrain."""
        self._measured(lambda: self._runner.constrain(masks))

    def collect(self) -> StepResult:
        """See Runner.collect."""
        result: StepResult = self._measured(self._runner.collect)
        self._write()
        return result

    def _measured(self, work: Callable[[], Any]) -> Any:
        start_s = self._clock()
        try:
            return work()
        finally:
            self._step_s += self._clock() - start_s

    def _write(self) -> None:
        now_s = self._clock()
        if now_s - self._memory_at_s >= MEMORY_EVERY_S:
            self._memory, self._memory_at_s = self._memory_bytes(), now_s
        figures = RankFigures(
            num_steps=self._num_steps,
            step_s=self._step_s,
            exchange_s=self._exchange_s(),
            memory_bytes=self._memory,
        )
        self._board.write(self._rank, figures)
