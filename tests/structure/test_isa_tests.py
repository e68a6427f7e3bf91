"""What asks for the CPU's own kernels runs with instructions hidden, too (`make test-isa`), or it says here why not."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ASKS = re.compile(r"octavo\.model\.cpu|native_library|machine_isa|needs_compiler|\bWeightFormat\b")
OF_DEVICES = ("gpu", "model/gpu", "model/kernels", "worker/runners/cuda")
HERE = "structure/test_isa_tests.py"
NEED_NOT = {
    "model/cpu/test_isa.py": "goes through the classes of CPUs itself",
    "model/checkpoint": "reads files; what models of them compute is tests/model/families'",
    "model/cpu/test_native.py": "compiles the one text; test_isa.py does it with the flags of each class",
    "model/cpu/test_team.py": "shares work among threads, whatever it is",
    "model/test_parallel.py": "composes ranks; the kernels, of as narrow parts, are tests/model/layers'",
    "model/test_parallel_packed.py": "composes ranks; the kernels, of as narrow parts, are tests/model/layers'",
    "model/test_ranks_end.py": "computes nothing",
    "model/sampling/test_sampler_frequencies.py": "counts which numbers are drawn",
    "worker/runners/test_deterministic.py": "composes batches; the kernels are tests/model/test_invariant.py's",
    "worker/loading/test_group_deterministic.py": "composes ranks; the kernels are tests/model/test_invariant.py's",
    "cli/tools/test_verify.py": "plants mistakes; what is sound within its limits is tests/model/verify's",
    "cli/serve/test_preflight.py": "refuses flags",
    "deploy/test_read_only.py": "looks for where files are written",
    "e2e/test_migration_of_a_model.py": "moves a stream between workers, whatever they compute with",
    "docs/test_see_for_yourself.py": "hides instructions itself",
}


@pytest.fixture(scope="module")
def lists(repository: Path) -> tuple[list[str], list[str]]:
    """What the target runs, and what it leaves out, from the folder of the tests."""
    text = (repository / "Makefile").read_text().replace("\\\n", " ")
    found = (re.search(rf"^{name} := (.*)$", text, re.MULTILINE) for name in ("ISA_TESTS", "NO_ISA"))
    run, left_out = (re.findall(r"tests/([\w/.]+)", match[1]) for match in found if match)
    return run, left_out


def is_in(file: str, places: list[str]) -> bool:
    return any(Path(file).is_relative_to(place) for place in places)


def test_what_asks_for_the_kernels_of_cpus_runs_with_instructions_hidden(
    repository: Path, lists: tuple[list[str], list[str]]
) -> None:
    run, left_out = lists
    tests = repository / "tests"
    files = {str(path.relative_to(tests)): path for path in tests.rglob("test_*.py")}
    asking = {file for file, path in files.items() if file != HERE and ASKS.search(path.read_text())}
    missing = {file for file in asking if not is_in(file, run) or is_in(file, left_out)}
    assert [file for file in missing if not is_in(file, [*OF_DEVICES, *NEED_NOT])] == []


def test_what_is_left_out_says_why(lists: tuple[list[str], list[str]], repository: Path) -> None:
    run, left_out = lists
    assert {file for file in left_out if file not in OF_DEVICES} <= NEED_NOT.keys()
    assert [file for file in NEED_NOT if not (repository / "tests" / file).exists()] == []
    assert [file for file in NEED_NOT if is_in(file, run) and file not in left_out] == []


PYTHON_OF_ANOTHER_CPU = f"""#!/bin/sh
[ "$1" = -c ] || {{ echo "tests with $OCTAVO_CPU_ISA"; exit 0; }}
exec {sys.executable} -c 'import sys
from octavo.model.cpu import isa
isa.machine_isa = lambda: isa.Isa.VNNI
program = sys.argv.pop(1)
exec(program)' "$2" "$3"
"""


def test_only_what_hides_instructions_of_this_cpu_is_run(repository: Path, tmp_path: Path) -> None:
    """Of the CPU's own class, and of better ones, it says why not."""
    (tmp_path / "python").write_text(PYTHON_OF_ANOTHER_CPU)
    (tmp_path / "python").chmod(0o755)
    done = subprocess.run(
        ["make", "--no-print-directory", "-o", "dev", "test-isa", f"BIN={tmp_path}", "ISAS=avx2 vnni amx"],
        cwd=repository, env=os.environ | {"MAKEFLAGS": ""}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "with no better instructions than avx2",
        "tests with avx2",
        "vnni: all that this CPU has, as make test runs it, skipped",
        "amx: not this CPU, skipped",
    ]
