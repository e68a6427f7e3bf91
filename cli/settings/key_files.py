"""Reads CURVE key files once before anything starts, so that what is wrong with one is told with its flag."""

from collections.abc import Callable, Iterable
from pathlib import Path

from octavo.cli.errors import usage
from octavo.wire.keys import KeyFileError, load_keys, load_public_key


def require_keys(flag: str, files: Iterable[Path]) -> None:
    """Of files with secret keys. Raises CliError."""
    _require(flag, files, load_keys)


def require_public_keys(flag: str, files: Iterable[Path]) -> None:
    """Of files with public keys. Raises CliError."""
    _require(flag, files, load_public_key)


def _require(flag: str, files: Iterable[Path], load: Callable[[Path], object]) -> None:
    try:
        for file in files:
            load(file)
    except KeyFileError as error:
        raise usage(f"bad value for {flag}", str(error), "make a pair with `octavo keys new`") from None
