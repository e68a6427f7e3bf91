"""One row of the fault matrix: something that goes wrong, and what shows what callers see of it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """tests: `path::name`. figures: keys of docs/reliability.json. missing: what of the row nothing shows yet. awaits:
    figures without which the row is not whole, of a run that no test makes. heading: of the part that it begins."""

    title: str
    tests: tuple[str, ...] = ()
    figures: tuple[str, ...] = ()
    missing: str = ""
    awaits: str = ""
    heading: str = ""


def row(title: str, *tests: str, figures: tuple[str, ...] = (), missing: str = "", awaits: str = "") -> Row:
    """As the tables write it: tests one after the other."""
    return Row(title=title, tests=tests, figures=figures, missing=missing, awaits=awaits)
