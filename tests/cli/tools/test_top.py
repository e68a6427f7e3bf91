"""`octavo top` on a pseudo-terminal beside a real service, and into a pipe."""

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from octavo import Client
from octavo.client.errors import OctavoError
from tests.support.services.service import Service, environment, launch

ORACLE = ("--runner=oracle", "--num-blocks=256", "--workers=2", "--oracle-step-delay-s=0.02")
COMMAND = [sys.executable, "-m", "octavo.cli.main", "top"]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with launch(tmp_path_factory.mktemp("service"), *ORACLE, "--oracle-eos-every=1000000") as running:
        running.wait_until_supervised()
        yield running


@contextmanager
def busy(service: Service, num_requests: int = 3) -> Iterator[None]:
    """With requests in flight."""
    with Client(service.target) as client:
        streams = [
            client.stream(text="once upon a time", max_tokens=1900, request_id=f"story-{n}")
            for n in range(num_requests)
        ]

        def read(stream: object) -> None:
            with contextlib.suppress(OctavoError):
                for _ in stream.deltas():  # type: ignore[attr-defined]
                    pass

        readers = [threading.Thread(target=read, args=(stream,)) for stream in streams]
        for reader in readers:
            reader.start()
        yield
        for stream in streams:
            stream.cancel()
        for reader in readers:
            reader.join(60)


class Terminal:
    """A pseudo-terminal with a command in it. shown: everything that it wrote."""

    def __init__(self, *words: str, width: int, height: int, kind: str = "xterm-256color") -> None:
        self._ours, theirs = pty.openpty()
        self.resize(width, height)
        variables = environment() | {"TERM": kind}
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            variables.pop(name, None)
        self.process = subprocess.Popen(
            [*COMMAND, *words], stdin=theirs, stdout=theirs, stderr=theirs, env=variables, start_new_session=True
        )
        os.close(theirs)
        self.shown = ""

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def press(self, key: str) -> None:
        os.write(self._ours, key.encode())

    def wait_for(self, pattern: str, timeout_s: float = 60.0) -> str:
        """What was written from here on, up to a match."""
        deadline_s, begin = time.monotonic() + timeout_s, len(self.shown)
        while not re.search(pattern, self.shown[begin:]):
            assert time.monotonic() < deadline_s, self.shown[-3000:]
            self._read()
        return self.shown[begin:]

    def wait(self) -> int:
        deadline_s = time.monotonic() + 60
        while self.process.poll() is None and time.monotonic() < deadline_s:
            self._read()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
            pytest.fail(f"it does not end:\n{self.shown[-3000:]}")
        self._read()
        os.close(self._ours)
        return self.process.returncode

    def _read(self) -> None:
        if select.select([self._ours], [], [], 0.1)[0]:
            with contextlib.suppress(OSError):
                self.shown += os.read(self._ours, 65536).decode("utf-8", "replace")


@pytest.mark.parametrize("size", [(80, 24), (60, 20)])
def test_a_terminal_shows_requests_as_they_come_and_q_quits(size: tuple[int, int], service: Service) -> None:
    width, height = size
    terminal = Terminal(f"--port={service.port}", "--interval-s=0.2", width=width, height=height)
    terminal.wait_for(r"requests 0 in flight")
    with busy(service):
        terminal.wait_for(r"requests 3 in flight(.|\n)*story-\d")
        frame = terminal.wait_for(r"q quits(.|\n)*q quits").split("q quits")[1]
        assert all(f"story-{n}" in frame for n in range(3))
        assert "worker-1" in frame
    terminal.wait_for(r"requests 0 in flight")
    terminal.press("q")
    assert terminal.wait() == 0
    assert "\x1b[?1049h" in terminal.shown  # a screen of its own,
    assert "\x1b[?1049l" in terminal.shown.split("\x1b[?1049h")[1]  # which is left again
    assert "Traceback" not in terminal.shown


def test_a_dumb_terminal_gets_what_a_pipe_gets(service: Service) -> None:
    """It got nothing, until q."""
    terminal = Terminal(f"--port={service.port}", width=80, height=24, kind="dumb")
    assert terminal.wait() == 0
    assert "requests 0 in flight" in terminal.shown
    assert "\x1b[?1049h" not in terminal.shown


def test_keys_sort_and_a_new_size_is_followed(service: Service) -> None:
    terminal = Terminal(f"--port={service.port}", "--interval-s=0.2", width=80, height=24)
    terminal.wait_for("q quits")
    assert "MODEL" not in terminal.shown
    terminal.press("or")
    terminal.resize(140, 40)
    terminal.wait_for("MODEL")
    terminal.press("\x1b[A")  # an arrow: nothing
    terminal.wait_for("q quits")
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.wait() == 130


def test_a_service_that_goes_away_is_told_and_watched_again(tmp_path: Path) -> None:
    with launch(tmp_path, *ORACLE) as service:
        service.wait_until_supervised()
        terminal = Terminal(f"--port={service.port}", "--interval-s=0.2", width=100, height=24)
        terminal.wait_for("requests 0 in flight")
        (gateway,) = service.children("gateway")
        gateway.kill()
        terminal.wait_for("no news: ")
        terminal.wait_for(r"gateway-0(.|\n)*q quits(.|\n)*requests 0 in flight")
        terminal.press("q")
        assert terminal.wait() == 0


def top(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*COMMAND, *words], env=environment(), capture_output=True, text=True, timeout=120, check=False
    )


def test_a_pipe_gets_one_plain_snapshot(service: Service) -> None:
    with busy(service):
        deadline_s = time.monotonic() + 60
        while "3 running" not in (done := top(f"--port={service.port}")).stdout:
            assert time.monotonic() < deadline_s, done.stdout + done.stderr
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert sum(line.startswith("worker-") for line in done.stdout.splitlines()) == 2
    assert sum(line.startswith("story-") for line in done.stdout.splitlines()) == 3
    found = json.loads(top(f"--port={service.port}", "--json").stdout)
    assert {worker["worker_id"] for worker in found["workers"]} == {"worker-0", "worker-1"}
    assert {"num_in_flight", "num_paused"} <= found["total"].keys()  # zero or not
    assert all(type(worker["num_steps"]) is int for worker in found["workers"])


def test_nobody_there_and_a_service_without_the_call_are_told() -> None:
    done = top("--port=1")
    assert (done.returncode, done.stderr.splitlines()[0]) == (1, "error: no service answers")
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        done = top(f"--port={port}")
        lines = [line.strip() for line in done.stderr.splitlines()]
        assert (done.returncode, lines[0]) == (1, "error: the service is too old to be watched")
        assert lines[1] == f"127.0.0.1:{port} has no octavo.v1.LoadService"
        assert len(lines) == 3
    finally:
        server.stop(None).wait(5)
