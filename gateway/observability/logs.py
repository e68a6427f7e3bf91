"""Structured logs to stderr, from a thread of their own: a full disk or a stopped terminal never stops the event loop.

Lines that do not fit into the queue are dropped and counted. Prompts and outputs are never logged.
"""

import queue
import threading
from typing import TextIO

_QUEUE_LINES = 10_000


class LogWriter:
    """Owns the thread. num_dropped: lines lost because the queue was full or the stream is broken."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lines: queue.Queue[str | None] = queue.Queue(_QUEUE_LINES)
        self.num_dropped = 0
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    def msg(self, line: str) -> None:
        """Never blocks, never raises."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self.num_dropped += 1

    debug = info = warning = error = critical = exception = log = msg

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._stream.write(line + "\n")
                self._stream.flush()
            except (OSError, ValueError):
                self.num_dropped += 1

    def close(self) -> None:
        """Write what is queued, for two seconds at most. Idempotent."""
        try:
            self._lines.put(None, timeout=1.0)
        except queue.Full:
            return
        self._thread.join(timeout=2.0)
