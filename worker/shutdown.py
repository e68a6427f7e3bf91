"""How a worker is asked to end by signals, and that it does.

Handlers of Python run in the main thread alone, between two of its instructions. Where that thread is in a library
that waits, in gloo for a rank that stands still or in a driver for a device, no handler runs for minutes. So a thread
hears of each signal too (`signal.set_wakeup_fd`), and ends the process where the main thread has not in time.
"""

import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

import psutil
import structlog

from octavo.wire.host import ending_signals
from octavo.worker.engine.engine import Engine

EXIT_OK = 0
EXIT_REFUSED = 76
END_S = 10.0
"""For the end itself, behind the grace of a drain. A supervisor waits as long."""
LONGEST_WAIT_S = 3600.0  # what a system call takes
TELL_S = 0.5
THREAD = "signals"
"""Its name. It waits in a system call and holds no lock, so that a process which has no other may fork."""

log = structlog.get_logger(__name__)


class Shutdown:
    """Ends the worker when asked: the first signal drains, the second stops; a gateway's refusal stops too.

    Installed before the model is loaded; knows the engine once there is one. Handlers only set what the engine's loop
    reads, and wake it.
    """

    def __init__(self, *, grace_s: float) -> None:
        self.exit_code = EXIT_OK
        self._grace_s = grace_s
        self._num_signals = 0
        self._engine: Engine | None = None
        self._wake: Callable[[], None] | None = None
        self._heard: tuple[socket.socket, socket.socket] | None = None

    def install(self) -> None:
        """Take SIGTERM, SIGINT and SIGHUP over. Main thread only, once."""
        receiver, sender = self._heard = socket.socketpair()
        sender.setblocking(False)
        for number in ending_signals():
            signal.signal(number, self._on_signal)
        signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._limit, args=(receiver,), name=THREAD, daemon=True).start()

    def attach(self, engine: Engine, wake: Callable[[], None]) -> None:
        """From now on signals go to this engine."""
        self._engine, self._wake = engine, wake

    def refuse(self, reason: str) -> None:
        """A gateway refused this worker for good."""
        self.exit_code = EXIT_REFUSED
        self._stop()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._num_signals += 1
        if self._engine is None or self._wake is None:
            sys.exit(EXIT_OK)  # still loading: there is no request yet
        if self._num_signals == 1:
            self._engine.request_drain(self._grace_s)
            self._wake()
            log.info("draining", signal=signal.Signals(number).name, grace_s=self._grace_s)
        else:
            self._stop()
            log.info("stopping", signal=signal.Signals(number).name)

    def _stop(self) -> None:
        if self._engine is not None and self._wake is not None:
            self._engine.request_stop()
            self._wake()

    def _limit(self, receiver: socket.socket) -> None:
        """The thread: hears of signals, and ends the process at the end of the time that they leave."""
        end_s, num_signals, numbers = math.inf, 0, set(ending_signals())
        while (left_s := end_s - time.monotonic()) > 0:
            receiver.settimeout(min(left_s, LONGEST_WAIT_S))
            with suppress(TimeoutError):
                num_signals += sum(number in numbers for number in receiver.recv(64))
            if num_signals:
                drains = num_signals == 1 and self._engine is not None
                end_s = min(end_s, time.monotonic() + END_S + (self._grace_s if drains else 0.0))
        with suppress(RuntimeError):  # no thread is to be had
            told = threading.Thread(target=_tell_what_waits, name="last words", daemon=True)
            told.start()
            told.join(TELL_S)  # whoever reads the log may have stopped
        with suppress(psutil.Error):
            for child in psutil.Process().children(recursive=True):  # a rank that stands still sees no end
                child.kill()
        os._exit(self.exit_code)


def _tell_what_waits() -> None:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    where = traceback.extract_stack(frame)[-1]
    log.warning("not_ended_in_time", waits_in=f"{where.name} ({Path(where.filename).name}:{where.lineno})")
