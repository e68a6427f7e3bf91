"""Totals and progress over many seeds, and a file with a line per seed so that an interrupted run can go on.

A bar on a terminal, a line now and then elsewhere.
"""

import hashlib
import json
import sys
import time
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from sim.journal import Report

LINE_EVERY_S = 20.0
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


class Totals:
    """Over all seeds; each seed's first run is counted, its repetition is not."""

    def __init__(self) -> None:
        self.seeds = self.failed = 0
        self.virtual_s = 0.0
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.points: Counter[str] = Counter()

    def add(self, report: Report) -> None:
        """One seed more."""
        self.seeds += 1
        self.failed += bool(report.violations)
        self.virtual_s += report.virtual_s
        self.counts.update(
            requests=report.requests,
            tokens=report.tokens,
            steps=report.steps,
            checks=report.checks,
            violations=len(report.violations),
        )
        self.faults.update(report.faults)
        self.outcomes.update(report.outcomes)
        self.points.update(report.points)

    def told(self, wall_s: float) -> str:
        """The table."""
        counts = self.counts
        lines = [
            f"seeds            {self.seeds:,} (each run twice, traces compared)",
            f"requests         {counts['requests']:,}",
            f"token ids        {counts['tokens']:,} delivered and compared",
            f"engine steps     {counts['steps']:,}",
            f"virtual time     {self.virtual_s / 3600:.1f} h in {wall_s:.0f} s",
            f"invariant checks {counts['checks']:,}",
            f"faults           {self.faults.total():,}: {_told(self.faults)}",
            f"fault points     {_told(self.points)}",
            f"outcomes         {_told(self.outcomes)}",
            f"violations       {counts['violations']:,} in {self.failed} seeds",
        ]
        return "\n".join(lines)


def _told(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counter.most_common())


class Progress:
    """Of so many seeds."""

    def __init__(self, num_seeds: int) -> None:
        self._num_seeds = num_seeds
        self._started_s = self._said_s = time.monotonic()
        self._bar: Bar | None = None
        if sys.stdout.isatty():
            columns = (MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
            self._bar = Bar(*columns, TimeElapsedColumn(), TimeRemainingColumn(), transient=True)
            self._bar.add_task("", total=num_seeds)
            self._bar.start()

    @property
    def elapsed_s(self) -> float:
        """Since the start."""
        return time.monotonic() - self._started_s

    def show(self, totals: Totals) -> None:
        """How far it is."""
        told = f"{totals.counts['requests']:,} requests, {totals.failed} failed"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=totals.seeds, description=told)
        elif time.monotonic() - self._said_s > LINE_EVERY_S:
            self._said_s = time.monotonic()
            left_s = self.elapsed_s / totals.seeds * (self._num_seeds - totals.seeds)
            self.say(
                f"… {totals.seeds} of {self._num_seeds} seeds, {told}, {self.elapsed_s:.0f} s, {left_s:.0f} s left"
            )

    def say(self, line: str) -> None:
        """A line that stays."""
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

    def close(self) -> None:
        """The bar goes."""
        if self._bar is not None:
            self._bar.stop()
