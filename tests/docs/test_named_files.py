"""Files that the pages name are there."""

import re
from pathlib import Path

import pytest

_FOLDERS = "bench|blockmgr|cli|deploy|docs|examples|gateway|grammar|model|proto|sim|tests|wire|worker"
_NAMED = re.compile(
    rf"`(?P<path>(?:{_FOLDERS})/[\w./-]*|\.ci/run|\.github/[\w./-]+|\.pre-commit-config\.yaml)(?:::\w+)?`"
)
_LINKED = re.compile(r"\]\((?P<path>[\w./-]+)(?:#[\w-]*)?\)")
_TOLD_AS_GONE = ("docs/decisions/",)  # decisions tell of their own time


def pages(repository: Path) -> list[Path]:
    return [*repository.glob("*.md"), *(repository / "docs").rglob("*.md")]


def test_every_file_that_a_page_names_is_there(repository: Path) -> None:
    missing = [
        (str(page.relative_to(repository)), path)
        for page in pages(repository)
        if not str(page.relative_to(repository)).startswith(_TOLD_AS_GONE)
        for path in _NAMED.findall(page.read_text())
        if not (repository / path).exists() and not list(repository.glob(f"{path}*"))
    ]
    assert missing == []


def test_every_link_leads_to_a_file(repository: Path) -> None:
    missing = [
        (str(page.relative_to(repository)), path)
        for page in pages(repository)
        for path in _LINKED.findall(page.read_text())
        if not (page.parent / path).exists()
    ]
    assert missing == []


@pytest.mark.parametrize(
    "heading", ["a sampling parameter", "a metric", "an RPC", "an attention backend", "a model family"]
)
def test_each_recipe_names_the_files_to_change(heading: str, repository: Path) -> None:
    recipe = (repository / "CONTRIBUTING.md").read_text().partition(f"## Add {heading}\n")[2].partition("\n## ")[0]
    assert len(_NAMED.findall(recipe)) >= 3
    assert "Tests: " in recipe or "`tests/" in recipe or "gateway/dialects/" in recipe


def test_the_workflow_calls_what_anybody_can_call(repository: Path) -> None:
    assert "- run: .ci/run\n" in (repository / ".github/workflows/ci.yml").read_text()
    assert (repository / ".ci/run").stat().st_mode & 0o111


def test_every_folder_within_a_folder_has_its_job_told(repository: Path) -> None:
    page = (repository / "docs/architecture.md").read_text()
    roots = [repository / name for name in ("worker", "gateway", "model", "cli")]
    folders = [each for root in roots for each in root.iterdir() if list(each.glob("*.py"))]
    assert [each for each in folders if f"| `{each.relative_to(repository)}/` |" not in page] == []
