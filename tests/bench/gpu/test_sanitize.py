"""Kernel tests under compute-sanitizer: in small processes, each told as it ends, none waited for without end. A script
stands for the tool."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from bench.gpu import sanitize

TOOL = """#!/bin/sh
tool=$2
while [ "$1" != "$PYTHON" ]; do shift; done
case "$*" in *planted*) echo "ERROR SUMMARY: 1 error"; exit 99;; esac
echo "$tool $*" >> "$CALLS"
"$@"
echo "ERROR SUMMARY: 0 errors"
"""
CASES = """
import pytest
@pytest.mark.parametrize("size", range(7))
def test_one(size): pass
def test_other(): pass
@pytest.mark.skip
def test_skipped(): pass
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the tool was called for."""
    tool = tmp_path / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text(TOOL)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setattr(sanitize, "REPOSITORY", tmp_path)
    (tmp_path / "test_cases.py").write_text(CASES)
    return tmp_path / "calls"


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["sanitize", "--jobs=2", "test_cases.py", *words])
    with pytest.raises(SystemExit) as ended:
        sanitize.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_racecheck_gets_few_cases_in_small_processes(
    calls: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sanitize, "TESTS_OF_A_PROCESS", {"memcheck": 6, "racecheck": 3})
    assert run(monkeypatch, "--cases=3") == 0
    ran = [(line.split()[0], line.count("::"), line.count("test_one")) for line in calls.read_text().splitlines()]
    assert sorted(ran) == [("memcheck", 3, 1), ("memcheck", 6, 6), ("racecheck", 2, 0), ("racecheck", 3, 3)]
    assert "test_one[6]" in calls.read_text()
    assert "4 of 4 runs clean" in capsys.readouterr().out


def test_what_the_time_does_not_allow_is_told(
    calls: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--seconds=0", "--tools", "memcheck") == 1
    told = capsys.readouterr().out
    assert "NOT RUN, time is over" in told
    assert "test_cases.py: not one of its tests passed" in told


def test_a_process_that_does_not_end_is_killed_with_what_it_started(calls: Path, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    wait = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    found = sanitize.run(str(tmp_path / "bin/compute-sanitizer"), "memcheck", "f", [sys.executable, "-c", wait], 5.0)
    assert not found.is_clean
    assert found.outcome == "no end after 5 s"
    if pid_file.exists():  # on a slow machine it had not begun
        until(lambda: has_ended(int(pid_file.read_text())))


def until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def has_ended(pid: int) -> bool:
    """Nobody may have looked after it yet."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True
