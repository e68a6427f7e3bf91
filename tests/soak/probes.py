"""Whether the service serves, asked ten times a second by a new caller each: its availability over time."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo import AsyncClient
from tests.soak.load import OWN_CONNECTION
from tests.support.faults.bench import NO_RETRIES
from tests.support.faults.callers import Call, run

EVERY_S = 0.1
LIMIT_S = 2.0  # who waits longer for three tokens is not served


@dataclass(slots=True, kw_only=True)
class Probes:
    """outages: how long nobody was served of those who asked, each from the first that was not to the answer of the
    next that was. watched_s: seconds in all."""

    target: str
    outages: list[float] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)  # of the present round
    watched_s: float = 0.0
    num_calls: int = 0
    num_failed: int = 0

    async def run(self, over: asyncio.Event) -> None:
        """Send them until it is over, and until the last one sent was served; wait for all."""
        start_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            while not over.is_set():
                self.calls.append(Call(prompt=[3, 1, 4, self.num_calls % 100], max_tokens=3, seed=self.num_calls))
                group.create_task(self._probe(self.calls[-1]))
                self.num_calls += 1
                await asyncio.sleep(EVERY_S)
        self.outages += outages(self.calls)
        self.num_failed += sum(call.error is not None for call in self.calls)
        self.watched_s += time.monotonic() - start_s

    async def _probe(self, call: Call) -> None:
        async with AsyncClient(self.target, options=(*NO_RETRIES, OWN_CONNECTION)) as client:
            await run(client, call, timeout_s=LIMIT_S)

    @property
    def serving_share(self) -> float:
        """Of the time that was watched."""
        return 1.0 - sum(self.outages) / max(self.watched_s, 1e-9)

    @property
    def longest_s(self) -> float:
        """Of the outages."""
        return max(self.outages, default=0.0)


def outages(calls: Sequence[Call]) -> list[float]:
    """Of calls that have ended, in the order in which they were sent: how long each run of failures kept people from
    being served. The last may go on after the last call: it is counted up to that one's end."""
    found, since_s = list[float](), None
    for call in calls:
        if call.error is not None and since_s is None:
            since_s = call.sent_s
        elif call.error is None and since_s is not None:
            found.append(call.ended_s - since_s)
            since_s = None
    return [*found, *([calls[-1].ended_s - since_s] if since_s is not None else [])]
