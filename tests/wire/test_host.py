"""What a host leaves to a process: cores, by either version of cgroups, and threads."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from octavo.wire import host
from octavo.wire.host import threads_to_be_had, usable_cores

EVERY = len(os.sched_getaffinity(0))
QUOTAS = [("100000", 1), ("20000", 1), (str(10**9), EVERY)]


@pytest.mark.parametrize(("granted", "wanted"), [("max", EVERY), *QUOTAS])
def test_a_containers_quota_limits_the_cores(granted: str, wanted: int, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text(f"{granted} 100000\n")
    assert usable_cores(tmp_path) == wanted


@pytest.mark.parametrize(("granted", "wanted"), [("-1", EVERY), *QUOTAS])
def test_so_does_that_of_the_first_version(granted: str, wanted: int, tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(f"{granted}\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores(tmp_path) == wanted


def test_without_cgroups_all_cores_are_usable(tmp_path: Path) -> None:
    assert usable_cores(tmp_path / "none") == EVERY


def test_threads_are_counted_by_starting_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert threads_to_be_had(5) == 5
    two = "import sys, threading; start, n = threading.Thread.start, []\n"
    two += (
        'def no(self):\n    if len(n) == 2: raise RuntimeError("can\'t start new thread")\n    n.append(start(self))\n'
    )
    monkeypatch.setattr(host, "_COUNT_THREADS", two + "threading.Thread.start = no\n" + host._COUNT_THREADS)
    assert threads_to_be_had(5) == 2


@pytest.mark.parametrize(("error", "had"), [(BlockingIOError(11, "fork"), 0), (OSError(12, "no memory"), 5)])
def test_a_host_without_another_process_has_no_threads(
    error: OSError, had: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(subprocess, "run", fail)
    assert threads_to_be_had(5) == had
