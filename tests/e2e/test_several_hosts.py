"""docs/several-hosts.md: its commands, typed on one machine that plays all of the hosts, make a service; gateways join
and leave it by a list in a file."""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from octavo import Client
from octavo.client.errors import OctavoError
from tests.docs.blocks import blocks_of
from tests.support.services.service import environment as clean_environment
from tests.support.services.service import free_port, wait_for

PAGE = "docs/several-hosts.md"
START_S = 180.0


def lines_of_page() -> list[tuple[str, str]]:
    """Host and command of the blocks that are run here, in their order."""
    found = []
    for block in blocks_of(PAGE):
        if block.verb != "run by":
            continue
        hosts = [line.partition("$")[0] for line in block.code.splitlines() if "$ " in line.split(" ")[0] + " "]
        found += list(zip(hosts, block.commands(), strict=True))
    return found


def test_the_commands_of_the_page_serve(tmp_path: Path) -> None:
    ports = {"5555": str(free_port())}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_")} | {
        "OCTAVO_PORT": str(free_port()),
        "OCTAVO_METRICS_PORT": "0",
        "OCTAVO_WORKER_METRICS_PORT": "0",
        "OCTAVO_NUM_BLOCKS": "256",
        "OCTAVO_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    running: list[subprocess.Popen[bytes]] = []
    log = tmp_path / "log"

    def start(command: str) -> "subprocess.Popen[bytes]":
        words = shlex.split(command.replace("10.0.0.1", "127.0.0.1").replace("5555", ports["5555"]))
        assert words.pop(0) == "octavo"
        with log.open("ab") as output:
            program = [sys.executable, "-m", "octavo.cli.main", *words]
            return subprocess.Popen(program, cwd=tmp_path, env=environment, stdout=output, stderr=output)

    def succeeds(command: str) -> bool:
        return start(command).wait(120) == 0

    lines = lines_of_page()
    assert {host for host, _ in lines} == {"gateway", "worker", "caller"}
    try:
        for host, command in lines:
            if command.startswith(("octavo gateway ", "octavo worker ")):
                running.append(start(command))
            elif host == "caller":
                until = time.monotonic() + START_S
                while not (has_succeeded := succeeds(command)) and time.monotonic() < until:
                    assert all(process.poll() is None for process in running), log.read_text()
                    time.sleep(0.5)
                assert has_succeeded, log.read_text()
            else:
                assert succeeds(command), log.read_text()
        assert len(running) == 2
    finally:
        for process in reversed(running):
            process.terminate()
        for process in running:
            process.wait(60)


def test_gateways_join_and_leave_by_a_file_while_a_worker_serves(tmp_path: Path) -> None:
    doors, ports = [free_port() for _ in range(2)], [free_port() for _ in range(2)]
    environment = clean_environment() | {"OCTAVO_REGISTRATION_TOKEN": "a-word", "OCTAVO_METRICS_PORT": "0"}
    gateways = tmp_path / "gateways"
    running: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> None:
        with (tmp_path / "log").open("ab") as output:
            program = [sys.executable, "-m", "octavo.cli.main", *words]
            running.append(subprocess.Popen(program, cwd=tmp_path, env=environment, stdout=output, stderr=output))

    def start_gateway(n: int) -> None:
        start("gateway", f"--port={ports[n]}", f"--worker-endpoint=tcp://127.0.0.1:{doors[n]}")

    def list_gateways(*numbers: int) -> None:
        fresh = gateways.with_suffix(".new")
        fresh.write_text("".join(f"tcp://127.0.0.1:{doors[n]}\n" for n in numbers))
        fresh.replace(gateways)

    def serves(n: int) -> Callable[[], bool]:
        def asked() -> bool:
            with Client(f"127.0.0.1:{ports[n]}", options=(("grpc.enable_retries", 0),)) as client:
                try:
                    answer = client.complete(token_ids=[5], max_tokens=4, output="token_ids")
                except OctavoError:
                    return False
                return len(answer.token_ids) == 4

        return asked

    try:
        list_gateways(0)
        start_gateway(0)
        start("worker", "--runner=oracle", f"--gateway-endpoints-file={gateways}", "--worker-metrics-port=0")
        wait_for(serves(0))
        start_gateway(1)
        list_gateways(0, 1)
        wait_for(serves(1))
        assert serves(0)()
        list_gateways(1)
        wait_for(lambda: not serves(0)())
        assert serves(1)()
        assert [process.poll() for process in running] == [None] * 3
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait(60)
