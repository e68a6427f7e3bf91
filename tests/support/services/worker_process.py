"""A real worker process with the oracle runner, and what is expected of it."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
STOP_TIMEOUT_S = 60.0


class WorkerProcess:
    """Started at once; its log lines (JSON) go to a file."""

    def __init__(self, log: Path, **fields: object) -> None:
        self.log = log
        command = [sys.executable, "-m", "tests.support.services.oracle_worker", json.dumps(fields, default=str)]
        with log.open("ab") as output:
            self.popen = subprocess.Popen(command, cwd=REPOSITORY, stdout=output, stderr=output)

    def kill(self) -> None:
        """With -9."""
        self.popen.kill()
        self.popen.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.popen.send_signal(number)

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Its exit code."""
        return self.popen.wait(timeout_s)

    def events(self) -> list[dict[str, object]]:
        """Its log so far."""
        lines = self.log.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def names(self) -> list[object]:
        """The events of its log."""
        return [line["event"] for line in self.events()]


@contextmanager
def running_worker(log: Path, **fields: object) -> Iterator[WorkerProcess]:
    """Killed at the end, if it still runs."""
    process = WorkerProcess(log, **fields)
    try:
        yield process
    finally:
        if process.popen.poll() is None:
            process.kill()
