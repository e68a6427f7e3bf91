"""Errors as a person reads them: what happened, with which numbers, what to change; and the known name that was meant.

Knows no command; must not print (`cli.explain` does).
"""

from collections.abc import Iterable
from dataclasses import dataclass

_MOST_SHOWN = 200  # characters of a value
INTERRUPTED = 130  # the exit code of a command that Ctrl-C ended


@dataclass(eq=False)
class CliError(Exception):
    """Three lines for a person. `exit_code` 2 means that the command line or a setting is wrong, 1 anything else."""

    what: str
    numbers: str
    change: str
    exit_code: int = 1

    def __str__(self) -> str:
        return f"{self.what}: {self.numbers}"


def usage(what: str, numbers: str, change: str) -> CliError:
    """A mistake on the command line, in the environment or in the configuration file."""
    return CliError(what, numbers, change, exit_code=2)


def shorten(value: object) -> str:
    """Its repr, cut in the middle where it is very long, so that what is said of it can be read."""
    text = repr(value)
    half = _MOST_SHOWN // 2
    return text if len(text) <= _MOST_SHOWN else f"{text[:half]}…{text[-half:]}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most similar to this one; None if none is similar enough."""
    from difflib import get_close_matches  # only where there is a mistake

    by_lower = {each.lower(): each for each in known}
    found = get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def did_you_mean(name: str, known: Iterable[str], *, otherwise: str) -> str:
    """A line of advice: the nearest name, or else what to do instead."""
    found = nearest(name, known)
    return f"did you mean {found}?" if found else otherwise
