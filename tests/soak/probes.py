"""Whether the service serves, asked ten times a second by a new caller each: its availability over time."""

import asyncio
import time
from dataclasses import dataclass, field

from octavo import AsyncClient

from tests.soak.load import OWN_CONNECTION
from tests.support.fault_bench import NO_RETRIES
from tests.support.fault_callers import Call, run

EVERY_S = 0.1
LIMIT_S = 2.0  # who waits longer for three tokens is not served


@dataclass(slots=True, kw_only=True)
class Probes:
    """outages: when they began and how long they were; from the first call that failed to the end of the next that did
    not. watched_s: seconds in all."""

    target: str
    outages: list[tuple[float, float]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)  # of the present round
    watched_s: float = 0.0
    num_calls: int = 0
    num_failed: int = 0

    async def run(self, over: asyncio.Event) -> None:
        """One after another until it is over, and then until one is served."""
        start_s, down_since_s = time.monotonic(), None
        while not over.is_set() or (down_since_s is not None and time.monotonic() - start_s < 600):
            call = await self._probe()
            if call.error is not None and down_since_s is None:
                down_since_s = call.sent_s
            elif call.error is None and down_since_s is not None:
                self.outages.append((down_since_s, call.ended_s - down_since_s))
                down_since_s = None
            await asyncio.sleep(max(0.0, EVERY_S - (time.monotonic() - call.sent_s)))
        self.watched_s += time.monotonic() - start_s

    async def _probe(self) -> Call:
        call = Call(prompt=[3, 1, 4, self.num_calls % 100], max_tokens=3, seed=self.num_calls)
        self.calls.append(call)
        self.num_calls += 1
        async with AsyncClient(self.target, options=(*NO_RETRIES, OWN_CONNECTION)) as client:
            await run(client, call, timeout_s=LIMIT_S)
        self.num_failed += call.error is not None
        return call

    @property
    def serving_share(self) -> float:
        """Of the time that was watched."""
        return 1.0 - sum(seconds for _, seconds in self.outages) / max(self.watched_s, 1e-9)

    @property
    def longest_s(self) -> float:
        """Of the outages."""
        return max((seconds for _, seconds in self.outages), default=0.0)
