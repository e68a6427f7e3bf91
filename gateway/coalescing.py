"""How long new tokens wait for more, so that a busy gateway writes fewer and larger messages.

A message costs its 30 to 60 µs whatever it carries, and gRPC takes in one request a turn of the event loop: a gateway
that is busy all the time with single tokens lets those who arrive together wait while the workers' slots are empty
(bench/arrivals.py). So once the loop's thread computes nearly all the time, tokens go out in rounds that move further
apart, and at once again when it has time to spare. First tokens and ends never wait. Knows no gRPC.
"""

import asyncio
import time
from collections.abc import Callable

from gateway.bell import Bell

BUSY_SHARE = 0.7  # of the thread's time: above, rounds move apart
CALM_SHARE = 0.5  # below, they move together
STEP = 1.5
LEAST_INTERVAL_S = 0.001  # closer rounds are none
MOST_INTERVAL_S = 0.010
WINDOW_S = 0.02  # the share is taken over so long
STALE_S = 0.2  # so long without tokens says nothing of what is to come


class Coalescer:
    """One per gateway, on its event loop."""

    def __init__(self, *, cpu_s: Callable[[], float] | None = None, now_s: Callable[[], float] | None = None) -> None:
        """cpu_s: what this thread has computed so far; now_s: monotonic. None: of the system."""
        self._cpu_s = cpu_s or time.thread_time
        self._now_s = now_s or time.monotonic
        self._window = (self._now_s(), self._cpu_s())
        self._waiting: dict[Bell, None] = {}
        self._round: asyncio.TimerHandle | None = None
        self._last_s = 0.0
        self._interval_s = 0.0

    @property
    def interval_s(self) -> float:
        """Between rounds now; 0.0: tokens go out as they come."""
        return 0.0 if self._now_s() - self._window[0] > STALE_S else self._interval_s

    def ring(self, bell: Bell) -> None:
        """An output has new tokens."""
        now_s = self._now_s()
        if now_s - self._window[0] >= WINDOW_S:
            self._adjust(now_s)
        if not self._interval_s and self._round is None:
            bell.ring()
            return
        self._waiting[bell] = None
        if self._round is None:
            delay_s = max(0.0, self._last_s + self._interval_s - now_s)
            self._round = asyncio.get_running_loop().call_later(delay_s, self._ring_all)

    def _ring_all(self) -> None:
        self._round, self._last_s = None, self._now_s()
        waiting, self._waiting = self._waiting, {}
        for bell in waiting:
            bell.ring()

    def _adjust(self, now_s: float) -> None:
        (since_s, since_cpu_s), cpu_s = self._window, self._cpu_s()
        self._window = (now_s, cpu_s)
        share = (cpu_s - since_cpu_s) / (now_s - since_s)
        if now_s - since_s > STALE_S:
            self._interval_s = 0.0
        elif share > BUSY_SHARE:
            self._interval_s = min(max(self._interval_s * STEP, LEAST_INTERVAL_S), MOST_INTERVAL_S)
        elif share < CALM_SHARE:
            self._interval_s /= STEP
            if self._interval_s < LEAST_INTERVAL_S:
                self._interval_s = 0.0
