"""Ports that tests are given are theirs: `tests.support.services.service.free_port`."""

import json
import subprocess
import sys
from pathlib import Path

from tests.support.services.service import free_port

NUM_PROCESSES, NUM_PORTS = 3, 200
ASK = f"""
import json
from tests.support.services.service import free_port
print(json.dumps([free_port() for _ in range({NUM_PORTS})]), flush=True)
input()
"""


def test_processes_side_by_side_are_never_given_the_same_port(repository: Path) -> None:
    """Nor is one that a process was given, and has not bound yet, given to another."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", ASK], cwd=repository, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(NUM_PROCESSES)
    ]
    try:
        given = [port for each in processes if each.stdout for port in json.loads(each.stdout.readline())]
        given += [free_port() for _ in range(NUM_PORTS)]
    finally:
        for each in processes:
            each.communicate("\n", timeout=60)
    assert len(set(given)) == len(given) == (NUM_PROCESSES + 1) * NUM_PORTS
    assert all(12_000 <= port < 32_000 for port in given)
