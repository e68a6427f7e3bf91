"""Forks compiler processes, prints their process ids, and waits to be killed.

python -m tests.support.worker.forked
"""

import json
import sys
import time

import psutil

from octavo.worker.loading.compilers import CompilerProcesses
from octavo.worker.shutdown import Shutdown

SIZE = 3
PATIENCE_S = 60.0


def main() -> None:
    """See the module."""
    Shutdown(grace_s=0.0).install()  # a worker has it at this point
    helpers = CompilerProcesses.fork(SIZE, wake=lambda: None, answer=lambda request: None)
    assert helpers is not None
    deadline_s = time.monotonic() + PATIENCE_S
    family: list[psutil.Process] = []
    while len(family) < SIZE + 1 and time.monotonic() < deadline_s:
        family = psutil.Process().children(recursive=True)
        time.sleep(0.01)
    assert helpers.ask(b"anything")
    json.dump([each.pid for each in family], sys.stdout)
    sys.stdout.write("\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
