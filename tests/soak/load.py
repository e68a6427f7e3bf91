"""Callers: a closed loop that finds out what the service can do, and an open one that asks at a given rate.

Must not know faults. Every request of a seed is the same in every run; when it is sent is not.
"""

import asyncio
import random
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import count

from octavo import AsyncClient
from tests.soak.asked import KINDS, PATIENCE_S, Asked, ask, draw
from tests.support.faults.bench import NO_RETRIES

NUM_CONNECTIONS = 4
END_TIMEOUT_S = PATIENCE_S + 20
OWN_CONNECTION = ("grpc.use_local_subchannel_pool", 1)
BACKOFF = (("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 300))


@dataclass(slots=True, kw_only=True)
class Load:
    """asked: of the present round, in the order in which they were sent. late_s: the longest that one was sent after
    its time."""

    target: str
    seed: int
    asked: list[Asked] = field(default_factory=list)
    late_s: float = 0.0
    _tasks: set[asyncio.Task[Asked]] = field(default_factory=set)

    async def capacity(self, *, num_callers: int, for_s: float) -> float:
        """Requests per second that callers get who each send the next one when the last is done."""
        drawn, end_s, num_done = random.Random(f"{self.seed}: capacity"), time.monotonic() + for_s, 0
        patient = [kind for kind in KINDS if kind not in ("cancel", "late", "slow reader")]

        async def caller(client: AsyncClient) -> None:
            nonlocal num_done
            while time.monotonic() < end_s:
                self.asked.append(draw(drawn, drawn.choices(patient, [KINDS[kind] for kind in patient])[0]))
                await ask(client, self.asked[-1])
                num_done += time.monotonic() < end_s

        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(self._client()) for _ in range(NUM_CONNECTIONS)]
            await asyncio.gather(*(caller(clients[n % NUM_CONNECTIONS]) for n in range(num_callers)))
        return num_done / for_s

    async def run(self, drawn: random.Random, *, per_s: float, for_s: float) -> None:
        """Send at random moments, so many per second in the mean; returns when all have ended. Raises TimeoutError
        where one does not."""
        start_s, at_s = time.monotonic(), 0.0
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(self._client()) for _ in range(NUM_CONNECTIONS)]
            for number in count():
                at_s += drawn.expovariate(per_s)
                if at_s > for_s:
                    break
                asked = draw(drawn)
                await asyncio.sleep(max(0.0, start_s + at_s - time.monotonic()))
                self.late_s = max(self.late_s, time.monotonic() - start_s - at_s)
                self.send(clients[number % NUM_CONNECTIONS], asked)
            await self.end()

    def send(self, client: AsyncClient, asked: Asked) -> asyncio.Task[Asked]:
        """Ask, in a task that `end` waits for."""
        self.asked.append(asked)
        task = asyncio.create_task(ask(client, asked))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def end(self) -> None:
        """Wait for all that was sent."""
        async with asyncio.timeout(END_TIMEOUT_S):
            while self._tasks:
                await asyncio.wait(self._tasks)

    def _client(self) -> AsyncClient:
        return AsyncClient(self.target, options=(*NO_RETRIES, OWN_CONNECTION, *BACKOFF))
