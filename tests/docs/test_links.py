"""Every link of a page leads somewhere: to a file of the repository, and to a heading that the file has."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [Path(page) for page in ("README.md", "README.zh.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]
PAGES += [path.relative_to(ROOT) for folder in ("docs", "bench") for path in sorted((ROOT / folder).rglob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCED = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


@cache
def headings(path: Path) -> frozenset[str]:
    """As GitHub names them: small, without punctuation, with hyphens for spaces; one that comes again has a number."""
    found: dict[str, int] = {}
    names = set()
    for title in re.findall(r"^#{1,6} (.+)$", FENCED.sub("", path.read_text()), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).strip().lower()
        name = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        names.add(f"{name}-{found[name]}" if name in found else name)
        found[name] = found.get(name, 0) + 1
    return frozenset(names)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_link_leads_to_a_file_and_a_heading_of_it(page: Path) -> None:
    lost = []
    for link in LINK.findall(FENCED.sub("", (ROOT / page).read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, heading = link.partition("#")
        path = (ROOT / page.parent / file).resolve() if file else ROOT / page
        if not path.exists() or (heading and path.suffix == ".md" and heading not in headings(path)):
            lost.append(link)
    assert lost == []


def test_headings_are_named_as_on_github(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Hopper's own, (88f7b191)\n## `F.linear` beside\n## Twice\n## Twice\n```\n# no heading\n```\n")
    assert headings(page) == {"hoppers-own-88f7b191", "flinear-beside", "twice", "twice-1"}
