"""How a worker is asked to end: the first signal drains, the second stops; a gateway's refusal stops too.

Handlers only set what the engine's loop reads, and wake it.
"""

import signal
import sys
from collections.abc import Callable
from types import FrameType

import structlog

from worker.engine import Engine

log = structlog.get_logger(__name__)

EXIT_OK = 0
EXIT_FAILED = 70
EXIT_REFUSED = 76
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Shutdown:
    """Installed before the model is loaded; knows the engine once there is one."""

    def __init__(self, *, grace_s: float) -> None:
        self.exit_code = EXIT_OK
        self._grace_s = grace_s
        self._num_signals = 0
        self._engine: Engine | None = None
        self._wake: Callable[[], None] | None = None

    def install(self) -> None:
        """Take SIGTERM and SIGINT over. Main thread only."""
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    def attach(self, engine: Engine, wake: Callable[[], None]) -> None:
        """From now on signals go to this engine."""
        self._engine, self._wake = engine, wake

    def refuse(self, reason: str) -> None:
        """A gateway sent us away for good."""
        self.exit_code = EXIT_REFUSED
        self._stop()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._num_signals += 1
        if self._engine is None or self._wake is None:
            sys.exit(EXIT_OK)  # still loading: nobody waits for anything
        if self._num_signals == 1:
            log.info("draining", signal=signal.Signals(number).name, grace_s=self._grace_s)
            self._engine.request_drain(self._grace_s)
            self._wake()
        else:
            log.info("stopping", signal=signal.Signals(number).name)
            self._stop()

    def _stop(self) -> None:
        if self._engine is not None and self._wake is not None:
            self._engine.request_stop()
            self._wake()
