"""The reports of many seeds in a file, one line each, so that an interrupted run goes on where it was.

A file belongs to one state of the sources and one size of scenario: what another code did proves nothing of this one.
"""

import hashlib
import json
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

from sim.journal import Report

_ROOT = Path(__file__).parent.parent
_PACKAGES = ("blockmgr", "gateway", "grammar", "sim", "wire", "worker")


class OtherRun(Exception):
    """The file is of other sources, or of another size."""


def digest_of_sources() -> str:
    """Of all Python that a simulation can run."""
    digest = hashlib.sha256()
    for package in _PACKAGES:
        for path in sorted((_ROOT / package).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class Results:
    """kept: the reports that were in the file, by seed. Raises OtherRun."""

    def __init__(self, path: Path, *, num_requests: int) -> None:
        self._path = path
        header = {"sources": digest_of_sources(), "requests": num_requests}
        first, *lines = path.read_text().splitlines() if path.exists() else [""]
        if first and json.loads(first) != header:
            raise OtherRun(f"{path} is of {first}, this is {json.dumps(header)}")
        if not first:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(header) + "\n")
        self.kept = {report.seed: report for report in map(_report_of, lines)}

    def add(self, report: Report) -> None:
        """One more seed is done."""
        with self._path.open("a") as file:
            file.write(json.dumps({field.name: getattr(report, field.name) for field in fields(report)}) + "\n")


def _report_of(line: str) -> Report:
    told: dict[str, Any] = json.loads(line)
    told |= {name: Counter(told[name]) for name in ("faults", "outcomes", "points")}
    told |= {name: tuple(told[name]) for name in ("violations", "story")}
    return Report(**told)
