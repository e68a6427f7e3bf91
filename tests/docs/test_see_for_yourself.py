"""README's table "See for yourself": every line has a check here, which runs what it names, within bounds, or finds
that it is there and is what the line says."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from octavo.model.cpu.isa import Isa, machine_isa
from tests.faults.matrix import ROWS as FAULTS

REPOSITORY = Path(__file__).resolve().parents[2]
BOUND_S = 600.0  # a busy machine is no fault

Check = Callable[[str, Path], None]
CHECKS: dict[str, Check] = {}


def read(path: str) -> str:
    return (REPOSITORY / path).read_text()


def table() -> dict[str, str]:
    """Claim to the cell that says how to see it."""
    section = read("README.md").split("## See for yourself", 1)[1].split("\n## ", 1)[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return {claim.strip(): how.strip() for claim, how in lines[2:]}


TABLE = table()
# What these run takes seconds, and most of it is run by tests of its own too.
SLOW = {
    "it computes what transformers computes",
    "every fast path equals a slow obvious reference, on CPUs with fewer instructions too",
    "a thousand seeds of faults at once end well and repeat",
    "the memory adds up after every step",
    "dashboards and alerts name only series that exist",
}


def shows(claim: str) -> Callable[[Check], Check]:
    """Registers the check of a line. It gets what the line's second column says, and a folder of its own."""

    def register(check: Check) -> Check:
        CHECKS[claim] = check
        return check

    return register


@pytest.mark.parametrize(
    "claim", [pytest.param(claim, marks=pytest.mark.slow) if claim in SLOW else claim for claim in TABLE]
)
def test_what_the_line_names_shows_what_it_claims(claim: str, tmp_path: Path) -> None:
    assert claim in CHECKS, "a new line wants a check in this file"
    CHECKS[claim](TABLE[claim], tmp_path)


def test_every_check_has_its_line() -> None:
    assert set(CHECKS) == set(TABLE) >= SLOW
    assert len(TABLE) >= 13


@pytest.mark.parametrize("claim", TABLE)
def test_everything_that_a_line_names_is_there(claim: str) -> None:
    """Targets of make, commands, tests, pages."""
    how = TABLE[claim]
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
    commands = set(re.findall(r"^\| `(\w+)", read("README.md"), re.MULTILINE))
    named = re.findall(r"`([^`]+)`", re.sub(r"\[[^\]]*\]\([^)]*\)", "", how))
    pages = re.findall(r"\]\(([^)#]+)", how)
    assert named or pages
    for page in pages:
        assert (REPOSITORY / page).is_file(), page
    for each in named:
        word, _, rest = each.partition(" ")
        if word == "make":
            assert rest.split()[0] in targets, each
        elif word == "octavo":
            assert rest.split()[0] in commands, each
        elif word.startswith("tests/"):
            assert num_tests(word) > 0, each
        else:
            assert word.startswith(("octavo_", "/metrics")), each


@cache
def functions_of(path: str) -> frozenset[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.walk(ast.parse(read(path))) if isinstance(node, kinds))


def num_tests(path: str) -> int:
    """In a file, or in the files of a folder."""
    place = REPOSITORY / path
    files = place.rglob("test_*.py") if place.is_dir() else [place]
    return sum(name.startswith("test_") for file in files for name in functions_of(str(file.relative_to(REPOSITORY))))


def run(*command: str, cwd: Path = REPOSITORY, **variables: str) -> str:
    """Its output; it must end well, and in time."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OCTAVO_", "MAKE", "MFLAGS"))}
    done = subprocess.run(
        command,
        cwd=cwd,
        env=kept | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def recipe(how: str, target: str) -> str:
    """What make would run for a target as the line writes it, which it must name."""
    (command,) = {each for each in re.findall(r"`(make [^`]+)`", how) if each.split()[1] == target}
    return run(*command.split(), "-n", "-o", "dev")


def source_of(module: str) -> str:
    path = module.replace(".", "/")
    return read(f"{path}.py" if (REPOSITORY / f"{path}.py").is_file() else f"{path}/__main__.py")


def require_module(lines: str, module: str) -> str:
    """The arguments that a recipe gives a module of ours, each flag of which it has to know."""
    (arguments,) = re.findall(rf"python -m {re.escape(module)}(?![\w.])([^\n]*)", lines)
    source = source_of(module)
    for flag in re.findall(r"(--[a-z-]+)", arguments.split(" -- ")[0]):
        assert f'"{flag}"' in source, (module, flag)
    return str(arguments).strip()


def node(name: str, folder: str = "tests") -> str:
    """FILE::NAME of the one test of this name in a folder, wherever it stands there."""
    files = [str(file.relative_to(REPOSITORY)) for file in sorted((REPOSITORY / folder).rglob("test_*.py"))]
    (file,) = [file for file in files if name in functions_of(file)]
    return f"{file}::{name}"


def require_tests(*tests: str) -> None:
    """Each as FILE::NAME."""
    for test in tests:
        path, _, name = test.partition("::")
        assert name in functions_of(path), test


@shows("it computes what transformers computes")
def _verify(how: str, folder: Path) -> None:
    assert how == "`octavo verify MODEL`"
    asked = ["verify", "folio-chat", "--prompts=1", "--max-new-tokens=2", "--max-model-len=64"]
    said = run(sys.executable, "-m", "octavo.cli.main", *asked, cwd=folder)
    assert re.search(r"all \d+ comparisons are within their limits", said)


@shows("how fast it is, against the device's floor")
def _speed(how: str, folder: Path) -> None:
    for target, opponent in (("bench-gpu", "floor"), ("bench", "transformers")):
        lines = recipe(how, target)
        modules = re.findall(r"python -m ([\w.]+)", lines)
        assert modules
        for module in modules:
            require_module(lines, module)
        assert any(opponent in source_of(module) for module in modules)


@shows("every fast path equals a slow obvious reference, on CPUs with fewer instructions too")
def _references(how: str, folder: Path) -> None:
    # Of all tests that need no GPU each is in exactly one of the two runs.
    assert re.findall(r'-m "([^"]+)"', recipe(how, "test")) == ["not gpu and not alone", "alone and not gpu"]
    hidden = recipe(how, "test-isa")
    assert "OCTAVO_CPU_ISA=$isa" in hidden
    paths = set(re.findall(r"(?<!--ignore )(tests/[\w/.]+)", hidden))
    assert "tests/model" in paths
    assert all(num_tests(path) for path in paths)
    references = node("test_products_of_each_class_are_those_of_the_reference", "tests/model")
    if machine_isa() >= Isa.AVX2:  # another architecture's kernels, by an emulator, are the same whatever is hidden
        run(sys.executable, "-m", "pytest", references, "-k", "not aarch64", OCTAVO_CPU_ISA="avx2")


@shows("clients and gateways of others drive it as it stands")
def _interop(how: str, folder: Path) -> None:
    """Needs a network for others' packages: what it would run is looked at."""
    lines = recipe(how, "test-interop")
    assert "OCTAVO_INTEROP=1" in lines
    assert lines.split()[-1] == "tests/interop"
    assert "import openai" in read("tests/interop/drivers/openai_client.py")
    assert "import tritonclient" in read("tests/interop/drivers/triton_client.py")
    for test in ("test_the_openai_client_gets_what_it_asks_for", "test_tritonclient_gets_what_it_asks_for"):
        node(test, "tests/interop")


@shows("a thousand seeds of faults at once end well and repeat")
def _simulation(how: str, folder: Path) -> None:
    arguments = require_module(recipe(how, "sim"), "sim").split()
    assert arguments == ["--seeds", "0:1000"]
    few = ["--seeds", "0:2", "--requests", "60", "--jobs", "1"]
    said = run(sys.executable, "-m", "sim", *few)
    assert re.search(r"seeds +2 \(each run twice, traces compared\)", said)
    assert re.search(r"violations +0 in 0 seeds", said)


@shows("a lost worker is a pause, and its streams go on, token by token the same with `--deterministic`")
def _migration(how: str, folder: Path) -> None:
    assert "`tests/gateway/workers/test_migration.py`" in how
    require_tests(
        "tests/gateway/workers/test_migration.py::test_an_output_goes_on_behind_what_it_has_given_and_counts_it"
    )
    assert recipe(how, "faults-long").strip().endswith("-m long tests/faults")
    kills = node("test_row_3_every_stream_of_fifty_killed_workers_is_complete", "tests/faults").partition("::")[0]
    assert "@pytest.mark.long" in read(kills)


@shows("what half an hour of random faults at 70 % load costs")
def _soak(how: str, folder: Path) -> None:
    assert require_module(recipe(how, "soak"), "tests.soak").endswith("--minutes 30 --seed 1")
    (row,) = re.findall(r"^\| 60 \|.*$", read("docs/reliability.md"), re.MULTILINE)
    assert "row 60" in how
    assert re.search(r"seed 1, minutes 30\.\d, load percent 70,", row)
    assert "violations 0, availability percent" in row


@shows("what callers see under sixty-two faults")
def _faults(how: str, folder: Path) -> None:
    rows = re.findall(r"^\| (\d+) \|(.*)$", read("docs/reliability.md"), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 63)) == list(FAULTS)
    for _, row in rows:
        tests = re.findall(r"`(tests/[\w/]+\.py::\w+)`", row)
        assert tests
        require_tests(*tests)


@shows("the memory adds up after every step")
def _memory(how: str, folder: Path) -> None:
    assert how == "`tests/blockmgr`, and `octavo_kv_blocks_leaked` on `/metrics`"
    node("test_any_order_of_calls_keeps_every_invariant", "tests/blockmgr")
    leaks = node("test_a_leak_per_release_is_counted_when_there_is_no_work")
    assert "octavo_kv_blocks_leaked" in read(leaks.partition("::")[0])
    run(sys.executable, "-m", "pytest", leaks)


@shows("who is not let in gets no further, and tenants learn nothing of each other")
def _security(how: str, folder: Path) -> None:
    checklist = read("docs/security.md").partition("## The checklist")[2]
    rows = [line for line in checklist.splitlines() if line.startswith("| ") and "---" not in line][1:]
    assert len(rows) >= 20
    for row in rows:
        tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert tests, row
        require_tests(*(f"{path}::{name}" for path, name in tests))


@shows("no folder knows what it must not")
def _layers(how: str, folder: Path) -> None:
    """In a copy, the wire learns of the gateway, and the test that the line names is red."""
    assert how == "`tests/test_layering.py`"
    require_tests("tests/test_layering.py::test_a_folder_imports_only_what_its_arrow_allows")
    from tests.test_layering import test_a_folder_imports_only_what_its_arrow_allows as arrows

    arrows("wire", REPOSITORY)
    shutil.copytree(REPOSITORY / "wire", folder / "wire")
    (folder / "wire" / "planted.py").write_text("from octavo.gateway import main\n")
    with pytest.raises(AssertionError):
        arrows("wire", folder)


@shows("dashboards and alerts name only series that exist")
def _boards(how: str, folder: Path) -> None:
    assert how == "`tests/deploy`"
    run(
        sys.executable,
        "-m",
        "pytest",
        node("test_every_expression_names_only_series_that_are_exported", "tests/deploy"),
    )


@shows("settings win in the order flag, environment, file, default")
def _settings(how: str, folder: Path) -> None:
    assert how == "`octavo config show`, `tests/cli`"
    node("test_a_flag_wins_over_the_environment_that_over_the_file_that_over_the_default", "tests/cli")
    (folder / "octavo.toml").write_text("block_size = 8\nmax_waiting = 3\nmax_num_seqs = 7\n")
    variables = {"OCTAVO_MAX_WAITING": "4", "OCTAVO_MAX_NUM_SEQS": "8"}
    command = [sys.executable, "-m", "octavo.cli.main", "config", "show", "--max-num-seqs=9", "--json"]
    shown = json.loads(run(*command, cwd=folder, **variables))
    found = {name: (shown[name]["value"], shown[name]["source"]) for name in SETTINGS}
    assert found == SETTINGS


SETTINGS = {
    "max_num_seqs": ("9", "flag"),
    "max_waiting": ("4", "environment"),
    "block_size": ("8", "file"),
    "aging_s": ("10.0", "default"),
}
