"""Kernel tests under compute-sanitizer: in small processes, each told as it ends, none waited for without end. A script
stands for the tool, and kernels that add one for those of the project."""

import ast
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

pytest.importorskip("triton", reason="triton is not installed")

from bench.gpu.sanitize import __main__ as sanitize

ROOT = Path(__file__).resolve().parents[3]
TOOL = """#!/bin/sh
tool=$2 watched=
while [ "$1" != "$PYTHON" ]; do [ "$1" = --kernel-name ] && watched="$watched $2"; shift; done
case "$*" in *planted*) echo "ERROR SUMMARY: $PLANTED error"; exit 99;; esac
echo "$tool$watched $*" >> "$CALLS"
"$@"
echo "ERROR SUMMARY: 0 errors"
"""
KERNELS = """
import triton, triton.language as tl
@triton.jit
def inner(x): return x + 1
@triton.jit(do_not_specialize=["n"])
def _add_kernel(x, n): tl.store(x, inner(tl.load(x)))
@triton.jit
def _other_kernel(x): tl.store(x, tl.load(x) + 2)
"""
CASES = """
import pytest, torch
from kernels import _add_kernel
def add():
    x = torch.zeros(1)
    _add_kernel[(1,)](x, 3)
    return x
@pytest.mark.sanitize(only=lambda size: size < 7)
@pytest.mark.parametrize("size", range(9))
def test_one(size): assert add() == 1
@pytest.mark.sanitize
def test_once_more(): add()
@pytest.mark.sanitize
def test_that_launches_nothing(): pass
@pytest.mark.sanitize
@pytest.mark.skip
def test_skipped(): add()
def test_that_is_not_chosen(): assert False
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the tool was called for."""
    tool = tmp_path / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text(TOOL)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=":")
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("PLANTED", "1")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # a third of what each process imports, and used by none
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path / 'model/kernels'}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setattr(sanitize, "REPOSITORY", tmp_path)
    monkeypatch.setattr(sanitize, "TESTS", "tests")
    for path, text in (("model/kernels/kernels.py", KERNELS), ("tests/test_cases.py", CASES)):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(text)
    return tmp_path / "calls"


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["sanitize", "--jobs=2", *words])
    with pytest.raises(SystemExit) as ended:
        sanitize.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_chosen_tests_that_launch_something_run_in_small_processes_and_are_told_by_kernel(
    calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table.md"
    assert run(monkeypatch, f"--table={table}") == 1, "no test launched the other kernel"
    ran = [line.split() for line in calls.read_text().splitlines()]
    names = [f"kernel_name={name}" for name in ("_add_kernel", "_other_kernel", *sanitize.PLANTED)]
    assert all(words[:1] + words[1:5] == ["memcheck", *sorted(names)] for words in ran), "nothing has shared memory"
    assert sorted(sum("::" in word for word in words) for words in ran) == [3, 5]
    tests = {word.partition("::")[2] for words in ran for word in words if "::" in word}
    assert tests == {*(f"test_one[{size}]" for size in range(7)), "test_once_more"}
    told = capsys.readouterr().out
    assert "2 of 2 runs clean, 1 kernels" in told
    assert "NO  kernels._other_kernel: no test launched it" in told
    *_, line = table.read_text().splitlines()
    assert line.startswith("| kernels._add_kernel | 8 clean, ")
    assert line.endswith(" s | no shared memory |")


def test_a_control_that_finds_nothing_and_tests_that_fail_are_told(
    calls: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PLANTED", "0")
    monkeypatch.setattr(sanitize, "TESTS_OF_A_PROCESS", 20)
    assert run(monkeypatch, "--tools", "memcheck", "--all", "--", "tests/test_cases.py") == 1
    told = capsys.readouterr().out
    assert "control: memcheck found 0 of what was planted" in told
    assert "NO  compile" in told
    assert "| kernels._add_kernel | 10 clean, " in told
    assert "1 failed, 11 passed, 1 skipped" in told
    assert "0 errors, 10 passed" in told


def test_what_the_time_does_not_allow_is_told(
    calls: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--seconds=0", "--tools", "memcheck") == 1
    assert "NOT RUN, time is over" in capsys.readouterr().out


def test_a_race_is_triton_s_own_where_all_its_places_are() -> None:
    lines = (ROOT / "model/kernels/attention/warp_groups.py").read_text().splitlines()
    head, specialize, half = (
        next(number for number, line in enumerate(lines, 1) if word in line)
        for word in ("def attend_kernel(", "gl.warp_specialize(", "half.store(")
    )
    report = """.========= Error: Race reported between Read access at attend_kernel+0x100 in warp_groups.py:{}
=========     and Write access at attend_kernel+0xf080 in warp_groups.py:{} [4 hazards]
=========     and Write access at attend_kernel+0x19c30 in warp_groups.py:{} [8 hazards]
=========
.                                                                        [100%]
"""
    own, consumers = report.format(head, head, specialize), report.format(head, specialize, half)
    placeless = re.sub(r" in warp_groups\.py:\d+", "", own)
    elsewhere = own.replace("warp_groups.py", "torch_kernels.py")
    ambiguous = own.replace("warp_groups.py", "invariant.py")
    logs = ("", own, consumers, placeless, elsewhere, ambiguous, own + consumers + own)
    assert [sanitize.num_hand_overs(log) for log in logs] == [0, 1, 0, 0, 0, 0, 2]


def test_a_process_that_does_not_end_is_killed_with_what_it_started(calls: Path, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    wait = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    tool = sanitize.watched(str(tmp_path / "bin/compute-sanitizer"), "memcheck", [])
    found = sanitize.run("memcheck", "f", [*tool, sys.executable, "-c", wait], 5.0)
    assert not found.is_clean
    assert found.outcome == "no end after 5 s"
    if pid_file.exists():  # on a slow machine it had not begun
        until(lambda: has_ended(int(pid_file.read_text())))


def until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def has_ended(pid: int) -> bool:
    """Nobody may have looked after it yet."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True


# What is chosen reaches every kernel, by the names that functions use.

Place = tuple[str, str]
"""A module, and a name at its top."""


class Names:
    """What each function and class of some modules refers to."""

    def __init__(self, paths: dict[str, Path]) -> None:
        self._used: dict[Place, set[Place]] = {}
        self.chosen: set[Place] = set()
        self._paths = paths
        for module in paths:
            self._read(module)

    def _read(self, module: str) -> None:
        tree = ast.parse(self._paths[module].read_text())
        meant: dict[str, Place] = {}
        for each in ast.walk(tree):
            if isinstance(each, ast.ImportFrom) and each.module is not None:
                for name in each.names:
                    whole = f"{each.module}.{name.name}"
                    meant[name.asname or name.name] = (whole, "") if whole in self._paths else (each.module, name.name)
        for each in tree.body:
            for name in defined(each):
                meant[name] = module, name
        for each in tree.body:
            used = {place for word in ast.walk(each) for place in self._places(word, meant)}
            for name in defined(each):
                self._used[module, name] = used
                if isinstance(each, ast.FunctionDef) and any(
                    ast.unparse(word).startswith("pytest.mark.sanitize") for word in each.decorator_list
                ):
                    self.chosen.add((module, name))

    def _places(self, word: ast.AST, meant: dict[str, Place]) -> Iterator[Place]:
        """What a name, a fixture's, or an attribute of a module is."""
        if isinstance(word, ast.Name) and word.id in meant:
            yield meant[word.id]
        if isinstance(word, ast.arg) and word.arg in meant:
            yield meant[word.arg]
        if isinstance(word, ast.Attribute) and isinstance(word.value, ast.Name):
            module, name = meant.get(word.value.id, ("", ""))
            if not name:
                yield module, word.attr

    def reached(self) -> set[Place]:
        """From the chosen tests on."""
        found, new = set(self.chosen), set(self.chosen)
        while new:
            new = {place for each in new for place in self._used.get(each, ())} - found
            found |= new
        return found


def defined(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def modules(folder: str, package: str, pattern: str = "*") -> dict[str, Path]:
    paths = (ROOT / folder).rglob(f"{pattern}.py")
    return {package + ".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}


def test_every_kernel_is_reached_by_a_test_that_sanitizers_run() -> None:
    of_tests = modules("tests/model/kernels", "") | modules("tests/support/model", "")
    names = Names(modules("model/kernels", "octavo.") | modules("model/gpu", "octavo.", "sampling_*") | of_tests)
    kernels = {(f"octavo.model.kernels.{module}", name)
               for module, _, name in (kernel.rpartition(".") for kernel in sanitize.all_kernels())}  # fmt: skip
    assert len(kernels) > 50
    assert kernels - names.reached() == set()


def test_what_other_kernels_do_not_call_has_the_ending_by_which_kernels_are_known() -> None:
    functions = [
        each
        for path in (ROOT / "model/kernels").rglob("*.py")
        for each in ast.parse(path.read_text()).body
        if isinstance(each, ast.FunctionDef) and sanitize.is_compiled(each)
    ]
    used = {word.id for each in functions for word in ast.walk(each) if isinstance(word, ast.Name)}
    assert [each.name for each in functions if each.name not in used and not each.name.endswith(sanitize.ENDING)] == []
