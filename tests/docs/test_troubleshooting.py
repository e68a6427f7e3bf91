"""docs/troubleshooting.md quotes what the code says: every error text, reason, metric and word of the log is in it."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from octavo.v1 import common_pb2

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text()
PRODUCT = ("blockmgr", "cli", "gateway", "grammar", "model", "wire", "worker")
FIRST_CELLS = re.findall(r"^\| (?!it says|symptom|---)([^|]+?) \|", PAGE, re.MULTILINE)
QUOTED = sorted({text for cell in FIRST_CELLS for text in re.findall(r"`([^`]+)`", cell)})
REASONS = [value.name.removeprefix("ERROR_REASON_") for value in common_pb2.ErrorReason.DESCRIPTOR.values]
NOT_OURS = {"<think>", "DEADLINE_EXCEEDED"}  # Qwen3's, gRPC's


@cache
def strings_of_the_code() -> str:
    """Every literal text of the product, a line each; `…` where one has a value in it."""
    found = []
    for path in (each for folder in PRODUCT for each in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


@pytest.mark.parametrize("text", QUOTED)
def test_what_the_page_quotes_is_what_the_code_says(text: str) -> None:
    if text in NOT_OURS:
        return
    if re.fullmatch(r"[A-Z_]+", text):
        assert text in REASONS
    else:
        assert text in strings_of_the_code()


def test_the_page_quotes_nothing_that_only_callers_of_the_library_meet() -> None:
    """`load_model` says so where it is asked to look at every weight, which no command does."""
    assert "the weights are not finite" in strings_of_the_code()
    assert "the weights are not finite" not in PAGE


def test_a_text_that_nobody_says_is_found() -> None:
    assert len(QUOTED) >= 30
    assert "the KV cache of two requests" not in strings_of_the_code()


def test_every_metric_that_the_page_names_is_exported() -> None:
    named = set(re.findall(r"`(octavo_\w+)`", PAGE))
    assert len(named) >= 3
    assert {name for name in named if name.removesuffix("_total") not in strings_of_the_code()} == set()


def test_every_reason_that_the_service_has_is_on_this_page_or_in_the_table_of_operations() -> None:
    pages = PAGE + (ROOT / "docs/operations.md").read_text()
    assert [name for name in REASONS if name != "UNSPECIFIED" and f"`{name}`" not in pages] == []


def test_links_to_sections_lead_to_headings() -> None:
    for page, section in re.findall(r"\]\(([\w.-]+\.md)#([\w-]+)\)", PAGE):
        headings = re.findall(r"^#+ (.+)$", (ROOT / "docs" / page).read_text(), re.MULTILINE)
        slugs = {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert section in slugs, (page, section)
