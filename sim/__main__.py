"""``python -m sim --seeds 0:1000``: simulate each seed twice and say what was seen. Exit code 1 for any violation."""

import argparse
import gc
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path

from sim.journal import Report
from sim.scenario import load, save
from sim.shrink import shrink, simulate_twice
from sim.swarm import scenario_of
from sim.totals import OtherRun, Progress, Results, Totals

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
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--results", type=Path, help="a file with a line for each seed; seeds that it has are not run")
    parser.add_argument("--shrink", action="store_true", help=f"reduce a failing seed to a small file in {KEPT}")
    parser.add_argument("--file", type=Path, help="a kept reproduction instead of seeds")
    return parser.parse_args()


def _run(seeds: range, options: argparse.Namespace) -> int:
    totals, progress = Totals(), Progress(len(seeds))
    try:
        results = Results(options.results, num_requests=options.requests) if options.results else None
    except OtherRun as error:
        _say(f"error: {error}")
        return 2
    is_whole = False
    with suppress(KeyboardInterrupt):
        for report in _all_reports(seeds, options, results):
            totals.add(report)
            for violation in report.violations[:5]:
                progress.say(f"seed {report.seed}: {violation[:500]}")
            if report.violations and options.shrink:
                _keep(report.seed, options.requests)
            progress.show(totals)
        is_whole = True
    progress.close()
    _say(totals.told(progress.elapsed_s))
    if not is_whole:
        _say(f"interrupted      after {totals.seeds:,} of {len(seeds):,} seeds")
    return bool(totals.failed) if is_whole else 130


def _all_reports(seeds: range, options: argparse.Namespace, results: Results | None) -> Iterator[Report]:
    kept = results.kept if results else {}
    yield from (kept[seed] for seed in seeds if seed in kept)
    for report in _reports([seed for seed in seeds if seed not in kept], options.requests, options.jobs):
        if results:
            results.add(report)
        yield report


def _reports(seeds: list[int], num_requests: int, jobs: int) -> Iterator[Report]:
    """In the order in which they are done."""
    if jobs == 1:
        _collect_rarely()
        yield from (_one(seed, num_requests) for seed in seeds)
        return
    processes = ProcessPoolExecutor(jobs, initializer=_begin_process)
    try:
        for done in as_completed([processes.submit(_one, seed, num_requests) for seed in seeds]):
            yield done.result()
    finally:
        processes.shutdown(wait=False, cancel_futures=True)


def _begin_process() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's business
    _collect_rarely()


def _collect_rarely() -> None:
    gc.collect()
    gc.freeze()  # modules are nothing that each collection need look at
    gc.set_threshold(50_000, 20, 20)


def _one(seed: int, num_requests: int) -> Report:
    return simulate_twice(scenario_of(seed, num_requests=num_requests))


def _keep(seed: int, num_requests: int) -> None:
    small = shrink(scenario_of(seed, num_requests=num_requests))
    path = KEPT / f"seed-{seed}.json"
    KEPT.mkdir(parents=True, exist_ok=True)
    save(small, path)
    _say(f"seed {seed}: {len(small.requests)} requests and {len(small.faults)} faults are enough: {path}")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
