"""bench/README.md has every bench that can be run, in the table of its folder; bench/RESULTS.md says where it stands at
a glance."""

import re
from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "bench"
PAGE = (BENCH / "README.md").read_text()


def test_the_page_names_every_bench() -> None:
    for folder in ("gpu", "cpu", "worker", "gateway"):
        table = PAGE[PAGE.index(f"| `{folder}` |") :].partition("\n\n")[0]
        rows = "\n".join(row.split("|")[1] for row in table.splitlines()[2:])
        named = set(re.findall(r"`([\w.]+)`", rows))
        commands = {
            ".".join(path.relative_to(BENCH / folder).with_suffix("").parts).removesuffix(".__main__")
            for path in (BENCH / folder).rglob("*.py")
            if "__main__" in path.read_text() + path.stem
        }
        benches = {name for name in commands if "." not in name}
        assert (benches - named, named - commands) == (set(), set())


def test_where_it_stands_has_one_figure_for_each_bar_and_no_chain_of_older_ones() -> None:
    """Those are in the sections that a row links to."""
    results = (BENCH / "RESULTS.md").read_text()
    tables = results[results.index("\n## Where it stands") : results.index("\n## One H200, bar by bar")]
    rows = [line for line in tables.splitlines() if line.startswith("| ")]
    cells = [re.sub(r"\]\([^)]*\)", "]", cell).strip() for row in rows for cell in row.split("|")]
    assert [cell for cell in cells if len(cell) > 120] == []
