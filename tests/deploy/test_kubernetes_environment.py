"""Processes of one host with the environment that deploy/kubernetes gives its pods serve."""

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path

import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo import Client
from octavo.cli.tools.api_key import add_api_key
from octavo.v1 import inference_pb2 as pb
from octavo.wire.keys import generate_keys, save_keys
from tests.support.children import live_children
from tests.support.gateway.certificates import Authority
from tests.support.services.kubernetes import FOLDER, manifests, pod_of, shared_values
from tests.support.services.service import environment, free_port, stop_by_force

RANK = "octavo.worker.loading.group"


@contextmanager
def process(role: str, variables: Mapping[str, str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    folder.mkdir()
    with (folder / "log").open("wb") as output:
        started = subprocess.Popen(
            [sys.executable, "-m", "octavo.cli.main", role],
            cwd=folder,
            env=environment() | dict(variables),
            stdout=output,
            stderr=output,
        )
    try:
        yield started
    finally:
        stop_by_force(started)


def variables_of(role: str, places: Mapping[str, str], overlay: str = "cpu") -> dict[str, str]:
    """The environment of a pod of an overlay. places: what stands on one host for what the cluster has."""
    (container,) = pod_of(manifests(FOLDER / "base"), role)["containers"]
    patch = yaml.safe_load((FOLDER / "overlays" / overlay / "kustomization.yaml").read_text())["patches"][0]
    more = yaml.safe_load(patch["patch"])["spec"]["template"]["spec"]["containers"][0]["env"]
    listed = container["env"] + (more if role == "worker" else [])
    values = shared_values() | {each["name"]: each["value"] for each in listed if "value" in each}
    for known, here in places.items():
        values = {name: value.replace(known, here) for name, value in values.items()}
    return values


def access_of(places: Mapping[str, str]) -> dict[str, str]:
    """What components/access adds to the environment of gateways. places: as above."""
    patch = yaml.safe_load((FOLDER / "components/access/kustomization.yaml").read_text())["patches"][0]["patch"]
    (container,) = yaml.safe_load(patch)["spec"]["template"]["spec"]["containers"]
    values = {each["name"]: each.get("value", "of the secret octavo-access") for each in container["env"]}
    for known, here in places.items():
        values = {name: value.replace(known, here) for name, value in values.items()}
    return values


def is_serving(port: int, service: str) -> bool:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=10
            )
        except grpc.RpcError:
            return False
        return answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.slow
@pytest.mark.parametrize(("overlay", "num_ranks"), [("cpu", 1), ("tensor-parallel", 2)])
def test_two_gateways_and_a_worker_with_the_environment_of_the_pods_serve(
    tmp_path: Path, overlay: str, num_ranks: int
) -> None:
    """The ranks of the overlay for GPUs are tried on CPUs: their number is all that is different. One gateway is
    dialled by IPv4, the other by IPv6; callers use both."""
    keys = tmp_path / "keys"
    for name in ("gateway", "worker"):
        save_keys(generate_keys(), keys, name)
    places = {"/etc/octavo/keys": str(keys), "cuda": "cpu"}
    listening = [{5555: free_port(), 5556: free_port()} for _ in range(2)]
    for n, ports in enumerate(listening):
        for port, here in ports.items():
            places[f"octavo-gateway-{n}.octavo-gateways:{port}"] = f"{('127.0.0.1', '[::1]')[n]}:{here}"
    # What the cluster's DNS would say of the headless Service; here the gateways differ by their ports.
    places["tcp://octavo-gateways:5556"] = ",".join(
        f"tcp://{host}:{ports[5556]}" for host, ports in zip(("127.0.0.1", "[::1]"), listening, strict=True)
    )
    calls = [free_port(), free_port()]
    with ExitStack() as stack:
        for n, ports in enumerate(listening):
            values = variables_of("gateway", places)
            for port, here in ports.items():
                values = {name: value.replace(f"[::]:{port}", f"[::]:{here}") for name, value in values.items()}
            values |= {"OCTAVO_PORT": str(calls[n]), "OCTAVO_METRICS_PORT": "0"}
            values["OCTAVO_RUN_DIR"] = str(tmp_path / f"run-{n}")
            stack.enter_context(process("gateway", values, tmp_path / f"gateway-{n}"))
        values = variables_of("worker", places, overlay) | {
            "OCTAVO_WORKER_METRICS_PORT": "0",
            "OCTAVO_NUM_BLOCKS": "128",
        }
        values |= {"OCTAVO_RUN_DIR": str(tmp_path / "run-worker"), "OCTAVO_NUM_THREADS": "1"}
        worker = stack.enter_context(process("worker", values, tmp_path / "worker"))
        (container,) = pod_of(manifests(), "gateway")["containers"]
        ready = container["readinessProbe"]["grpc"]["service"]
        deadline_s = time.monotonic() + 120
        while not all(is_serving(port, ready) for port in calls):
            logs = [(tmp_path / each / "log").read_text()[-2000:] for each in ("gateway-0", "gateway-1", "worker")]
            assert time.monotonic() < deadline_s, "\n".join(logs)
            time.sleep(0.1)
        for host, port in product(("127.0.0.1", "[::1]"), calls):
            with Client(f"{host}:{port}") as client:
                assert client.cancel("nobody's") == pb.CancelResponse()  # all gateways answered
                assert client.complete(text="x", max_tokens=2, temperature=0).finished.usage.completion_tokens == 2
        assert len(live_children(RANK, worker.pid)) == num_ranks - 1


@pytest.mark.slow
def test_a_gateway_with_the_environment_of_access_starts_and_answers_its_probe(tmp_path: Path) -> None:
    """At the addresses of the pod: which of them may be reached in plain text is part of it."""
    keys, tls, access = (tmp_path / name for name in ("keys", "tls", "access"))
    for name in ("gateway", "worker"):
        save_keys(generate_keys(), keys, name)
    for folder in (tls, access):
        folder.mkdir()
    authority = Authority(tmp_path)
    pair = authority.sign("octavo", san="DNS:octavo")
    for source, name in ((pair.cert, "tls.crt"), (pair.key, "tls.key"), (authority.cert, "ca.crt")):
        source.rename(tls / name)
    add_api_key("ann", access / "api-keys.toml", tenant=None, scopes=(), expires=None)
    places = {f"/etc/octavo/{each.name}": str(each) for each in (keys, tls, access)}
    for number in (5555, 5556):
        places |= {f"[::]:{number}": f"127.0.0.1:{free_port()}"}
    values = variables_of("gateway", places) | access_of(places)
    values |= {"OCTAVO_PORT": str(free_port()), "OCTAVO_METRICS_PORT": "0", "OCTAVO_RUN_DIR": str(tmp_path / "run")}
    values["OCTAVO_PEER_ENDPOINT"] = values["OCTAVO_CONTROL_ENDPOINT"]
    probe = [sys.executable, "-m", "octavo.cli.main", "health", "--live"]
    with process("gateway", values, tmp_path / "gateway") as gateway:
        deadline_s = time.monotonic() + 60
        while subprocess.run(probe, env=environment() | values, capture_output=True, check=False).returncode:
            assert gateway.poll() is None, (tmp_path / "gateway/log").read_text()
            assert time.monotonic() < deadline_s
