"""The other ranks of a worker that is a tensor-parallel group: oracle runners of their own that do what rank 0's orders
say, as the real GroupRunner sends them, and that can die or stand still by themselves.

Every rank has the whole of the oracle's KV store, so that whatever does not reach one of them shows: as another token,
as another store, as a plan that cannot be followed. Knows no scheduler and no block manager, only orders.
"""

from collections.abc import Sequence

import numpy as np

from octavo.worker.runners.group import GroupLost, Launch, decode
from octavo.worker.runners.interface import RunnerError
from octavo.worker.runners.oracle.runner import OracleRunner, OracleViolation
from octavo.worker.scheduler.plan import StepResult
from sim.journal import Journal


class SimGroup:
    """Implements `worker.runners.group.Followers`: ranks 1 and up. Rank 0 meets them at the end of each step."""

    def __init__(self, others: Sequence[OracleRunner], journal: Journal, name: str) -> None:
        self._ranks = dict(enumerate(others, start=1))
        self._journal, self._name = journal, name
        self._dead: set[int] = set()
        self._stopped: set[int] = set()

    # ------------------------------------------------------------ what is done to it

    def kill(self, rank: int) -> None:
        """SIGKILL."""
        self._dead.add(rank)

    def stop(self, rank: int) -> None:
        """SIGSTOP."""
        self._stopped.add(rank)

    @property
    def is_whole(self) -> bool:
        """Whether all ranks are alive and running."""
        return not self._dead and not self._stopped

    @property
    def is_broken(self) -> bool:
        """Whether a sum fails."""
        return bool(self._dead)

    @property
    def stands_still(self) -> bool:
        """Whether a sum would wait for ever."""
        return bool(self._stopped - self._dead)

    # ------------------------------------------------------------ what rank 0 does

    def send(self, frame: bytes) -> None:
        """See Followers."""
        self.check(wait_s=0.0)
        for rank, runner in self._ranks.items():
            order = decode(frame)  # each has its own, as processes have
            if isinstance(order, Launch):
                try:
                    runner.launch(order.plan)
                except OracleViolation as violation:
                    self._journal.violate(f"rank {rank} of {self._name} cannot launch what rank 0 does: {violation}")

    def check(self, *, wait_s: float) -> None:
        """See Followers."""
        for rank in sorted(self._dead):
            raise GroupLost(f"rank {rank} of {len(self._ranks) + 1} ended with status -9; its log says why")

    def close(self) -> None:
        """The ranks end with rank 0."""
        self._ranks.clear()

    def finish(self, result: StepResult | None) -> None:
        """The end of a step. result: rank 0's, None if it failed there; every rank must have the same."""
        for rank, runner in self._ranks.items():
            found: StepResult | None = None
            try:
                found = runner.collect()
            except RunnerError:
                pass
            except (OracleViolation, LookupError) as violation:
                self._journal.violate(f"rank {rank} of {self._name} cannot do the step of rank 0: {violation}")
                return
            are_alike = (found is None) == (result is None) and (
                found is None or result is None or np.array_equal(found.tokens_S, result.tokens_S)
            )
            self._journal.check(are_alike, f"rank {rank} of {self._name} chose other tokens")

    def poison(self, block_ids: np.ndarray) -> None:
        """On every rank."""
        for runner in self._ranks.values():
            runner.poison(block_ids)

    def audit(self, first: OracleRunner) -> None:
        """Every rank's blocks must hold what rank 0's hold."""
        for rank, runner in self._ranks.items():
            for name in ("tokens_PB", "positions_PB", "host_H2B"):
                is_same = np.array_equal(getattr(runner.store, name), getattr(first.store, name))
                self._journal.check(is_same, f"the blocks of rank {rank} of {self._name} differ")
