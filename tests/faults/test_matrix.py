"""docs/reliability.md is true: every row, mutant and control has tests that exist, and the page is the matrix's."""

import ast
import json
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from tests.faults.matrix import ROWS
from tests.faults.mutants import CONTROLS, MUTANTS
from tests.faults.page import PAGE, page

# What nothing shows yet, whole or in part. It only ever gets shorter.
MISSING = set[int]()


@cache
def names_in(path: Path) -> frozenset[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, functions))


def absent(tests: Iterable[str], repository: Path) -> list[str]:
    """Those that are in no file."""
    split = [(test, *test.split("::")) for test in tests]
    return [
        test
        for test, path, name in split
        if not (repository / path).is_file() or name not in names_in(repository / path)
    ]


def test_there_are_all_rows_and_the_missing_ones_are_named() -> None:
    assert list(ROWS) == list(range(1, 63))
    assert {number for number, row in ROWS.items() if row.missing} == MISSING
    assert [number for number, row in ROWS.items() if not row.tests] == []
    assert [number for number, row in ROWS.items() if row.awaits] == [60]


def test_every_test_of_a_row_exists(repository: Path) -> None:
    assert absent([test for row in ROWS.values() for test in row.tests], repository) == []


def test_all_mutants_and_controls_are_noticed_by_tests_that_exist(repository: Path) -> None:
    assert [mutant.number for mutant in MUTANTS] == [f"m{number}" for number in range(1, 23)]
    assert [mutant.number for mutant in MUTANTS if not mutant.tests] == []
    assert len(CONTROLS) == 4
    assert absent([test for mutant in MUTANTS for test in mutant.tests], repository) == []
    assert absent([test for tests in CONTROLS.values() for test in tests], repository) == []


def test_every_commit_that_figures_name_is_of_this_history(repository: Path) -> None:
    """One that a rebase has taken away can be looked up by nobody."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=repository, capture_output=True, text=True, check=False, timeout=60)
        return done.stdout if done.returncode == 0 else ""

    if git("rev-parse", "--is-shallow-repository").strip() != "false":
        pytest.skip("no repository with its history is here")
    figures = json.loads((repository / "docs" / "reliability.json").read_text())
    named = {each["commit"] for each in figures.values() if each["commit"]}
    known = git("rev-list", "HEAD").split()
    assert [commit for commit in sorted(named) if not any(each.startswith(commit) for each in known)] == []


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run python -m tests.faults.page"
