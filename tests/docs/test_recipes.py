"""CONTRIBUTING.md's recipes against what was done by them."""

import re
from pathlib import Path

FOLDERS = ("blockmgr", "cli", "gateway", "grammar", "model", "proto", "sim", "wire", "worker")
MAX_FILES = 8


def test_the_recipe_for_a_sampling_parameter_names_the_files_that_one_is_in(repository: Path) -> None:
    page = (repository / "CONTRIBUTING.md").read_text()
    recipe = page.split("## Add a sampling parameter", 1)[1].split("\n## ", 1)[0]
    named = re.findall(r"^\d+\. `([^`]+)`", recipe, flags=re.MULTILINE)
    written = [
        path.relative_to(repository).as_posix()
        for folder in FOLDERS
        for path in (repository / folder).rglob("*")
        if path.suffix in (".py", ".proto", ".c") and "_pb2" not in path.name
        if "top_n_sigma" in path.read_text()
    ]
    assert sorted(written) == sorted(named)
    assert len(named) <= MAX_FILES
