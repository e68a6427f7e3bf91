"""docs/reliability.md from the matrix and the figures: `python -m tests.faults.page`."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from tests.faults.matrix import ROWS, Row
from tests.faults.mutants import CONTROLS, MUTANTS

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "reliability.md"
FIGURES = REPOSITORY / "docs" / "reliability.json"

INTRODUCTION = """# Reliability

What callers see when something goes wrong, and the tests that show it. Made by `python -m tests.faults.page` from
`tests/faults/matrix.py` and `docs/reliability.json`; a test compares.

Each row is a fault. The request that it hits is the victim, all others are bystanders. Most rows run on the *oracle*, a
stand-in for the model that reads its tokens back out of the blocks: one that is leaked, used twice or out of date shows
in the bytes that callers get. After every row on a running service eight things are checked:

* the blocks of the cache add up;
* nothing hangs;
* bystanders have every byte that they would have had, victims a beginning of it and one end;
* descriptors, threads and memory are back;
* the metrics fit the calls that were made;
* a small request that is sent then (the canary) is served within two seconds;
* the gateway lived;
* nobody saw a traceback, or the status UNKNOWN.

That nobody has another byte holds for the oracle, and for models with `--deterministic`. Without it the rounding of a
moved or preempted output may turn a near tie, and what follows is a continuation of what was delivered.

`make test` runs all rows but the proofs of minutes, which `make faults-long` runs.

`make soak` is row 60: a service of one gateway and two workers, half an hour at 70 % of the load that it can serve,
under faults of all other rows that make sense there, drawn from a seed. Every 20 seconds the load pauses and the eight
things are checked. Availability counts each request of a well-behaved caller that did not come through whole, deserved
or not, without retries. Unavailable is the service while none of ten new callers a second is served. Memory is a slope
over all lives of the processes of a kind, with its 95 % interval, in MiB an hour.
"""


def page() -> str:
    """The whole text."""
    figures = json.loads(FIGURES.read_text())
    num_missing = sum(bool(missing(row, figures)) for row in ROWS.values())
    parts = [INTRODUCTION, f"{len(ROWS) - num_missing} of {len(ROWS)} rows are shown whole.\n"]
    for number, row in ROWS.items():
        if row.heading:
            parts.append(f"## {row.heading}\n\n| # | what happens | shown by | figures |\n|---|---|---|---|")
        parts.append(f"| {number} | {row.title} | {_how(row, figures)} | {_figures(row, figures)} |")
        if number + 1 not in ROWS or ROWS[number + 1].heading:
            parts.append("")
    parts.append(_where(figures))
    parts.append("## Planted bugs\n\nBugs of other servers, planted one at a time; each is noticed.\n")
    parts.append("| # | bug | noticed by | layer |\n|---|---|---|---|")
    parts += [f"| {each.number} | {each.title} | {_listed(each.tests)} | {each.layer} |" for each in MUTANTS]
    parts.append("\n## Negative controls\n\n| planted | reported by |\n|---|---|")
    parts += [f"| {title} | {_listed(tests)} |" for title, tests in CONTROLS.items()]
    return "\n".join(parts) + "\n"


def _listed(tests: tuple[str, ...]) -> str:
    return "<br>".join(f"`{test}`" for test in tests)


def missing(row: Row, figures: dict[str, Any]) -> str:
    """What of a row is not shown; nothing where it is whole."""
    return row.missing or ("" if row.awaits in ("", *figures) else "the figures of its long run")


def _how(row: Row, figures: dict[str, Any]) -> str:
    tests = [f"`{test}`" for test in row.tests]
    absent = missing(row, figures)
    return "<br>".join([*tests, *([f"missing: {absent}"] if absent else [])])


def _figures(row: Row, figures: dict[str, Any]) -> str:
    found = (figures[key]["figures"] for key in row.figures if key in figures)
    return "<br>".join(", ".join(f"{name.replace('_', ' ')} {_shown(each[name])}" for name in each) for each in found)


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return "(" + ", ".join(f"{name}: {number}" for name, number in value.items()) + ")"
    return str(value)


def _where(figures: dict[str, Any]) -> str:
    runs = Counter((each["date"], each["machine"]) for each in figures.values())
    listed = "; ".join(f"{count} on {date} ({machine})" for (date, machine), count in sorted(runs.items()))
    return f"Figures were seen by test runs: {listed}. [reliability.json](reliability.json) has the commit of each.\n"


if __name__ == "__main__":
    PAGE.write_text(page())
