"""A Ray cluster of several raylets on this machine, only on loopback, in a process of its own that reads commands line
by line: `python -m tests.support.services.raylets`. Uses Ray's own test cluster.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

STORE_BYTES = 80 * 2**20
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray's name for: a cluster of this machine alone, on 127.0.0.1
    "RAY_DEDUP_LOGS": "0",
}
HEALTH = {"health_check_period_ms": 500, "health_check_failure_threshold": 3, "health_check_initial_delay_ms": 0}


class Raylets:
    """A running cluster, whose head offers no CPUs."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        hello = self._read()
        self.address = str(hello["address"])
        self.client_port = int(hello["client_port"])
        self.raylets: dict[int, int] = {}

    def add(self, *, cpus: int, gpus: int = 0) -> int:
        """Add a host; returns its number."""
        answer = self._ask({"add": {"num_cpus": cpus, "num_gpus": gpus}})
        self.raylets[answer["node"]] = answer["pid"]
        return int(answer["node"])

    def kill(self, node: int) -> None:
        """Kill a host as if it lost power; Ray has to find out by itself."""
        self._ask({"kill": node})
        del self.raylets[node]

    def processes(self, node: int, command: str = "worker") -> list[psutil.Process]:
        """The processes `octavo COMMAND` on a host."""
        found = []
        for each in psutil.Process(self.raylets[node]).children(recursive=True):
            try:
                if "octavo.cli.main" in each.cmdline() and command in each.cmdline():
                    found.append(each)
            except psutil.NoSuchProcess:
                continue
        return found

    def _ask(self, order: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"'):
                return json.loads(line)
        raise AssertionError("the cluster's process has ended")


@contextmanager
def raylets(*, client_port: int = 0) -> Iterator[Raylets]:
    """A cluster that has only a head; `add` adds hosts."""
    command = [sys.executable, "-m", "tests.support.services.raylets", str(client_port)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | QUIET
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        try:
            yield Raylets(process)
        finally:
            family = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            for each in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()


def _main(client_port: int) -> None:
    from ray.cluster_utils import Cluster

    common: dict[str, Any] = {"object_store_memory": STORE_BYTES, "include_dashboard": False}
    head = common | {"num_cpus": 0, "_system_config": HEALTH}
    if client_port:
        head["ray_client_server_port"] = client_port
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes: dict[int, Any] = {}

    def say(**told: object) -> None:
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()

    say(address=cluster.address, client_port=client_port)
    number = 0
    for line in sys.stdin:
        order = json.loads(line)
        if "add" in order:
            number += 1
            nodes[number] = cluster.add_node(object_store_memory=STORE_BYTES, **order["add"])
            say(node=number, pid=nodes[number].all_processes["raylet"][0].process.pid)
        else:
            node = nodes.pop(order["kill"])
            cluster.remove_node(node, allow_graceful=False)
            say(node=order["kill"])


if __name__ == "__main__":
    _main(int(sys.argv[1]))
