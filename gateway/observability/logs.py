"""Structured logs to stderr, from a thread of their own: a full disk or a stopped terminal never stops the event loop.

Lines that do not fit into the queue are dropped. Prompts and outputs are never logged.
"""

import queue
import threading
from contextlib import suppress
from typing import TextIO

from octavo.wire.logs import write_line

_QUEUE_LINES = 10_000


class LogWriter:
    """Owns the thread."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lines: queue.Queue[str | None] = queue.Queue(_QUEUE_LINES)
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    def msg(self, line: str) -> None:
        """Never blocks, never raises; a line that finds the queue full is lost."""
        with suppress(queue.Full):
            self._lines.put_nowait(line)

    debug = info = warning = error = critical = exception = log = msg

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            write_line(self._stream, line)

    def close(self) -> None:
        """Write what is queued, taking at most two seconds. Idempotent."""
        try:
            self._lines.put(None, timeout=1.0)
        except queue.Full:
            return
        self._thread.join(timeout=2.0)
