"""`make check` takes the quick test files and says what it left out; how strict the types are."""

import tomllib
from pathlib import Path

from tests import check


def test_the_quickest_files_are_chosen_until_the_budget_is_spent() -> None:
    seconds = {"a.py": 3.0, "b.py": 1.0, "c.py": 2.0}
    assert check.choose(seconds, ["a.py", "b.py", "c.py"], 4.0) == (["b.py", "c.py"], ["a.py"])


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
