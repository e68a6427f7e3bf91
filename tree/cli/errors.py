"""Errors as a person reads them: what happened, with which numbers, what to change.

Knows no command; must not print (that is `cli.main`'s).
"""

from dataclasses import dataclass


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
