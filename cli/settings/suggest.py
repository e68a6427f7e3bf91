"""Did-you-mean: the known name nearest to a mistyped one."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that looks most like this one, None where nothing comes near."""
    by_lower = {each.lower(): each for each in known}
    found = get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def did_you_mean(name: str, known: Iterable[str], *, otherwise: str) -> str:
    """A line of advice: the nearest name, or what to do where there is none."""
    found = nearest(name, known)
    return f"did you mean {found}?" if found else otherwise
