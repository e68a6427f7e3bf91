"""Runs parts of a bench as processes of their own, so that one that fails or hangs does not affect the others.

Must not know: what they measure.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

LIMIT_S = 580.0
LAST_LINES = 15
DUMP_S = 3.0
"""How long processes may take to write their stacks."""


def turn(module: str, words: list[str], *, limit_s: float = LIMIT_S, errors: Path | None = None) -> dict[str, Any]:
    """Run `python -m MODULE WORDS --limit-s=… --turn=FILE` in a process of its own. Returns its figures or, if it does
    not finish, those that it had, with {"failed": why}. Nothing that it started is left. errors: a file for its whole
    stderr."""
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder:
        out, errors = Path(folder) / "turn.json", errors or Path(folder) / "errors.log"
        command = [sys.executable, "-m", module, *words, f"--limit-s={limit_s}"]
        errors.parent.mkdir(parents=True, exist_ok=True)
        with errors.open("wb") as said:
            process = subprocess.Popen([*command, "--turn", str(out)], stderr=said, env=_environment())
            try:
                failed = None if process.wait(limit_s) == 0 else f"ended with {process.returncode}"
            except subprocess.TimeoutExpired:
                failed = f"not done in {limit_s:g} s"
            finally:
                _end_family(process)
        found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
        if failed is None and found:
            return found
        last = [line.rstrip() for line in errors.read_text(errors="replace").splitlines() if line.strip()]
        return found | {"failed": "\n".join([failed or "told nothing", *last[-LAST_LINES:]])}


def _environment() -> dict[str, str]:
    """The environment in which processes that are aborted write their threads' stacks, but no gigabytes of core
    dumps."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    return {**os.environ, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}


def _end_family(process: "subprocess.Popen[bytes]") -> None:
    """End the process and all that it started, children first, making each write its stacks: one after the other, since
    they write to the same file."""
    if process.poll() is not None:
        return
    family = psutil.Process(process.pid)
    members = family.children(recursive=True)
    for member in members:
        with suppress(psutil.NoSuchProcess):
            member.send_signal(signal.SIGABRT)
            psutil.wait_procs([member], timeout=DUMP_S)
    with suppress(subprocess.TimeoutExpired):
        process.send_signal(signal.SIGABRT)
        process.wait(DUMP_S)
    for member in members:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.kill()
    process.wait()
