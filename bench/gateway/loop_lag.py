"""How late an event loop's timer fires, and how much of that is the process's own doing.

Must not know: what the loop does.
"""

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path

from bench.figures import percentile

TIMER_S = 0.001


@dataclass
class Lag:
    """Of the present phase."""

    lags_ms: list[float] = field(default_factory=list)
    own_ms: list[float] = field(default_factory=list)  # without waiting for a core
    busy_ms: list[float] = field(default_factory=list)  # CPU time of the loop's thread

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            waited_ns = core_wait_ns()
            due_s, cpu_s = time.monotonic() + TIMER_S, time.thread_time()
            await asyncio.sleep(TIMER_S)
            self.lags_ms.append(1e3 * max(0.0, time.monotonic() - due_s))
            self.own_ms.append(max(0.0, self.lags_ms[-1] - 1e-6 * (core_wait_ns() - waited_ns)))
            self.busy_ms.append(1e3 * (time.thread_time() - cpu_s))

    def take(self) -> dict[str, float]:
        """Figures so far, and start anew."""
        lags, own, busy = self.lags_ms, self.own_ms, self.busy_ms
        self.lags_ms, self.own_ms, self.busy_ms = [], [], []
        return {
            "lag_ms_p50": _at(lags, 50),
            "lag_ms_p99": _at(lags, 99),
            "lag_ms_max": _at(lags, 100),
            "own_lag_ms_p99": _at(own, 99),
            "own_lag_ms_max": _at(own, 100),
            "loop_cpu_ms_max": _at(busy, 100),
        }


def _at(values: list[float], percent: float) -> float:
    """Rounded; 0 where the phase was over at once."""
    return round(percentile(values, percent), 2) if values else 0.0


def core_wait_ns() -> int:
    """How long this thread has been ready to run without a core so far (second field of schedstat, see proc(5))."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1])
