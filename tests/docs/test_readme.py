"""README's first screen: what it is, why one would take it, two commands to try it; its figures are those of the page
of figures."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCREEN = 30  # lines of it, on a terminal or on a code host
PAGES = ("README.md", "README.zh.md")


def first_screen(page: str) -> str:
    return "\n".join((ROOT / page).read_text().splitlines()[:SCREEN])


@pytest.mark.parametrize("page", PAGES)
def test_the_first_screen_has_two_commands(page: str) -> None:
    block = re.search(r"^```console\n(.*?)^```$", first_screen(page), re.MULTILINE | re.DOTALL)
    assert block is not None
    assert [line.split("#")[0].strip() for line in block[1].splitlines()] == ["$ make demo", "$ make serve"]


@pytest.mark.parametrize("page", PAGES)
def test_its_figures_are_those_of_the_page_of_figures(page: str) -> None:
    (reason,) = re.findall(r"^\* .*docs/performance\.md.*$", first_screen(page), re.MULTILINE)
    figures = [each for each in re.findall(r"(?<![\w.])\d+\.\d+(?![\w.])", reason) if not each.startswith("2.5")]
    performance = (ROOT / "docs/performance.md").read_text()
    rows = [row for row in performance.splitlines() if re.search(r"\| (0\.5B|7B) \|", row)][:2]
    assert len(figures) == 4
    assert [each for each in figures if each not in " ".join(rows)] == []


@pytest.mark.parametrize("page", PAGES)
def test_it_says_no_word_of_the_trade_before_what_it_means(page: str) -> None:
    words = ["gateway", "worker process", "block manager", "ZeroMQ", "detokeniz", "epoch"]
    intro = first_screen(page).partition("```")[0]
    assert [word for word in words if word in intro] == []
