"""Ends a worker that hangs, so that its supervisor can start another.

Two kinds of hang need two guards. If steps stop advancing while the interpreter still runs, the heartbeat thread sees
it. Native code that holds the interpreter lock stops every Python thread; then only faulthandler's C thread is left,
which writes all stacks to stderr and ends the process.
"""

import faulthandler
import os
import sys

import structlog

from octavo.wire.host import arm_stall_guard, disarm_stall_guard
from octavo.worker.engine.interfaces import EngineStats

log = structlog.get_logger(__name__)

EXIT_STALLED = 75


class Watchdog:
    """Fed by the heartbeat thread. stall_timeout_s: longer than the gateways' own, so that they report it first."""

    def __init__(self, *, stall_timeout_s: float) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._last_steps = -1
        self._last_progress_s: float | None = None
        self._is_armed = True

    def feed(self, stats: EngineStats, now_s: float) -> None:
        """Note the engine's progress; ends the process if there was none for too long."""
        self.arm()
        if self.is_stalled(stats, now_s):
            faulthandler.dump_traceback(all_threads=True)
            sys.stderr.flush()
            os._exit(EXIT_STALLED)

    def is_stalled(self, stats: EngineStats, now_s: float) -> bool:
        """Whether there was work for longer than the timeout without a single step."""
        if not stats.has_work or stats.num_steps != self._last_steps or self._last_progress_s is None:
            self._last_steps = stats.num_steps
            self._last_progress_s = now_s
        return now_s - self._last_progress_s > self._stall_timeout_s

    def close(self) -> None:
        """Stop watching."""
        disarm_stall_guard()

    def arm(self) -> None:
        """Unless this is called again in time, the process ends, even while another thread holds the interpreter lock.
        If no thread can be started for that, stalled steps are still detected, and the next call tries again."""
        was_armed, self._is_armed = self._is_armed, arm_stall_guard(self._stall_timeout_s)
        if was_armed and not self._is_armed:
            log.warning("watchdog_not_armed", reason="no thread can be started")
