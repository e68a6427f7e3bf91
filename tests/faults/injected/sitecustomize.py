"""Faults inside the processes of a real service: Python imports this first where its folder is on PYTHONPATH.

``FAULTS_INJECTED`` holds JSON. In worker processes, their runner alone:

    crash_token_id     a prompt with it ends the process, status 139, as a crash in native code would
    nan_token_id       a prompt with it turns not-a-number at output index nan_output_index
    hang_token_id      a prompt with it keeps a step busy for ever
    seize_token_id     the same, and Python's lock is held all the time, so that no other thread of the process runs
    load_sleep_s       loading takes so long; load_raises: and fails then
    hold_file          while this file is there, the tenth step from then on does not begin: FILE.PID tells
    marked             a prompt that begins with 2 and then 11, 12, 13, 14 or 15 does one of these: crash, nan (at
                       nan_output_index), raise, oom, seize

In gateway processes:

    connection         fields of ConnectionConfig that no setting has, and their values
    partial_margin_s   so long before the wire's deadline a partial output ends

In all processes:

    clock_file         a file with the seconds by which the wall clock is ahead (`clock`)
    leak_in            the processes with this word (gateway, worker) keep leak_mib_per_h
"""

import json
import os
import re
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import clock

MARKS = {(2, 11): "crash", (2, 12): "nan", (2, 13): "raise", (2, 14): "oom", (2, 15): "seize"}


def _inject(wanted: dict[str, Any]) -> None:
    from octavo.worker.loading import loaded
    from octavo.worker.runners.interface import RunnerError, RunnerOutOfMemory
    from octavo.worker.runners.oracle import runner

    known = {name: wanted[name] for name in ("crash_token_id", "nan_token_id", "nan_output_index") if name in wanted}

    class FaultyRunner(runner.OracleRunner):
        def __init__(self, *positional: Any, **named: Any) -> None:
            time.sleep(wanted.get("load_sleep_s", 0.0))
            if "load_raises" in wanted:
                raise RuntimeError(wanted["load_raises"])
            super().__init__(*positional, **(named | {"faults": runner.OracleFaults(**known)}))
            self._num_steps = 0  # since there is a file to hold for

        def launch(self, plan: Any) -> None:
            joined = {token for join in plan.new_requests for token in join.token_ids_T.tolist()}
            while wanted.get("hang_token_id") in joined:
                pass
            if wanted.get("seize_token_id") in joined:
                re.match(r"(a+)+$", "a" * 64 + "b")  # native code, exponential, never lets go of the lock
            if wanted.get("marked"):
                self._act_on(plan)
            if "hold_file" in wanted:
                self._hold(Path(wanted["hold_file"]))
            super().launch(plan)

        def _hold(self, file: Path) -> None:
            self._num_steps = self._num_steps + 1 if file.exists() else 0
            while self._num_steps >= 10 and file.exists():
                file.with_suffix(f".{os.getpid()}").touch()
                time.sleep(0.01)

        def _act_on(self, plan: Any) -> None:
            acts = {MARKS.get(tuple(join.token_ids_T[:2].tolist())) for join in plan.new_requests}
            if "crash" in acts:
                os._exit(139)
            if "raise" in acts:
                raise RunnerError("illegal memory access (injected)")
            if "oom" in acts:
                raise RunnerOutOfMemory("out of memory (injected)")
            if "seize" in acts:
                re.match(r"(a+)+$", "a" * 64 + "b")

        def _new_row(self, join: Any) -> Any:
            row = super()._new_row(join)
            if wanted.get("marked") and MARKS.get(tuple(row.token_ids[:2])) == "nan":
                row.has_nan_token = True
            return row

    loaded.OracleRunner = FaultyRunner


def _change_gateway(wanted: dict[str, Any]) -> None:
    from octavo.gateway import config
    from octavo.gateway.requests import input_processor

    defaults = config.ConnectionConfig.__init__.__kwdefaults__
    assert wanted.get("connection", {}).keys() <= defaults.keys()
    defaults.update(wanted.get("connection", {}))
    margin_s = input_processor.PARTIAL_MARGIN_S
    input_processor.PARTIAL_MARGIN_S = wanted.get("partial_margin_s", margin_s)


def _leak(mib_per_h: float) -> None:
    kept = list[bytes]()

    def grow() -> None:
        while True:
            time.sleep(0.1)
            kept.append(os.urandom(round(mib_per_h * 1048576 / 36000)))

    threading.Thread(target=grow, daemon=True, name="leak").start()


def _inject_all(wanted: dict[str, Any]) -> None:
    if "clock_file" in wanted:
        clock.follow(Path(wanted["clock_file"]))
    if "worker" in sys.orig_argv and wanted:
        _inject(wanted)
    if "gateway" in sys.orig_argv and wanted.keys() & {"connection", "partial_margin_s"}:
        _change_gateway(wanted)
    if wanted.get("leak_in") in sys.orig_argv[:6]:
        _leak(wanted["leak_mib_per_h"])


try:
    _inject_all(json.loads(os.environ.get("FAULTS_INJECTED", "{}")))
except Exception:  # Python would go on without the faults, and the test would prove nothing
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(70)
