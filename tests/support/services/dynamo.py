"""NVIDIA Dynamo in front of services: its frontend with the KV router, and our backend for each service; without etcd
or NATS."""

import contextlib
import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.services.interop import REPOSITORY
from tests.support.services.scrape import Page, scrape
from tests.support.services.service import free_port

MODEL = REPOSITORY / "model" / "embedded" / "folio-chat"
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
HOSTS = ("DYN_EVENT_PLANE_HOST", "DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_SYSTEM_HOST")


def environment(folder: Path) -> dict[str, str]:
    """Environment of Dynamo's processes, which find each other through files in a folder."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DYN_", "OCTAVO_", "PYTHON"))}
    ours = f"{REPOSITORY / 'proto'}{os.pathsep}{REPOSITORY / 'integrations' / 'dynamo'}"
    return kept | dict.fromkeys(HOSTS, "127.0.0.1") | {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(folder / "discovery"),
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
        "HF_HUB_OFFLINE": "1",
        "HOME": str(folder),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": ours,
    }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """`python -m octavo_dynamo` in front of one service."""

    process: "subprocess.Popen[bytes]"
    log: Path
    system_port: int

    def metrics(self) -> Page:
        """The backend's metrics from Dynamo's runtime."""
        return scrape(self.system_port)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dynamo:
    """A frontend, and its backends in the order of the services."""

    url: str
    port: int
    backends: list[Backend]
    folder: Path

    def post(self, path: str, **body: object) -> dict[str, object]:
        """The answer, or the error."""
        body = {"model": "folio-chat", **body}
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/{path}", data=json.dumps(body).encode(), headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return dict(json.load(response))
        except urllib.error.HTTPError as error:
            return {"status": error.code, **json.load(error)}

    def is_listed(self, num_backends: int) -> bool:
        """Whether the router knows this many backends: each has a file of its own while it is listed."""
        instances = self.folder / "discovery" / "v1" / "instances"
        return len(list(instances.glob("*%2Fgenerate%2F*"))) == num_backends

    def wait_until_listed(self, num_backends: int) -> None:
        """Wait until exactly this many are listed."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self.is_listed(num_backends):
            assert time.monotonic() < deadline_s, self.logs()
            time.sleep(0.1)

    def logs(self) -> str:
        """The end of each process's log."""
        return "\n".join(f"== {each.name}\n{each.read_text()[-3000:]}" for each in sorted(self.folder.glob("*.log")))


@contextmanager
def dynamo(
    python: Path,
    folder: Path,
    targets: Sequence[str],
    *arguments: str,
    of_backends: Sequence[str] = (),
    api_key: str = "",
) -> Iterator[Dynamo]:
    """Dynamo, ready for every target; stopped at the end. arguments: for the frontend. api_key: of the services."""
    variables, backends = environment(folder) | {"OCTAVO_API_KEY": api_key}, []
    with ExitStack() as stack:
        for index, target in enumerate(targets):
            log, system_port = folder / f"backend-{index}.log", free_port()  # below 32768, as Dynamo demands
            command = [str(python), "-m", "octavo_dynamo", f"--target={target}", f"--model-path={MODEL}", *of_backends]
            own = variables | {"DYN_SYSTEM_PORT": str(system_port)}
            process = stack.enter_context(_process(command, folder, own, log))
            backends.append(Backend(process=process, log=log, system_port=system_port))
        port = free_port()
        command = ["-m", "dynamo.frontend", "--router-mode=kv", "--http-host=127.0.0.1", f"--http-port={port}"]
        frontend = folder / "frontend.log"
        process = stack.enter_context(_process([str(python), *command, *arguments], folder, variables, frontend))
        running = Dynamo(url=f"http://127.0.0.1:{port}", port=port, backends=backends, folder=folder)
        running.wait_until_listed(len(targets))
        _wait_until_served(running, process)
        yield running


@contextmanager
def _process(
    command: list[str], folder: Path, variables: dict[str, str], log: Path
) -> Iterator["subprocess.Popen[bytes]"]:
    with log.open("wb") as output:
        started = subprocess.Popen(command, cwd=folder, env=variables, stdout=output, stderr=output)
    try:
        yield started
    finally:
        started.terminate()
        try:
            started.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait(STOP_TIMEOUT_S)


def _wait_until_served(running: Dynamo, frontend: "subprocess.Popen[bytes]") -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s and frontend.poll() is None:
        with contextlib.suppress(OSError, ValueError), urllib.request.urlopen(f"{running.url}/v1/models") as response:
            if json.load(response)["data"]:
                return
        time.sleep(0.1)
    raise AssertionError(f"Dynamo is not ready:\n{running.logs()}")
