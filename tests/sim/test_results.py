"""What many seeds gave, kept in a file."""

from collections import Counter
from pathlib import Path

import pytest

from sim.journal import Report
from sim.totals import OtherRun, Results

REPORT = Report(
    seed=7,
    trace="ab",
    violations=("a", "b"),
    virtual_s=1.5,
    requests=3,
    tokens=2,
    steps=1,
    checks=9,
    faults=Counter(crash=2),
)


def test_reports_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "new" / "seeds.jsonl"
    Results(path, num_requests=10).add(REPORT)
    assert Results(path, num_requests=10).kept == {7: REPORT}


def test_a_file_of_another_size_is_refused(tmp_path: Path) -> None:
    Results(tmp_path / "f", num_requests=10).add(REPORT)
    with pytest.raises(OtherRun, match='"requests": 11'):
        Results(tmp_path / "f", num_requests=11)
