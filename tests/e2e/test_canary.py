"""A pickle that would leave a mark, sent to every endpoint that a service has bound."""

import os
import pickle
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import grpc
import psutil
import zmq

from octavo import Client
from octavo.gateway.auth.authenticator import SCOPE_OF
from tests.support.services.service import Service, serve


class Canary:
    """Makes a file where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self._mark),))


def endpoints(service: Service) -> set[str]:
    """tcp://host:port and ipc://path of every listening socket of the service's processes."""
    found: set[str] = set()
    supervisor = psutil.Process(service.process.pid)
    for process in (supervisor, *supervisor.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # those that gateways render chats in come and go
            connections = process.net_connections("all")
            found |= {f"ipc://{each.laddr}" for each in connections if each.family == socket.AF_UNIX and each.laddr}
            for each in connections:
                if each.family != socket.AF_UNIX and each.status == psutil.CONN_LISTEN:
                    found.add(f"tcp://{each.laddr.ip.removeprefix('::ffff:')}:{each.laddr.port}")
    return found


def as_ss_says(service: Service) -> set[str]:
    """The same by another tool, where it is installed."""
    if shutil.which("ss") is None:
        return set()
    pids = {f"pid={each.pid}," for each in psutil.Process(service.process.pid).children(recursive=True)}
    found: set[str] = set()
    for option, column, scheme in (("-xlpnH", 4, "ipc"), ("-tlpnH", 3, "tcp")):
        for line in subprocess.run(["ss", option], capture_output=True, text=True, check=True).stdout.splitlines():
            if any(pid in line for pid in pids):
                found.add(f"{scheme}://{line.split()[column].replace('[::ffff:127.0.0.1]', '127.0.0.1')}")
    return found


def payloads(mark: Path) -> Iterator[bytes]:
    """The pickle as it is, and dressed as what the endpoints speak."""
    for protocol in (0, 2, pickle.HIGHEST_PROTOCOL):
        data = pickle.dumps(Canary(mark), protocol=protocol)
        yield data
        yield b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data
        yield b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + data
        yield len(data).to_bytes(4, "big") + data


def send_raw(endpoint: str, data: bytes) -> None:
    scheme, _, place = endpoint.partition("://")
    family = socket.AF_UNIX if scheme == "ipc" else socket.AF_INET
    host, _, port = place.rpartition(":")
    with closing(socket.socket(family)) as peer, suppress(OSError):
        peer.settimeout(0.2)
        peer.connect(place if scheme == "ipc" else (host, int(port)))
        peer.sendall(data)
        peer.recv(1024)


def send_by_zmq(endpoint: str, mark: Path) -> None:
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.setsockopt(zmq.LINGER, 200)
    peer.connect(endpoint)
    for data in payloads(mark):
        peer.send(data)
        peer.send_multipart([data, data])
        peer.send_pyobj(Canary(mark))
    peer.close()
    context.term()


def send_by_grpc(target: str, mark: Path) -> None:
    with grpc.insecure_channel(target) as channel:
        for path in sorted(SCOPE_OF):
            for data in payloads(mark):
                metadata = (("x-canary-bin", data), ("authorization", "Bearer x"))
                with suppress(grpc.RpcError):
                    channel.unary_unary(path)(data, timeout=2, metadata=metadata)


def test_the_canary_itself_sings(tmp_path: Path) -> None:
    """The negative control: where it is unpickled, the mark is there."""
    pickle.loads(pickle.dumps(Canary(tmp_path / "mark")))  # noqa: S301
    assert (tmp_path / "mark").exists()


def test_no_endpoint_unpickles_anything(tmp_path: Path, oracle_checkpoint: Path) -> None:
    mark = tmp_path / "mark"
    arguments = ("--runner=oracle", f"--model=o={oracle_checkpoint}", "--num-blocks=64", "--gateways=2")
    with serve(tmp_path, *arguments) as service:
        found = endpoints(service)
        assert as_ss_says(service) <= found
        # gRPC, admin, two metrics of gateways, one of the worker; two sockets for workers.
        assert len([each for each in found if each.startswith("tcp")]) >= 5
        assert len([each for each in found if each.startswith("ipc")]) >= 2
        assert {each.rpartition(":")[0] for each in found if each.startswith("tcp")} == {"tcp://127.0.0.1"}
        for endpoint in sorted(found):
            for data in payloads(mark):
                send_raw(endpoint, data)
            send_by_zmq(endpoint, mark)
        for port in (service.port, service.admin_port):
            send_by_grpc(f"127.0.0.1:{port}", mark)
        with Client(service.target) as client:
            assert client.complete(text="still here", max_tokens=3, timeout_s=60).finished.usage.completion_tokens == 3
        assert len(service.children("gateway")) == 2
        assert len(service.children("worker")) == 1
    assert not mark.exists()
    assert "Traceback" not in service.log.read_text()
