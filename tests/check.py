"""`make check`: what holds the repository together, and of the other test files those that take least, as many as a
budget of seconds allows; and what each file takes. Files that import transformers at their top are left out, too.

tests/seconds.json has the seconds of every test file that `make test` runs. `pytest --record-seconds`, and so `make
test`, writes a file's figure where there is none, or where it has more than doubled or halved: the choice follows the
tests by itself. A file that moved to another folder keeps its figure. Where several processes share the files, the
longest are begun first (tests/conftest.py).
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conftest import is_alone

TESTS = Path(__file__).resolve().parent
SECONDS = TESTS / "seconds.json"
ALWAYS = ("cli/serve/test_preflight.py", "docs", "structure", "test_*.py")  # a change anywhere may break these
ASKED_FOR = ("cluster", "gpu", "interop", "faults/test_long_*.py")  # `make test` leaves them to targets of their own
BUDGET_S = 6.0  # of the files beside those above; importing what they test takes several times as long
DEFAULT_S = 1.0  # of a file that is not measured yet
HEAVY_IMPORT = re.compile(r"^(?:from |import |transformers = .*\")transformers\b", re.MULTILINE)  # 4 s, in no figure
SAME_WITHIN = 2.0  # seconds differ from run to run; only a change beyond this factor is written
TOO_LITTLE_S = 1.0  # below this, a change of the factor is none
MAX_PROCESSES = 4  # each imports everything anew
MARKS = "not gpu and not alone and not slow and not long"


def known(seconds: dict[str, float], files: list[str]) -> dict[str, float]:
    """The figures of these files. One that moved to another folder is known by its name."""
    gone = [file for file in seconds if file not in files]
    by_name = Counter(Path(file).name for file in gone)
    moved = {Path(file).name: seconds[file] for file in gone if by_name[Path(file).name] == 1}
    found = {file: seconds.get(file, moved.get(Path(file).name)) for file in files}
    return {file: figure for file, figure in found.items() if figure is not None}


def choose(seconds: dict[str, float], files: list[str], budget_s: float) -> tuple[list[str], list[str]]:
    """Files to run and files to leave out: ALWAYS, and of the others the quicker until the budget is spent."""
    figures = known(seconds, files)
    chosen, spent_s = [file for file in files if lies_in(file, ALWAYS)], 0.0
    for file in sorted(set(files) - set(chosen), key=lambda file: (figures.get(file, 0.0), file)):
        spent_s += figures.get(file, DEFAULT_S)
        if spent_s > budget_s:
            break
        chosen.append(file)
    return sorted(chosen), sorted(set(files) - set(chosen))


def lies_in(file: str, places: Sequence[str]) -> bool:
    """Whether a file is, or is in, one of these, which may have a pattern for a name."""
    path = Path(file)
    return any(path.is_relative_to(each) or (path.parent == Path(each).parent and path.match(each)) for each in places)


def longest_first(items: list[pytest.Item], seconds: dict[str, float]) -> None:
    """Sort tests by what their files take; a file's stay in their order, and what has no figure comes last."""
    items.sort(key=lambda item: -seconds.get(str(item.path.relative_to(TESTS)), 0.0))


def renewed(before: dict[str, float], measured: dict[str, float], files: list[str]) -> dict[str, float]:
    """The figures to keep: of files that exist, the new one only where it tells something new."""
    kept = known(before, files)
    for file, figure in measured.items():
        old = kept.get(file)
        low, high = sorted((max(figure, TOO_LITTLE_S), max(old or 0.0, TOO_LITTLE_S)))
        if old is None or high > low * SAME_WITHIN:
            kept[file] = round(figure, 1)
    return {file: kept[file] for file in sorted(kept) if file in files}


def test_files() -> list[str]:
    """Every file with tests, from the folder of the tests."""
    return sorted(str(path.relative_to(TESTS)) for path in TESTS.rglob("test_*.py"))


def measured_files() -> list[str]:
    """Those that `make test` runs."""
    return [file for file in test_files() if not lies_in(file, ASKED_FOR)]


def together() -> list[str]:
    """Of those, what may run beside others."""
    return [file for file in measured_files() if not is_alone(file)]


def light() -> list[str]:
    """Of those, what does not import for seconds before a test begins."""
    return [file for file in together() if not HEAVY_IMPORT.search((TESTS / file).read_text())]


def read_seconds() -> dict[str, float]:
    """The figures as they are kept."""
    return json.loads(SECONDS.read_text()) if SECONDS.exists() else {}


class Recorder:
    """A pytest plugin that adds up what each file takes and keeps it (`--record-seconds`)."""

    def __init__(self) -> None:
        self._measured: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0].removeprefix("tests/")
        self._measured[file] += report.duration

    def pytest_sessionfinish(self) -> None:
        figures = renewed(read_seconds(), dict(self._measured), measured_files())
        SECONDS.write_text(json.dumps(figures, indent=1) + "\n")


def main() -> int:
    """Runs the fast tests and says what was left out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds of all files together")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    arguments = parser.parse_args()
    chosen, _ = choose(read_seconds(), light(), arguments.budget)
    left_out = set(test_files()) - set(chosen)
    paths = [str(TESTS / file) for file in chosen]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    spread = ["-n", str(min(MAX_PROCESSES, cores)), "--dist", "loadfile", "--no-loadscope-reorder"]
    command = [sys.executable, "-m", "pytest", "-m", MARKS, *spread, *arguments.pytest, *paths]
    status = subprocess.run(command, check=False).returncode
    folders = Counter(Path(file).parts[0] for file in left_out)
    told = ", ".join(f"{folder} {count}" for folder, count in sorted(folders.items()))
    sys.stdout.write(
        f"left out: {len(left_out)} of {len(chosen) + len(left_out)} test files ({told}), "
        "and of the others what is marked gpu, alone, slow or long. `make test` runs them all.\n"
    )
    return status


if __name__ == "__main__":
    sys.exit(main())
