"""The kernel tests under compute-sanitizer: memcheck (reads and writes out of bounds, or misaligned) and racecheck
(hazards in shared memory). `make sanitize-gpu`, or

    python -m bench.gpu.sanitize [--tools memcheck racecheck] [--jobs 8] [--timeout 500] [--select EXPRESSION] [FILES]

First a control: kernels with a planted mistake (bench/gpu/planted.py), which the tools must find. Then every test file
and tool is a process of its own. torch's caching allocator is off, so that a step behind an allocation is seen. The
tests run once without the tool before, which compiles the kernels. The exit code is 1 where an error was found, a
control was missed or a process did not end well. Prints a line for each process and the logs of those that are not
clean; writes nothing.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PLACES = ("/usr/local/cuda/bin/compute-sanitizer", "/opt/nvidia/compute-sanitizer/compute-sanitizer")
SUMMARIES = (
    re.compile(r"ERROR SUMMARY: (\d+) error"),
    re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed"),
)
# float32 goes through the same sources, by far more instructions, and every instrumented one is slow.
SELECTION = "not dtype0"
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
        """Tests passed, the tool found nothing."""
        return self.num_errors == 0 and " passed" in self.outcome and "failed" not in self.outcome


def find_sanitizer() -> str:
    """Its path. Raises SystemExit saying where it comes from."""
    found = shutil.which("compute-sanitizer") or next((place for place in PLACES if Path(place).exists()), None)
    if found is None:
        raise SystemExit("error: there is no compute-sanitizer; it is part of the CUDA toolkit")
    return found


def pytest_command(file: str, select: str) -> list[str]:
    """Of one test file."""
    return [sys.executable, *PYTEST, file, *(["-k", select] if select else [])]


def run(sanitizer: str, tool: str, file: str, command: list[str], timeout_s: float) -> Finding:
    """One process. file: what the command is about."""
    options = ["--tool", tool, "--error-exitcode", "99", "--print-limit", "20"]
    start_s = time.monotonic()
    try:
        done = subprocess.run(
            [sanitizer, *options, *command],
            cwd=REPOSITORY, capture_output=True, text=True, timeout=timeout_s, check=False,
            env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        )  # fmt: skip
        log = done.stdout + done.stderr
    except subprocess.TimeoutExpired as late:
        log = f"{late.stdout or b''!r}\nno end after {timeout_s} s"
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


def compile_kernels(files: list[str], select: str, jobs: int) -> None:
    """Run the tests once without the tool."""
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda file: subprocess.run(pytest_command(file, select), cwd=REPOSITORY, check=False), files))


def main() -> None:
    """Print a line for each process as it ends, and the logs of those that are not clean."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--tools", nargs="+", default=["memcheck", "racecheck"])
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--timeout", type=float, default=500.0)
    parser.add_argument("--select", default=SELECTION)
    arguments = parser.parse_args()
    sanitizer = find_sanitizer()
    files = arguments.files or sorted(
        str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "tests/model/kernels").glob("test_*.py")
    )
    missed = check_controls(sanitizer, arguments.tools, arguments.timeout)
    compile_kernels(files, arguments.select, arguments.jobs)
    findings = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        waiting = [
            pool.submit(run, sanitizer, tool, file, pytest_command(file, arguments.select), arguments.timeout)
            for file in files
            for tool in arguments.tools
        ]
        for each in waiting:
            found = each.result()
            findings.append(found)
            mark = "ok " if found.is_clean else "NO "
            print(
                f"{mark} {found.tool:10s} {found.file:52s} {found.num_errors} errors, {found.outcome.strip()}",
                flush=True,
            )
            if not found.is_clean:
                print(found.log[-6000:], flush=True)
    unclean = [found for found in findings if not found.is_clean]
    print(f"{len(findings) - len(unclean)} of {len(findings)} runs clean: {', '.join(arguments.tools)}")
    raise SystemExit(1 if unclean or missed else 0)


if __name__ == "__main__":
    main()
