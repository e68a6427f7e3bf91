"""The figures of docs/structure.md are those that `python -m tests.structure.figures` counts."""

import re
from functools import cache
from pathlib import Path

import pytest

from tests.structure import figures

TOLD = {
    row[1]: (row[2].strip(), row[3].strip(), int(row[4]))
    for row in re.finditer(
        r"^\| ([^|]+?) \|([^|]*)\|([^|]*)\| (\d+) \|$", (figures.ROOT / "docs/structure.md").read_text(), re.MULTILINE
    )
}
GROWS = 0.15  # more lines or files than told before the page has to be told anew
COUNTS = {
    "source files of a sampling parameter": lambda: len(figures.files_of_parameter(figures.PARAMETER)),
    "modules in the largest folder": figures.largest_folder,
    "modules under 60 lines with one importer": lambda: len(figures.small_with_one_importer()),
    "lines of Python, with bench and sim": lambda: sum(
        len(path.read_text().splitlines()) for path in figures.sources(*figures.COUNTED)
    ),
    "test files": lambda: len(list((figures.ROOT / "tests").rglob("test_*.py"))),
}


@cache
def count(name: str) -> int:
    return COUNTS[name]()


def test_the_page_has_every_figure_with_what_was_before_and_what_was_asked_for() -> None:
    wanted = {name: (old, f"≤ {bound}" if bound else "") for name, (old, bound) in figures.BEFORE_AND_BOUND.items()}
    assert {name: row[:2] for name, row in TOLD.items()} == wanted


@pytest.mark.parametrize("name", COUNTS)
def test_a_figure_of_the_page_is_what_the_command_counts(name: str) -> None:
    assert count(name) == pytest.approx(TOLD[name][2], rel=GROWS, abs=2)


@pytest.mark.parametrize("name", ["modules in the largest folder", "modules under 60 lines with one importer"])
def test_what_was_reached_is_kept(name: str) -> None:
    assert count(name) <= int(figures.BEFORE_AND_BOUND[name][1])


def test_a_small_module_with_one_importer_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "wire").mkdir()
    (tmp_path / "wire/small.py").write_text("A = 1\n")
    (tmp_path / "wire/shared.py").write_text("B = 1\n")
    (tmp_path / "wire/large.py").write_text("from octavo.wire.small import A\n" + "C = 1\n" * 80)
    (tmp_path / "wire/other.py").write_text("from octavo.wire import large, shared\n" + "D = 1\n" * 80)
    (tmp_path / "wire/last.py").write_text("import octavo.wire.shared\n" + "E = 1\n" * 80)
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    assert figures.small_with_one_importer() == ["wire.small"]
    assert figures.files_of_parameter("D = ") == ["wire/other.py"]
