"""The `smg` gateway in front of services, started as its manual says, but only on loopback."""

import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.services.service import free_port

START_TIMEOUT_S = 60.0


@contextmanager
def smg(python: Path, folder: Path, targets: list[str], *arguments: str) -> Iterator[str]:
    """The base URL (http://127.0.0.1:PORT) of a gateway that is ready for every target; stopped at the end."""
    port, metrics_port, log = free_port(), free_port(), folder / f"smg-{time.monotonic_ns()}.log"
    command = [str(python), "-m", "smg", "launch", "--host=127.0.0.1", f"--port={port}"]
    command += ["--prometheus-host=127.0.0.1", f"--prometheus-port={metrics_port}"]
    command += ["--worker-urls", *(f"grpc://{target}" for target in targets), *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(process, url, len(targets), log)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def get_json(url: str) -> dict[str, object]:
    """The answer to a GET."""
    with urllib.request.urlopen(url, timeout=5) as response:
        return dict(json.load(response))


def _wait_until_ready(process: "subprocess.Popen[bytes]", url: str, num_workers: int, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if get_json(f"{url}/v1/models")["data"] and _num_healthy(url) == num_workers:
                return
        except (urllib.error.URLError, OSError, ValueError, KeyError):
            pass
        time.sleep(0.1)
    raise AssertionError(f"smg is not ready:\n{log.read_text()[-4000:]}")


def _num_healthy(url: str) -> int:
    workers = get_json(f"{url}/workers")["workers"]
    assert isinstance(workers, list)
    return sum(bool(worker["is_healthy"]) for worker in workers)
