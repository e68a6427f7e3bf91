"""README.zh.md says what README.md says: the same commands, code, names and links under as many headings."""

import re
from pathlib import Path

import pytest

from tests.docs.blocks import blocks_of

ROOT = Path(__file__).resolve().parents[2]
ENGLISH, CHINESE = ((ROOT / name).read_text() for name in ("README.md", "README.zh.md"))


def without_remarks(code: str) -> list[str]:
    """A shell's comments are translated."""
    return [re.sub(r"\s+# .*$", "", line) for line in code.splitlines()]


def test_the_blocks_are_the_same_but_for_remarks() -> None:
    english, chinese = blocks_of("README.md"), blocks_of("README.zh.md")
    assert [(each.language, each.verb, each.what, without_remarks(each.code)) for each in chinese] == [
        (each.language, each.verb, each.what, without_remarks(each.code)) for each in english
    ]


def test_headings_and_rows_are_as_many() -> None:
    for pattern in (r"^#+ ", r"^\| "):
        assert len(re.findall(pattern, CHINESE, re.MULTILINE)) == len(re.findall(pattern, ENGLISH, re.MULTILINE))


def test_the_commands_of_the_tables_are_the_same_in_the_same_order() -> None:
    lines = [[line for line in text.splitlines() if line.startswith("| ")] for text in (ENGLISH, CHINESE)]
    rows = [[re.findall(r"`([^`]+)`", line) for line in each] for each in lines]
    assert [sorted(row) for row in rows[1]] == [sorted(row) for row in rows[0]]


@pytest.mark.parametrize("pattern", [r"\]\(([\w./-]+)\)"])
def test_every_link_of_the_one_is_in_the_other(pattern: str) -> None:
    assert set(re.findall(pattern, CHINESE)) ^ set(re.findall(pattern, ENGLISH)) == {"README.md", "README.zh.md"}


def test_it_is_chinese() -> None:
    assert len(re.findall(r"[\u4e00-\u9fff]", CHINESE)) > 1000
