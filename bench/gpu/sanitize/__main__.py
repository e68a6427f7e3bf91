"""The kernel tests under compute-sanitizer: memcheck (reads and writes out of bounds, or misaligned) and racecheck
(hazards in shared memory). `make sanitize-gpu`, or

    python -m bench.gpu.sanitize [--tools memcheck racecheck] [--jobs 16] [--timeout 300] [--seconds 1500]
        [--all] [--table PATH] [FILES]

First a control: kernels with a planted mistake (planted.py), which the tools must find. Then the tests that are marked
for it (launches.py; --all: all of them): small cases, for a tool makes of a second a minute, that still reach every
kernel and each of its branches. They run in processes of a few tests each, once without a tool, which compiles the
kernels and notes which ones each test launches; then under each tool those for which it has something to look at:
racecheck those whose kernels have shared memory. The tools watch this project's kernels alone, by their names, not what
torch does beside them. torch's caching allocator is off under memcheck, so that a step behind an allocation is seen.

Prints a line for each process as it ends, the logs of those that are not clean, and what was covered: each kernel with
its tests and their seconds under each tool, which --table writes as a table. The exit code is 1 where an error was
found, a control was missed, a test failed, a process did not end within --timeout, and all within --seconds, or a
kernel was launched by no test (Hopper's own on another device).
"""

import argparse
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
TESTS, KERNELS = "tests/model/kernels", "model/kernels"
PLACES = ("/usr/local/cuda/bin/compute-sanitizer", "/opt/nvidia/compute-sanitizer/compute-sanitizer")
SUMMARIES = (
    re.compile(r"ERROR SUMMARY: (\d+) error"),
    re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed"),
)
RACE, PLACE = "Race reported between", re.compile(r" in (\w+\.py):(\d+)")
HAND_OVER = re.compile(r"def \w+_kernel\(|    gl\.warp_specialize\($")
"""Lines to which Triton attributes its own code that tells waiting groups of warps what to do. Each of these reads and
writes is between two barriers of the whole thread block (github.com/triton-lang/triton/pull/11324), which racecheck
does not know, so it reports a race."""
TESTS_OF_A_PROCESS, SLOW_TESTS_OF_A_PROCESS = 5, 2
MUCH_SHARED = 65_536
"""Bytes of shared memory that only Hopper's own kernels have."""
CONTROL = "planted"
PLANTED = ("_store_behind_the_end_kernel", "planted_race")
ENDING = "_kernel"
"""The end of the name of every function that is launched."""
NEVER_LAUNCHED = "precompile._kernel"
"""Compiled only to wake the compiler."""
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-o", "addopts=", "-W", "ignore",
          "-p", "bench.gpu.sanitize.launches")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one process. tool: "" if it ran without one. num_errors: as the tool counted them, minus false
    ones; None if it did not get that far. passed: seconds of each test that passed. kernels: for each test, shared
    bytes by kernel name."""

    tool: str
    file: str
    asked: list[str]
    num_errors: int | None
    outcome: str
    seconds: float
    log: str
    passed: dict[str, float] = field(default_factory=dict)
    kernels: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def is_clean(self) -> bool:
        """Whether nothing was found and no test failed; under a tool every test must have passed."""
        if self.tool:
            return self.num_errors == 0 and set(self.asked) <= set(self.passed)
        return re.search(r"\d+ (passed|skipped)", self.outcome) is not None and not re.search(
            r"\d+ (failed|error)|no end after", self.outcome
        )


def find_sanitizer() -> str:
    """The path of compute-sanitizer. If there is none, raises SystemExit saying where to get it."""
    found = shutil.which("compute-sanitizer") or next((place for place in PLACES if Path(place).exists()), None)
    if found is None:
        raise SystemExit("error: there is no compute-sanitizer; it is part of the CUDA toolkit")
    return found


def all_kernels() -> list[str]:
    """The names of all kernels, relative to the kernels' package, as in launches.py."""
    found = []
    for path in sorted((REPOSITORY / KERNELS).rglob("*.py")):
        module = ".".join(path.relative_to(REPOSITORY / KERNELS).with_suffix("").parts)
        functions = [each for each in ast.parse(path.read_text()).body if isinstance(each, ast.FunctionDef)]
        found += [f"{module}.{each.name}" for each in functions if each.name.endswith(ENDING) and is_compiled(each)]
    for path in sorted((REPOSITORY / KERNELS).rglob("*.cu")):
        module = ".".join(path.relative_to(REPOSITORY / KERNELS).with_suffix("").parts)
        found += [f"{module}.{name}" for name in re.findall(rf"(\w+{ENDING})\(", path.read_text())]
    return [name for name in found if name != NEVER_LAUNCHED]


def is_compiled(function: ast.FunctionDef) -> bool:
    """Whether Triton compiles the function, as Gluon or not."""
    return any(re.match(r"(triton|gluon)\.jit", ast.unparse(each)) for each in function.decorator_list)


def pytest_command(*words: str) -> list[str]:
    """The pytest command with these arguments."""
    return [sys.executable, *PYTEST, f"--rootdir={REPOSITORY}", *words]


def collect(files: list[str], *, sanitized: bool) -> dict[str, list[str]]:
    """The tests of each file, as pytest names them. Raises SystemExit if a file has none."""
    command = pytest_command(*files, "--collect-only", *(["--sanitized"] if sanitized else []))
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    tests = {file: [line for line in done.stdout.splitlines() if line.startswith(f"{file}::")] for file in files}
    if not any(tests.values()):
        raise SystemExit(f"error: there are no tests to run:\n{(done.stdout + done.stderr)[-2000:]}")
    return tests


def shares(tests: list[str], size: int) -> Iterator[list[str]]:
    """The tests that each process runs."""
    return (tests[at : at + size] for at in range(0, len(tests), size))


def watched(sanitizer: str, tool: str, names: list[str]) -> list[str]:
    """The beginning of a command that a tool is to watch; the tool checks only kernels with these names."""
    filters = [word for name in names for word in ("--kernel-name", f"kernel_name={name}")]
    # Errors that the driver returns do not count: a library asks it for functions that it may not have.
    quiet = ["--report-api-errors", "no"] if tool == "memcheck" else []
    return [sanitizer, "--tool", tool, "--error-exitcode", "99", "--print-limit", "20", *quiet, *filters]


def run(tool: str, file: str, command: list[str], timeout_s: float, *, asked: list[str] | None = None) -> Finding:
    """Run one process. file: what the command is about. asked: tests in it, which record their launches."""
    start_s, asked = time.monotonic(), asked or []
    if timeout_s <= 0:
        return Finding(
            tool=tool, file=file, asked=asked, num_errors=None, outcome="NOT RUN, time is over", seconds=0, log=""
        )
    with tempfile.NamedTemporaryFile("r", suffix=".json") as notes:
        words = [f"--launches={notes.name}", *asked] if asked else []
        log = output_of([*command, *words], timeout_s, caches_memory=tool != "memcheck")
        told = [json.loads(line) for line in notes]
    counts = [int(found.group(1)) for pattern in SUMMARIES for found in pattern.finditer(log)]
    ends = [
        line for line in log.splitlines() if re.search(r"\d+ (passed|failed|skipped|deselected)|no end after", line)
    ]
    return Finding(
        tool=tool,
        file=file,
        asked=asked,
        num_errors=sum(counts) - num_hand_overs(log) if counts else None,
        outcome=ends[-1] if ends else log[-200:],
        seconds=time.monotonic() - start_s,
        log=log,
        passed={each["test"]: each["seconds"] for each in told},
        kernels={each["test"]: each["kernels"] for each in told},
    )


def num_hand_overs(log: str) -> int:
    """Number of reported races that are only between lines of Triton's own code. An access without a line is not
    one."""
    reports = [re.split(r"\n(?!=+ +and )", report)[0].splitlines() for report in log.split(RACE)[1:]]
    return sum(all(is_hand_over(access) for access in report) for report in reports)


def is_hand_over(access: str) -> bool:
    """Whether the source line that the access names is one of Triton's own code (HAND_OVER)."""
    found = PLACE.search(access)
    if found is None:
        return False
    files = [path.read_text().splitlines() for path in (REPOSITORY / KERNELS).rglob(found[1])]
    lines = ["".join(file[int(found[2]) - 1 : int(found[2])]) for file in files]
    return bool(lines) and all(HAND_OVER.match(line) for line in lines)


def output_of(command: list[str], timeout_s: float, *, caches_memory: bool) -> str:
    """All output of the process; if it does not end in time, it is killed with all that it started."""
    own = {} if caches_memory else {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env=os.environ | own,
    ) as process:  # fmt: skip
        try:
            return process.communicate(timeout=timeout_s)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the tool's child process has the pipe open
            return f"{process.communicate()[0]}\nno end after {timeout_s:.0f} s"


@dataclass(order=True, slots=True)
class Task:
    """A process to start. rank: the smallest is started first. tool: "" to compile. shared_bytes: the largest among its
    kernels."""

    rank: tuple[int, int, int]
    tool: str = field(compare=False)
    file: str = field(compare=False)
    asked: list[str] = field(compare=False)

    @classmethod
    def of(cls, tool: str, file: str, asked: list[str], *, number: int, shared_bytes: int = 0) -> "Task":
        """number: among tasks of one kind, the lowest comes first. After a control come the longest tasks, racecheck of
        Hopper's own kernels, those with the most shared memory first; then compiling, then the rest."""
        is_slow = tool == "racecheck" and shared_bytes > MUCH_SHARED
        kind = 0 if file == CONTROL else 1 if is_slow else 2 if not tool else 3
        return cls((kind, -shared_bytes, number), tool, file, asked)


class Work:
    """Processes, several in parallel: each share of the tests runs without a tool, then under the tools that have
    something to check."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._sanitizer = find_sanitizer()
        self._end_s = time.monotonic() + arguments.seconds
        self._names = sorted({name.rpartition(".")[2] for name in all_kernels()} | set(PLANTED))
        self.missed: list[str] = []
        self.findings: list[Finding] = []

    def do(self) -> None:
        """Do all of it; prints a line for each process as it ends."""
        tests = collect(self._arguments.files, sanitized=not self._arguments.all)
        waiting = [Task.of(tool, CONTROL, [], number=0) for tool in self._arguments.tools]
        all_shares = [(file, share) for file in tests for share in shares(tests[file], TESTS_OF_A_PROCESS)]
        waiting += [Task.of("", *each, number=number) for number, each in enumerate(all_shares)]
        heapify(waiting)
        running: set[Future[Finding]] = set()
        with ThreadPoolExecutor(self._arguments.jobs) as pool:
            while waiting or running:
                while waiting and len(running) < self._arguments.jobs:
                    running.add(pool.submit(self._run, heappop(waiting)))
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for each in done:
                    for task in self._tell(each.result()):
                        heappush(waiting, task)

    def _run(self, task: Task) -> Finding:
        before = watched(self._sanitizer, task.tool, self._names) if task.tool else []
        planted = [sys.executable, "-m", "bench.gpu.sanitize.planted", task.tool]
        command = [*before, *(planted if task.file == CONTROL else pytest_command())]
        left_s = min(self._arguments.timeout, self._end_s - time.monotonic())
        return run(task.tool, task.file, command, left_s, asked=task.asked)

    def _tell(self, found: Finding) -> list[Task]:
        """Keep the result of one process. Returns the tasks that can be done now that it has ended."""
        if found.file == CONTROL:
            print(f"control: {found.tool} found {found.num_errors} of what was planted", flush=True)
            if not found.num_errors:
                self.missed.append(found.tool)
                print(found.log[-3000:])
            return []
        self.findings.append(found)
        mark = "ok " if found.is_clean else "NO "
        told = f"{found.num_errors} errors, " if found.tool else ""
        told += f"{found.outcome.strip()}, {found.seconds:.0f} s"
        print(f"{mark} {found.tool or 'compile':10s} {found.file:52s} {told}", flush=True)
        if not found.is_clean:
            print(found.log[-6000:], flush=True)
        return [] if found.tool else list(self._under_tools(found))

    def _under_tools(self, found: Finding) -> Iterator[Task]:
        """Tasks under each tool, for those of its tests that launched something to check."""
        for tool in self._arguments.tools:
            least = 1 if tool == "racecheck" else 0
            shared = {test: max(sizes.values(), default=-1) for test, sizes in found.kernels.items()}
            asked = [test for test in shared if shared[test] >= least]
            is_slow = tool == "racecheck" and max(shared.values(), default=0) > MUCH_SHARED
            for share in shares(asked, SLOW_TESTS_OF_A_PROCESS if is_slow else TESTS_OF_A_PROCESS):
                largest = max(shared[test] for test in share)
                yield Task.of(tool, found.file, share, number=len(self.findings), shared_bytes=largest)


@dataclass(slots=True)
class Cover:
    """Coverage of a kernel by a tool. num_tests: that passed in a clean process. seconds: of these tests."""

    num_tests: int = 0
    seconds: float = 0.0
    not_clean: int = 0


def coverage(findings: list[Finding]) -> tuple[dict[str, int], dict[tuple[str, str], Cover]]:
    """Shared bytes of each launched kernel, and its coverage by each tool."""
    shared: dict[str, int] = {}
    covers: dict[tuple[str, str], Cover] = defaultdict(Cover)
    kernels = {name: of_test for found in findings if not found.tool for name, of_test in found.kernels.items()}
    for of_test in kernels.values():
        for kernel, size in of_test.items():
            shared[kernel] = max(size, shared.get(kernel, 0))
    for found in findings:
        for test in found.asked if found.tool else ():
            for kernel in kernels.get(test, ()):
                cover = covers[kernel, found.tool]
                if found.is_clean:
                    cover.num_tests += 1
                    cover.seconds += found.passed[test]
                else:
                    cover.not_clean += 1
    return shared, covers


def table(findings: list[Finding], tools: list[str]) -> list[str]:
    """A line for each kernel: its tests and seconds under each tool."""
    shared, covers = coverage(findings)
    lines = [f"| kernel | {' | '.join(tools)} |", f"|---|{'---|' * len(tools)}"]
    for kernel in sorted(shared):
        cells = []
        for tool in tools:
            cover = covers.get((kernel, tool), Cover())
            told = f"{cover.num_tests} clean, {cover.seconds:.1f} s" if cover.num_tests else ""
            if cover.not_clean:
                told = f"{told}; {cover.not_clean} NOT CLEAN".removeprefix("; ")
            is_nothing = tool == "racecheck" and not shared[kernel]
            cells.append(told or ("no shared memory" if is_nothing else "NOT RUN"))
        lines.append(f"| {kernel} | {' | '.join(cells)} |")
    return lines


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--tools", nargs="+", default=["memcheck", "racecheck"])
    parser.add_argument("--jobs", type=int, default=min(16, os.cpu_count() or 1))
    parser.add_argument("--timeout", type=float, default=300.0, help="of a process, in seconds")
    parser.add_argument(
        "--seconds", type=float, default=1500.0, help="of all: what has not ended then counts as failed"
    )
    parser.add_argument("--all", action="store_true", help="not only the tests that are marked for it: hours")
    parser.add_argument("--table", type=Path, help="write what was covered here, too")
    return parser.parse_args()


def main() -> None:
    """Print a line for each process as it ends, the logs of those that are not clean, and the table."""
    arguments = parse()
    is_whole = not arguments.files
    arguments.files = arguments.files or sorted(
        str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / TESTS).glob("test_*.py")
    )
    work = Work(arguments)
    work.do()
    lines = table(work.findings, arguments.tools)
    print("\n".join(lines))
    if arguments.table is not None:
        arguments.table.write_text("\n".join(lines) + "\n")
    launched = {kernel for found in work.findings for of_test in found.kernels.values() for kernel in of_test}
    left_out = sorted(set(all_kernels()) - launched) if is_whole else []
    for kernel in left_out:
        print(f"NO  {kernel}: no test launched it")
    unclean = [found for found in work.findings if not found.is_clean]
    by_tool = [found for found in work.findings if found.tool]
    print(f"{len(by_tool) - sum(bool(found.tool) for found in unclean)} of {len(by_tool)} runs clean, "
          f"{len(launched)} kernels: {', '.join(arguments.tools)}")  # fmt: skip
    raise SystemExit(1 if unclean or left_out or work.missed else 0)


if __name__ == "__main__":
    main()
