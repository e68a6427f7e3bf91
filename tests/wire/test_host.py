"""Cores that a container leaves, by either version of cgroups."""

import os
from pathlib import Path

import pytest

from octavo.wire.host import usable_cores

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
