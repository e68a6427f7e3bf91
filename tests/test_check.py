"""`make check` takes what holds the repository together and the quick test files, and says what it left out; how strict
the types are."""

import gc
import os
import subprocess
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import check
from tests.conftest import is_alone, pytest_ignore_collect

SHARE = 20  # what always runs may take this part of what all files take, however fast the machine that measured them


def test_the_quickest_files_are_chosen_until_the_budget_is_spent() -> None:
    seconds = {"a.py": 3.0, "b.py": 1.0, "c.py": 2.0}
    assert check.choose(seconds, ["a.py", "b.py", "c.py"], 4.0) == (["b.py", "c.py"], ["a.py"])


def test_what_holds_the_repository_together_is_always_chosen_and_costs_the_others_nothing() -> None:
    kept = ["cli/serve/test_preflight.py", "docs/test_blocks.py", "structure/test_x.py", "test_layering.py"]
    seconds = dict.fromkeys(kept, 9.0) | {"a.py": 1.0, "cli/serve/test_serve.py": 2.0}
    assert check.choose(seconds, [*seconds], 1.5) == (sorted([*kept, "a.py"]), ["cli/serve/test_serve.py"])


def test_what_always_runs_is_marked_as_nothing_that_is_left_out() -> None:
    kept = [file for file in check.test_files() if check.lies_in(file, check.ALWAYS)]
    assert {Path(file).parts[0] for file in kept} > {"cli", "docs", "structure", "test_layering.py", "test_check.py"}
    assert [file for file in kept if is_alone(file) or check.lies_in(file, check.ASKED_FOR)] == []


def test_every_file_has_its_seconds_and_no_other() -> None:
    """`pytest --record-seconds FILE` writes them. What has none would count as quick, however long it takes."""
    assert sorted(check.read_seconds()) == check.measured_files()


def test_what_is_chosen_takes_few_of_all_the_seconds() -> None:
    seconds = check.read_seconds()
    chosen, _ = check.choose(seconds, check.light(), check.BUDGET_S)
    kept = {file for file in chosen if check.lies_in(file, check.ALWAYS)}
    assert sum(seconds.get(file, check.DEFAULT_S) for file in set(chosen) - kept) <= check.BUDGET_S
    assert sum(seconds.get(file, check.DEFAULT_S) for file in kept) <= sum(seconds.values()) / SHARE


def test_what_imports_for_seconds_is_left_out_and_nothing_of_it_always_runs() -> None:
    left_out = set(check.together()) - set(check.light())
    assert "model/layers/test_norm.py" in left_out
    assert [file for file in left_out if check.lies_in(file, check.ALWAYS)] == []


def test_the_longest_files_are_begun_first_and_a_files_tests_stay_together() -> None:
    """A long one that is begun last would be waited for."""
    files = ["quick.py", "long.py", "quick.py", "new.py", "long.py"]
    items: list[Any] = [SimpleNamespace(path=check.TESTS / file, number=n) for n, file in enumerate(files)]
    check.longest_first(items, {"quick.py": 1.0, "long.py": 9.0})
    assert [item.number for item in items] == [1, 4, 0, 2, 3]


@pytest.mark.parametrize(
    ("expression", "ignored"),
    [
        ("not gpu and not alone", {"e2e/test_outputs.py", "gpu/test_gpu_ranks.py"}),
        ("alone and not gpu", {"model/test_parallel.py", "gpu/test_gpu_ranks.py"}),
        ("not gpu", {"gpu/test_gpu_ranks.py"}),
        ("alone or gpu", set()),
    ],
)
def test_files_of_which_nothing_is_taken_are_not_imported(expression: str, ignored: set[str]) -> None:
    """verify's has some tests of either kind."""
    config: Any = SimpleNamespace(option=SimpleNamespace(markexpr=expression))
    files = ("e2e/test_outputs.py", "model/test_parallel.py", "cli/tools/test_verify_service.py", "e2e", "model")
    files += ("gpu/test_gpu_ranks.py",)
    assert {file for file in files if pytest_ignore_collect(check.TESTS / file, config)} == ignored


def test_no_collection_of_garbage_walks_what_was_imported() -> None:
    assert gc.isenabled()
    assert gc.get_freeze_count() > 40_000  # also where this file alone was imported


def test_make_tells_what_a_check_would_run_without_running_it() -> None:
    """With programs that are nowhere: what ran would fail."""
    command = ["make", "-n", "check", "-o", "dev", "BIN=/nowhere"]
    environment = os.environ | {"MAKEFLAGS": ""}
    said = subprocess.run(
        command, cwd=check.TESTS.parent, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert said.returncode == 0, said.stderr
    assert "/nowhere/python -m tests.check" in said.stdout
    assert " lint " in said.stdout
    assert "/nowhere/mypy" not in said.stdout


def test_targets_keep_bytecode_whatever_the_environment_says(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text(f"include {check.TESTS.parent / 'Makefile'}\nkept:\n\t@env\n")
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "MAKEFLAGS": ""}
    said = subprocess.run(["make", "-s", "kept"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, check=True)
    assert b"\nPYTHONDONTWRITEBYTECODE=\n" in said.stdout


@pytest.mark.parametrize("file", ["cluster/test_cluster.py", "interop/test_node.py", "gpu/test_gpu_ranks.py"])
def test_what_has_a_target_of_its_own_is_not_chosen(file: str) -> None:
    """Named on pytest's command line, it would run, though no other run sees it."""
    assert file in check.test_files()
    assert file not in check.together()


def test_a_file_that_is_not_measured_yet_is_run() -> None:
    assert check.choose({"a.py": 2.0}, ["a.py", "new.py"], 2.5) == (["new.py"], ["a.py"])


def test_a_file_that_moved_is_known_by_its_name() -> None:
    assert check.choose({"a/test_x.py": 9.0}, ["b/test_x.py"], 2.5) == ([], ["b/test_x.py"])


def test_figures_follow_the_tests_and_stand_still_otherwise() -> None:
    before = {"a.py": 4.0, "gone.py": 1.0, "quick.py": 0.1, "slower.py": 2.0}
    measured = {"a.py": 5.0, "quick.py": 0.6, "slower.py": 9.04, "new.py": 0.26}
    files = ["a.py", "new.py", "quick.py", "slower.py"]
    assert check.renewed(before, measured, files) == {"a.py": 4.0, "new.py": 0.3, "quick.py": 0.1, "slower.py": 9.0}


def test_the_fast_tests_are_a_good_part_of_all() -> None:
    chosen, _ = check.choose(check.read_seconds(), check.together(), check.BUDGET_S)
    assert len(chosen) > len(check.together()) / 5


def test_types_are_strict_except_for_kernels(repository: Path) -> None:
    mypy = tomllib.loads((repository / "pyproject.toml").read_text())["tool"]["mypy"]
    assert mypy["strict"] is True
    loosened = {
        module
        for override in mypy["overrides"]
        if not override.get("disallow_untyped_defs", True) or override.get("disable_error_code")
        for module in override["module"]
    }
    assert loosened == {"octavo.model.kernels.*"}
