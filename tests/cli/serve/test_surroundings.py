"""`octavo serve` in surroundings that no developer has: it serves, or says in one sentence why not."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from octavo import Client
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
