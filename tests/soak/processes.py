"""Faults that take processes: one at a time, of those that have lived long enough, and how long until all are there
again.

The supervisor gives a process up that dies five times in a row within thirty seconds of its start; a soak is no reason
to get there.
"""

import asyncio
import signal
import time
from dataclasses import dataclass, field

import grpc
import psutil

from tests.soak.asked import Asked
from tests.soak.bench import SoakBench

STRENGTH_TIMEOUT_S = 90.0
POLL_S = 0.1
NUM_WORKERS = 2
HEARTBEAT_TIMEOUT_S = 2.0


@dataclass(slots=True, kw_only=True)
class Processes:
    """min_life_s: who is younger is left alone. repairs: kind of fault, and seconds until the service was whole
    again."""

    bench: SoakBench
    min_life_s: float
    repairs: list[tuple[str, float]] = field(default_factory=list)
    one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    def old_enough(self, role: str) -> list[psutil.Process]:
        """The youngest first: some life should be long, or nothing could be said of its memory."""
        found = sorted(self.bench.service.children(role), key=lambda each: -each.create_time())
        return [each for each in found if time.time() - each.create_time() >= self.min_life_s]

    async def kill_worker(self) -> None:
        """The youngest."""
        await self._take("kill worker", self.old_enough("worker")[:1], num_new=1)

    async def kill_gateway(self) -> None:
        """Its successor is settled in at the quiesce point."""
        gateways = self.old_enough("gateway")
        if gateways:
            start_s = time.monotonic()
            gateways[0].send_signal(signal.SIGKILL)
            self.bench.lost_gateway()
            await self._until_whole(num_new=0)
            self.repairs.append(("kill gateway", time.monotonic() - start_s))

    async def freeze_worker(self) -> None:
        """Beyond the heartbeat's timeout: when it thaws, others have its streams, and it leaves."""
        for worker in self.old_enough("worker")[:1]:
            start_s = time.monotonic()
            worker.send_signal(signal.SIGSTOP)
            await asyncio.sleep(2.5 * HEARTBEAT_TIMEOUT_S)
            worker.send_signal(signal.SIGCONT)
            await self._until_whole(num_new=1)
            self.repairs.append(("freeze worker", time.monotonic() - start_s))

    async def lose_both_to(self, kind: str, asking: "asyncio.Task[Asked]") -> None:
        """A request that takes two workers has been sent."""
        start_s = time.monotonic()
        asked = await asking
        if asked.reason in ("WORKER_LOST", "POISONED"):  # a second time its prompt is known
            await self._until_whole(num_new=1)  # the same one may have had it twice
            self.repairs.append((kind, time.monotonic() - start_s))
        else:
            await self.until_whole()

    async def _take(self, kind: str, processes: list[psutil.Process], *, num_new: int) -> None:
        for process in processes:
            start_s = time.monotonic()
            process.send_signal(signal.SIGKILL)
            await self._until_whole(num_new=num_new)
            self.repairs.append((kind, time.monotonic() - start_s))

    async def _until_whole(self, *, num_new: int) -> None:
        """All workers registered, so many of them new, at a gateway that answers."""
        start_s = time.monotonic()
        while time.monotonic() - start_s < STRENGTH_TIMEOUT_S:
            assert self.bench.service.process.poll() is None, "P: the supervisor has ended"
            epochs = await self.epochs()
            if len(epochs) == NUM_WORKERS and len(epochs - self.bench.epochs) >= num_new:
                self.bench.epochs = epochs
                return
            await asyncio.sleep(POLL_S)
        raise AssertionError(f"L: not whole again within {STRENGTH_TIMEOUT_S:g} s")

    async def until_whole(self) -> None:
        """However many of them are new."""
        await self._until_whole(num_new=0)

    async def epochs(self) -> set[str]:
        """Of the workers that a gateway knows; none where no gateway answers."""
        try:
            return {load.epoch for load in await asyncio.to_thread(self.bench.service.load)}
        except grpc.RpcError:
            return set()
