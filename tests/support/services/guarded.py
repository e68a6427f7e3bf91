"""`octavo serve` with access control, as an operator starts it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.services.service import START_TIMEOUT_S, STOP_TIMEOUT_S, environment, free_port, stop_by_force


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardedService:
    """A running service, and how to call it from the command line."""

    process: subprocess.Popen[bytes]
    port: int
    admin_port: int
    folder: Path

    @property
    def target(self) -> str:
        """The address of the gRPC service."""
        return f"127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        """The log of all its processes."""
        return (self.folder / "service.log").read_text()


def octavo(*arguments: object, folder: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run an `octavo` command; variables: OCTAVO_… variables without that prefix."""
    extra = {f"OCTAVO_{name}": value for name, value in variables.items()}
    return subprocess.run(
        [sys.executable, "-m", "octavo.cli.main", *map(str, arguments)],
        cwd=folder,
        env=environment() | extra | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@contextmanager
def guarded_service(folder: Path, *arguments: object) -> Iterator[GuardedService]:
    """A service, ready when its supervisor says so, which bypasses access control; stopped by SIGTERM, and must exit
    with 0."""
    port, admin_port, log = free_port(), free_port(), folder / "service.log"
    command = [sys.executable, "-m", "octavo.cli.main", "serve", f"--port={port}", f"--admin-port={admin_port}"]
    command += ["--metrics-port=0", "--worker-metrics-port=0", f"--run-dir={folder / 'run'}", *map(str, arguments)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, env=environment(), stdout=output, stderr=output)
    try:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not (folder / "run/ready").exists():
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline_s, log.read_text()[-4000:]
            time.sleep(0.05)
        yield GuardedService(process=process, port=port, admin_port=admin_port, folder=folder)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(STOP_TIMEOUT_S) == 0, log.read_text()[-4000:]
    finally:
        stop_by_force(process)
