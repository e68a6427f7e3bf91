"""The whole service as a user starts it: `octavo serve` in a process of its own, with its gateways and workers."""

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.v1 import admin_pb2, admin_pb2_grpc
from tests.support.children import live_children

REPOSITORY = Path(__file__).resolve().parents[3]
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 60.0  # generous: a busy machine is not an error
IDLE_TIMEOUT_S = 60.0
PATIENCE_S = 180.0

_PORTS = range(12000, 32000)
_BLOCK = 50


def _own_ports() -> Iterator[int]:
    """Ports from blocks that this process reserves until it ends. Test processes run side by side, and a port that one
    of them has chosen but not bound yet would look free to another."""
    folder = Path(tempfile.gettempdir()) / f"octavo-test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    for first in _PORTS[::_BLOCK]:
        lock = os.open(folder / str(first), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        yield from range(first, first + _BLOCK)
    raise AssertionError(f"every port from {_PORTS[0]} to {_PORTS[-1]} was given to a test")


_OWN_PORTS = _own_ports()


def free_port() -> int:
    """A TCP port of the loopback interface that is free now and was not given before, here or to another test process.

    Below the range from which systems choose ports for connections (RFC 6335: 49152; Linux: 32768), so that neither a
    connection nor a service that asks for port 0 takes it before it is used.
    """
    for port in _OWN_PORTS:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is left")


def wait_for(what: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    """Wait until this is true. Raises AssertionError at the timeout."""
    deadline_s = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s"
        time.sleep(0.05)


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A running service."""

    process: subprocess.Popen[bytes]
    port: int
    admin_port: int
    log: Path

    @property
    def target(self) -> str:
        """The address of the gRPC service."""
        return f"127.0.0.1:{self.port}"

    def children(self, command: str) -> list[psutil.Process]:
        """The live processes that run `octavo COMMAND` (worker, gateway) under the supervisor."""
        return live_children(command, self.process.pid)

    def audit(self) -> list[admin_pb2.BlockAudit]:
        """A recount of every worker's blocks."""
        with grpc.insecure_channel(f"127.0.0.1:{self.admin_port}") as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            return list(stub.AuditBlocks(admin_pb2.AuditBlocksRequest(), timeout=ANSWER_TIMEOUT_S).audits)

    def load(self) -> list[admin_pb2.WorkerLoad]:
        """The load of every worker."""
        with grpc.insecure_channel(f"127.0.0.1:{self.admin_port}") as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            return list(stub.GetLoad(admin_pb2.GetLoadRequest(), timeout=ANSWER_TIMEOUT_S).workers)

    def wait_until_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until InferenceService is SERVING. Raises AssertionError with the end of the log at the timeout."""
        deadline = time.monotonic() + timeout_s
        with grpc.insecure_channel(self.target) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service="octavo.v1.InferenceService")
            while time.monotonic() < deadline and self.process.poll() is None:
                try:
                    if stub.Check(request, timeout=10).status == health_pb2.HealthCheckResponse.SERVING:
                        return
                except grpc.RpcError:
                    pass
                time.sleep(0.05)
        raise AssertionError(f"the service is not ready:\n{self.log.read_text()[-4000:]}")

    def wait_until_supervised(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until the supervisor says that all is ready: it restarts processes that die from then on."""
        deadline = time.monotonic() + timeout_s
        while not (self.log.parent / "run" / "ready").exists():
            assert time.monotonic() < deadline, f"never ready:\n{self.log.read_text()[-4000:]}"
            time.sleep(0.02)

    def wait_until_idle(self, timeout_s: float = IDLE_TIMEOUT_S) -> None:
        """Wait until every block is free or cached and nothing runs or waits. Raises AssertionError at the timeout."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            audits, loads = self.audit(), self.load()
            if not any(audit.num_active_blocks for audit in audits) and not any(
                load.num_running or load.num_waiting for load in loads
            ):
                return
            time.sleep(0.1)
        raise AssertionError(f"still busy: {self.audit()} {self.load()}")


def environment() -> dict[str, str]:
    """The environment of a service: one thread per process, no settings from outside."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_")}
    return kept | {"OMP_NUM_THREADS": "1"}


@contextmanager
def launch(
    folder: Path,
    *arguments: str,
    injector: Path | None = None,
    injected: Mapping[str, object] | None = None,
    descriptors: int | None = None,
) -> Iterator[Service]:
    """`octavo serve ARGUMENTS`, just started; killed at the end if it still runs. injector: a folder with a
    sitecustomize that injects faults. injected: the faults, for it to read. descriptors: `ulimit -n` of its
    processes."""
    variables = environment()
    if injector is not None:
        variables["PYTHONPATH"] = str(injector)
        variables["FAULTS_INJECTED"] = json.dumps(injected or {})
    port, admin_port, log = free_port(), free_port(), folder / "service.log"
    command = [sys.executable, "-m", "octavo.cli.main", "serve", f"--port={port}", f"--admin-port={admin_port}"]
    command += ["--metrics-port=0", "--worker-metrics-port=0", f"--run-dir={folder / 'run'}", *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(
            _within(descriptors, command), cwd=folder, env=variables, stdout=output, stderr=output
        )
    try:
        yield Service(process=process, port=port, admin_port=admin_port, log=log)
    finally:
        stop_by_force(process)


def _within(descriptors: int | None, command: Sequence[str]) -> Sequence[str]:
    if descriptors is None:
        return command
    return ["sh", "-c", f'ulimit -n {descriptors} && exec "$@"', "sh", *command]


@contextmanager
def serve(
    folder: Path,
    *arguments: str,
    injector: Path | None = None,
    injected: Mapping[str, object] | None = None,
    descriptors: int | None = None,
) -> Iterator[Service]:
    """The same, but ready; stopped by SIGTERM at the end, and must leave no process behind."""
    with launch(folder, *arguments, injector=injector, injected=injected, descriptors=descriptors) as service:
        service.wait_until_ready()
        process = service.process
        family = psutil.Process(process.pid)
        yield service
        members = family.children(recursive=True) if process.poll() is None else []
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_TIMEOUT_S) == 0, service.log.read_text()[-4000:]
        _, alive = psutil.wait_procs(members, timeout=STOP_TIMEOUT_S)
        assert alive == []


def stop_by_force(process: subprocess.Popen[bytes]) -> None:
    """Kill a supervisor that still runs, and its children."""
    if process.poll() is not None:
        return
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait(STOP_TIMEOUT_S)
    for child in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
