"""``python -m sim --seeds 0:1000``: simulate each seed twice and say what was seen. Exit code 1 for any violation."""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from sim.journal import Report
from sim.scenario import load, save
from sim.shrink import shrink
from sim.swarm import scenario_of
from sim.twice import simulate_twice

KEPT = Path("tests/sim/regressions")


def main() -> int:
    """The command."""
    options = _options()
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets of strings must have one order in every process
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "sim", *sys.argv[1:]])
    if options.file:
        report = simulate_twice(load(options.file))
        _say("\n".join(report.violations) or "no violations")
        return bool(report.violations)
    first, _, last = options.seeds.partition(":")
    seeds = range(int(first), int(last)) if last else range(int(first), int(first) + 1)
    return _run(seeds, options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m sim", description=__doc__)
    parser.add_argument("--seeds", default="0:100", help="FIRST:END, or one seed")
    parser.add_argument("--requests", type=int, default=1000, help="callers of each seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--shrink", action="store_true", help=f"reduce a failing seed to a small file in {KEPT}")
    parser.add_argument("--file", type=Path, help="a kept reproduction instead of seeds")
    return parser.parse_args()


def _run(seeds: range, options: argparse.Namespace) -> int:
    totals, started_s, last_said_s = _Totals(), time.monotonic(), time.monotonic()
    for report in _reports(seeds, options.requests, options.jobs):
        totals.add(report)
        for violation in report.violations[:5]:
            _say(f"seed {report.seed}: {violation[:500]}")
        if report.violations and options.shrink:
            _keep(report.seed, options.requests)
        if time.monotonic() - last_said_s > 20:
            last_said_s = time.monotonic()
            _say(
                f"… {totals.seeds} of {len(seeds)} seeds, {totals.counts['requests']:,} requests, "
                f"{totals.failed} failed, {last_said_s - started_s:.0f} s"
            )
    _say(totals.told(time.monotonic() - started_s))
    return bool(totals.failed)


def _reports(seeds: range, num_requests: int, jobs: int) -> Iterator[Report]:
    if jobs == 1:
        yield from (_one(seed, num_requests) for seed in seeds)
        return
    with ProcessPoolExecutor(jobs) as processes:
        yield from processes.map(_one, seeds, [num_requests] * len(seeds))


def _one(seed: int, num_requests: int) -> Report:
    return simulate_twice(scenario_of(seed, num_requests=num_requests))


def _keep(seed: int, num_requests: int) -> None:
    small = shrink(scenario_of(seed, num_requests=num_requests))
    path = KEPT / f"seed-{seed}.json"
    KEPT.mkdir(parents=True, exist_ok=True)
    save(small, path)
    _say(f"seed {seed}: {len(small.requests)} requests and {len(small.faults)} faults are enough: {path}")


class _Totals:
    """Over all seeds; each seed's first run is counted, its repetition is not."""

    def __init__(self) -> None:
        self.seeds = self.failed = 0
        self.virtual_s = 0.0
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.points: Counter[str] = Counter()

    def add(self, report: Report) -> None:
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


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
