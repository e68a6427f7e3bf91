"""The kernel tests under compute-sanitizer: memcheck (reads and writes out of bounds, or misaligned) and racecheck
(hazards in shared memory). `make sanitize-gpu`, or

    python -m bench.gpu.sanitize [--tools memcheck racecheck] [--jobs 8] [--timeout 500] [--seconds 3000]
        [--cases 2] [--select EXPRESSION] [FILES]

First a control: kernels with a planted mistake (bench/gpu/planted.py), which the tools must find. Then every test file
goes to each tool, in processes of a few tests each: racecheck takes minutes for what memcheck does in seconds, so that
of each test function it gets --cases of its cases. torch's caching allocator is off, so that a step behind an
allocation is seen. The tests run once without the tool before, which compiles the kernels. The exit code is 1 where an
error was found, a control was missed or a process did not end well within --timeout, and all within --seconds. Prints a
line for each process as it ends, and the logs of those that are not clean; writes nothing.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PLACES = ("/usr/local/cuda/bin/compute-sanitizer", "/opt/nvidia/compute-sanitizer/compute-sanitizer")
SUMMARIES = (
    re.compile(r"ERROR SUMMARY: (\d+) error"),
    re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed"),
)
# float32 goes through the same sources, by far more instructions, and every instrumented one is slow.
SELECTION = "not dtype0"
TESTS_OF_A_PROCESS = {"memcheck": 12, "racecheck": 3}
"""Those of Hopper's own kernels take up to 20 s each under racecheck."""
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-o", "addopts=", "-W", "ignore")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Of one process. num_errors: as the tool counted them; None where it did not come to that."""

    tool: str
    file: str
    num_errors: int | None
    outcome: str
    seconds: float
    log: str

    @property
    def is_clean(self) -> bool:
        """Tests passed or were skipped, the tool found nothing."""
        return (
            self.num_errors == 0 and re.search(r" (passed|skipped)", self.outcome) is not None and not self.has_failed
        )

    @property
    def has_failed(self) -> bool:
        """A test."""
        return re.search(r" (failed|error)", self.outcome) is not None


def find_sanitizer() -> str:
    """Its path. Raises SystemExit saying where it comes from."""
    found = shutil.which("compute-sanitizer") or next((place for place in PLACES if Path(place).exists()), None)
    if found is None:
        raise SystemExit("error: there is no compute-sanitizer; it is part of the CUDA toolkit")
    return found


def pytest_command(*tests: str) -> list[str]:
    """Of these tests."""
    return [sys.executable, *PYTEST, *tests]


def collect(file: str, select: str) -> list[str]:
    """The tests of a file, as pytest names them. Raises SystemExit where it cannot."""
    command = [*pytest_command(file), "--collect-only", *(["-k", select] if select else [])]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    tests = [line for line in done.stdout.splitlines() if line.startswith(f"{file}::")]
    if not tests:
        raise SystemExit(f"error: {file} has no tests to run:\n{(done.stdout + done.stderr)[-2000:]}")
    return tests


def few(tests: list[str], cases: int) -> list[str]:
    """Of each test function at most so many of its cases, from its first to its last."""
    functions: dict[str, list[str]] = {}
    for test in tests:
        functions.setdefault(test.partition("[")[0], []).append(test)
    return [
        each[at * (len(each) - 1) // max(1, num - 1)]
        for each in functions.values()
        for num in [min(cases, len(each))]
        for at in range(num)
    ]


def shares(tests: list[str], tool: str, cases: int) -> Iterator[list[str]]:
    """What each process of the tool runs."""
    chosen = few(tests, cases) if tool == "racecheck" else tests
    size = TESTS_OF_A_PROCESS.get(tool, len(chosen))
    return (chosen[at : at + size] for at in range(0, len(chosen), size))


def run(sanitizer: str, tool: str, file: str, command: list[str], timeout_s: float) -> Finding:
    """One process. file: what the command is about."""
    options = ["--tool", tool, "--error-exitcode", "99", "--print-limit", "20"]
    start_s = time.monotonic()
    if timeout_s <= 0:
        return Finding(tool=tool, file=file, num_errors=None, outcome="NOT RUN, time is over", seconds=0, log="")
    with subprocess.Popen(
        [sanitizer, *options, *command],
        cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    ) as process:  # fmt: skip
        try:
            log, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # what the tool runs is a child of it, which has the pipe open
            log = f"{process.communicate()[0]}\nno end after {timeout_s:.0f} s"
    counts = [int(found.group(1)) for pattern in SUMMARIES for found in pattern.finditer(log)]
    ends = [
        line for line in log.splitlines() if re.search(r"\d+ (passed|failed|skipped|deselected)|no end after", line)
    ]
    return Finding(
        tool=tool,
        file=file,
        num_errors=sum(counts) if counts else None,
        outcome=ends[-1] if ends else log[-200:],
        seconds=time.monotonic() - start_s,
        log=log,
    )


def check_controls(sanitizer: str, tools: list[str], timeout_s: float) -> list[str]:
    """Tools that did not find the mistake planted for them."""
    missed = []
    for tool in tools:
        found = run(sanitizer, tool, "planted", [sys.executable, "-m", "bench.gpu.planted", tool], timeout_s)
        print(f"control: {tool} found {found.num_errors} of what was planted", flush=True)
        if not found.num_errors:
            missed.append(tool)
            print(found.log[-3000:])
    return missed


def compile_kernels(tests: list[list[str]], jobs: int) -> None:
    """Run the tests once without the tool."""
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda each: subprocess.run(pytest_command(*each), cwd=REPOSITORY, check=False), tests))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--tools", nargs="+", default=["memcheck", "racecheck"])
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--timeout", type=float, default=500.0, help="of a process, in seconds")
    parser.add_argument(
        "--seconds", type=float, default=3000.0, help="of all: what has not ended then counts as failed"
    )
    parser.add_argument("--cases", type=int, default=2, help="of each test function under racecheck")
    parser.add_argument("--select", default=SELECTION)
    return parser.parse_args()


def main() -> None:
    """Print a line for each process as it ends, and the logs of those that are not clean."""
    arguments = parse()
    end_s = time.monotonic() + arguments.seconds
    sanitizer = find_sanitizer()
    files = arguments.files or sorted(
        str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "tests/model/kernels").glob("test_*.py")
    )
    missed = check_controls(sanitizer, arguments.tools, min(arguments.timeout, arguments.seconds))
    findings = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        tests = dict(zip(files, pool.map(lambda file: collect(file, arguments.select), files), strict=True))
        work = {
            tool: [(file, share) for file in files for share in shares(tests[file], tool, arguments.cases)]
            for tool in arguments.tools
        }
        compile_kernels([share for _, share in work.get("memcheck") or work[arguments.tools[0]]], arguments.jobs)

        def check(tool: str, file: str, share: list[str]) -> Finding:
            left_s = min(arguments.timeout, end_s - time.monotonic())
            return run(sanitizer, tool, file, pytest_command(*share), left_s)

        # The slow tool first, so that its last process is not waited for alone.
        in_turn = chain.from_iterable([(tool, *each) for each in work[tool]] for tool in sorted(work, reverse=True))
        for each in as_completed([pool.submit(check, *task) for task in in_turn]):
            found = each.result()
            findings.append(found)
            mark = "ok " if found.is_clean else "NO "
            told = f"{found.num_errors} errors, {found.outcome.strip()}, {found.seconds:.0f} s"
            print(f"{mark} {found.tool:10s} {found.file:52s} {told}", flush=True)
            if not found.is_clean:
                print(found.log[-6000:], flush=True)
    unclean = [found for found in findings if not found.is_clean]
    untested = {file for file in files if not any(" passed" in each.outcome for each in findings if each.file == file)}
    for file in sorted(untested):
        print(f"NO {file}: not one of its tests passed")
    print(f"{len(findings) - len(unclean)} of {len(findings)} runs clean: {', '.join(arguments.tools)}")
    raise SystemExit(1 if unclean or untested or missed else 0)


if __name__ == "__main__":
    main()
