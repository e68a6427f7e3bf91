"""`make check`: the test files that take least, as many as a budget of seconds allows; and what each file takes.

tests/seconds.json has the seconds of every test file, as `make test` saw them last. It writes a file's figure anew
where that has more than doubled or halved, so the choice follows the tests by itself. A file that moved to another
folder keeps its figure; one without a figure is new, or has a new name: it is run.
"""

import argparse
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import ALONE

TESTS = Path(__file__).resolve().parent
SECONDS = TESTS / "seconds.json"
BUDGET_S = 20.0  # of all files together; importing what they test takes several times as long
DEFAULT_S = 1.0  # of a file that is not measured yet
SAME_WITHIN = 2.0  # seconds differ from run to run; only a change beyond this factor is written
TOO_LITTLE_S = 1.0  # below this, a change of the factor is none
MARKS = "not gpu and not alone and not slow and not long"


def known(seconds: dict[str, float], files: list[str]) -> dict[str, float]:
    """The figures of these files. One that moved to another folder is known by its name."""
    gone = [file for file in seconds if file not in files]
    by_name = Counter(Path(file).name for file in gone)
    moved = {Path(file).name: seconds[file] for file in gone if by_name[Path(file).name] == 1}
    found = {file: seconds.get(file, moved.get(Path(file).name)) for file in files}
    return {file: figure for file, figure in found.items() if figure is not None}


def choose(seconds: dict[str, float], files: list[str], budget_s: float) -> tuple[list[str], list[str]]:
    """Files to run and files to leave out: the quicker first, until the budget is spent."""
    figures = known(seconds, files)
    chosen, spent_s = [], 0.0
    for file in sorted(files, key=lambda file: (figures.get(file, 0.0), file)):
        spent_s += figures.get(file, DEFAULT_S)
        if spent_s > budget_s:
            break
        chosen.append(file)
    return sorted(chosen), sorted(set(files) - set(chosen))


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


def together() -> list[str]:
    """Those that may run beside others, without the clients and gateways of others (`make test-interop`)."""
    return [file for file in test_files() if not any(Path(file).is_relative_to(each) for each in (*ALONE, "interop"))]


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
        figures = renewed(read_seconds(), dict(self._measured), test_files())
        SECONDS.write_text(json.dumps(figures, indent=1) + "\n")


def main() -> int:
    """Runs the fast tests and says what was left out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds of all files together")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    arguments = parser.parse_args()
    chosen, _ = choose(read_seconds(), together(), arguments.budget)
    left_out = set(test_files()) - set(chosen)
    paths = [str(TESTS / file) for file in chosen]
    command = [sys.executable, "-m", "pytest", "-m", MARKS, "-n", "2", "--dist", "loadfile", *arguments.pytest, *paths]
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
