"""Every block of commands or code on the pages is run by a test, or says why it is not."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.docs.blocks import BLOCKS, NO_COMMANDS, Block, blocks_of

RUN_HERE = {"console", "python", "toml"}  # by tests/e2e/test_commands_of_the_pages.py


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_a_block_is_run_or_says_why_not(block: Block, repository: Path) -> None:
    if block.verb == "run by":
        path, _, name = block.what.partition("::")
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        tree = ast.walk(ast.parse((repository / path).read_text()))
        assert name in {node.name for node in tree if isinstance(node, functions)}, block.what
    elif block.verb == "not run":
        assert len(block.what.split()) >= 2, "a reason, please"
    else:
        assert block.language in RUN_HERE | NO_COMMANDS, "name its language, or say why it is not run"


def test_most_pages_have_something_that_is_run() -> None:
    run = Counter(block.page for block in BLOCKS if block.verb != "not run" and block.language not in NO_COMMANDS)
    assert sum(run.values()) >= 15
    assert run["README.md"] >= 4


def test_a_comment_belongs_to_the_block_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.docs.blocks.ROOT", tmp_path)
    commented = "<!-- not run: needs a moon rocket -->\n```console\n$ a \\\n    b\n$ c '{\n  1}'\n```\n"
    (tmp_path / "page.md").write_text(f"Text.\n\n{commented}\n```toml\nx = 1\n```\n")
    first, second = blocks_of("page.md")
    assert (first.verb, first.what, first.line, second.verb) == ("not run", "needs a moon rocket", 4, "")
    assert first.commands() == ["a b", "c '{\n  1}'"]


def test_every_comment_is_before_a_block(repository: Path) -> None:
    """One with a word too many would be none."""
    for page in sorted({block.page for block in BLOCKS}):
        comments = re.findall(r"<!-- (?:not run|run by)", (repository / page).read_text())
        assert len(comments) == sum(bool(block.verb) for block in BLOCKS if block.page == page), page
