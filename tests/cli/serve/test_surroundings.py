"""`octavo serve` in surroundings that no developer has: it serves, or says in one sentence why not."""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from octavo import Client
from octavo.cli.errors import CliError
from octavo.cli.settings.groups import ServeSettings
from octavo.cli.tools import tour
from tests.support.services.service import STOP_TIMEOUT_S, environment, free_port, stop_by_force

START_TIMEOUT_S = 60.0
OCTAVO = (sys.executable, "-m", "octavo.cli.main")
SMALL = ("--metrics-port=0", "--worker-metrics-port=0", "--page=off", "--runner=oracle", "--num-blocks=64")


@contextmanager
def started(
    folder: Path, *arguments: str, port: int, variables: Mapping[str, str], wrap: tuple[str, ...] = ()
) -> Iterator["subprocess.Popen[bytes]"]:
    """`octavo serve` on the oracle, just started; what it writes goes to folder/log."""
    command = [*wrap, *OCTAVO, "serve", f"--port={port}", *SMALL, *arguments]
    with (folder / "log").open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, env=dict(variables), stdout=output, stderr=output)
    try:
        yield process
    finally:
        stop_by_force(process)


def said(folder: Path) -> str:
    return (folder / "log").read_text(errors="replace")


def wait_until_ready(process: "subprocess.Popen[bytes]", folder: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while "Octavo is ready" not in said(folder):
        assert process.poll() is None, said(folder)
        assert time.monotonic() < deadline_s, said(folder)
        time.sleep(0.05)


def serves(folder: Path, *arguments: str, variables: Mapping[str, str], wrap: tuple[str, ...] = ()) -> str:
    """Starts, answers, drains, and leaves nobody behind; what it said."""
    port = free_port()
    with started(folder, *arguments, port=port, variables=variables, wrap=wrap) as process:
        wait_until_ready(process, folder)
        with Client(f"127.0.0.1:{port}") as client:
            assert client.complete(text="hello", max_tokens=3, timeout_s=30.0).text
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_TIMEOUT_S) == 0, said(folder)
        assert psutil.wait_procs(family, timeout=STOP_TIMEOUT_S)[1] == []
    assert "Traceback" not in said(folder)
    return said(folder)


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """Those of a service that lists itself in a folder of this test."""
    (tmp_path / "runtime").mkdir(mode=0o700)
    return environment() | {"XDG_RUNTIME_DIR": str(tmp_path / "runtime")}


def test_proxies_of_the_environment_are_not_asked_for_processes_of_this_host(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY"), "http://127.0.0.1:1")
    without = {name: value for name, value in variables.items() if name.lower() != "no_proxy"}
    serves(tmp_path, "--gateways=2", variables=without | proxies)


@pytest.mark.skipif(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, reason="under nohup, as its processes are then")
def test_a_terminal_that_is_closed_drains_and_nohup_goes_on(tmp_path: Path, variables: dict[str, str]) -> None:
    with started(tmp_path, port=free_port(), variables=variables) as process:
        wait_until_ready(process, tmp_path)
        process.send_signal(signal.SIGHUP)
        assert process.wait(STOP_TIMEOUT_S) == 0
    assert "draining: requests in flight finish" in said(tmp_path)
    with started(
        tmp_path, port=free_port(), variables=variables, wrap=("sh", "-c", "trap '' HUP; exec \"$@\"", "sh")
    ) as process:
        wait_until_ready(process, tmp_path)
        process.send_signal(signal.SIGHUP)
        for child in psutil.Process(process.pid).children():
            child.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_TIMEOUT_S) == 0


def test_a_path_for_temporary_files_that_is_too_long_for_sockets_is_left(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        serves(tmp_path, variables=variables | {"TMPDIR": str(long), "XDG_RUNTIME_DIR": short})


@pytest.mark.skipif(os.geteuid() == 0, reason="root has no limit of processes")
def test_a_limit_of_processes_that_is_too_low_is_told_before_anything_starts(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    code = "import os, resource as r, sys; r.setrlimit(r.RLIMIT_NPROC, (20, 20)); os.execv(sys.argv[1], sys.argv[1:])"
    limit = (sys.executable, "-c", code)  # not every sh has `ulimit -u`
    with started(tmp_path, port=free_port(), variables=variables, wrap=limit) as process:
        assert process.wait(START_TIMEOUT_S) == 1
    assert said(tmp_path).splitlines()[0] == "error: too few threads and processes are allowed"
    assert len(said(tmp_path).splitlines()) == 3


def test_the_tour_needs_no_file_that_says_ready(
    tmp_path: Path, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tour, "FILE_PATIENCE_S", 0.2)
    port = free_port()
    with started(tmp_path, port=port, variables=variables) as process:
        settings = ServeSettings(port=port, startup_timeout_s=START_TIMEOUT_S)
        tour._wait_until_ready(process, tmp_path / "never written", settings)
        with Client(f"127.0.0.1:{port}") as client:
            assert client.complete(text="hello", max_tokens=3, timeout_s=30.0).text
        process.terminate()
        assert process.wait(STOP_TIMEOUT_S) == 0
        with pytest.raises(CliError, match="ended with exit code 0"):
            tour._wait_until_ready(process, tmp_path / "never written", settings)


@pytest.mark.skipif(not hasattr(fcntl, "F_SETPIPE_SZ"), reason="Linux sets how much a pipe holds")
def test_a_reader_of_the_log_that_has_stopped_stops_nothing(tmp_path: Path, variables: dict[str, str]) -> None:
    port = free_port()
    command = [*OCTAVO, "serve", f"--port={port}", *SMALL, "--log-level=debug"]
    unread, log = os.pipe()
    fcntl.fcntl(log, fcntl.F_SETPIPE_SZ, 4096)
    with (tmp_path / "log").open("wb") as output:
        process = subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=output, stderr=log)
    os.close(log)
    try:
        wait_until_ready(process, tmp_path)
        with Client(f"127.0.0.1:{port}") as client:
            for _ in range(50):
                assert client.complete(text="hello", max_tokens=3, timeout_s=30.0).text
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_TIMEOUT_S) == 0
    finally:
        stop_by_force(process)
        os.close(unread)


APART = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")


def can_be_apart() -> bool:
    """Whether this system lets us have a namespace of processes."""
    with contextlib.suppress(OSError):
        return subprocess.run([*APART, "true"], capture_output=True, timeout=60, check=False).returncode == 0
    return False


@pytest.mark.skipif(not can_be_apart(), reason="this system gives no namespace of processes")
@pytest.mark.parametrize("role", ["gateway", "worker"])
def test_the_first_process_of_a_container_takes_sigterm_while_it_still_imports(role: str, tmp_path: Path) -> None:
    """The kernel gives it none for which it has no handler: `docker stop` waited out its grace."""
    words = ["--metrics-port=0"] if role == "gateway" else ["--runner=oracle", "--worker-metrics-port=0"]
    with (tmp_path / "log").open("wb") as output:
        outer = subprocess.Popen(
            [*APART, *OCTAVO, role, f"--run-dir={tmp_path / 'run'}", *words],
            cwd=tmp_path, env=environment(), stdout=output, stderr=output,
        )  # fmt: skip
    try:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while outer.poll() is None:
            assert time.monotonic() < deadline_s
            for inner in psutil.Process(outer.pid).children():
                with contextlib.suppress(psutil.Error):
                    inner.terminate()
            time.sleep(0.02)
        assert outer.returncode == 128 + signal.SIGTERM
        assert said(tmp_path) == ""
    finally:
        stop_by_force(outer)
