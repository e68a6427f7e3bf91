"""A part of a bench that hangs: what it had, where each of its processes stood, and that none is left."""

from pathlib import Path

import psutil
import pytest

from bench.turns import turn

HANGING = """
import json, subprocess, sys, threading
from pathlib import Path
out = Path(sys.argv[sys.argv.index("--turn") + 1])
if "child" not in sys.argv:
    child = subprocess.Popen([sys.executable, __file__, "child", "--turn", "none"], start_new_session=True)
    out.write_text(json.dumps({"decode 1": {"ms": 1.0}, "pids": [child.pid]}))
def standing_in_%s(): threading.Event().wait()
standing_in_%s()
"""


def test_a_turn_that_hangs_keeps_what_it_had_and_says_where_it_stood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hanging.py").write_text(HANGING.replace("%s", "a_sum"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = turn("hanging", [], limit_s=15.0, errors=tmp_path / "errors.log")
    assert found["decode 1"] == {"ms": 1.0}
    assert found["failed"].startswith("not done in 15 s\n")
    assert len(found["failed"].splitlines()) <= 16
    said = (tmp_path / "errors.log").read_text()
    assert said.count("Fatal Python error: Aborted") == 2
    assert said.count("in standing_in_a_sum") == 2
    (child,) = found["pids"]
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_a_turn_that_tells_nothing_has_failed() -> None:
    assert turn("platform", []) == {"failed": "told nothing"}
