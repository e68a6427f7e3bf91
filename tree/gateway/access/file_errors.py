"""A file of the front door that cannot be used, told in three parts. Knows no file format."""

import os
import stat
from pathlib import Path


class AccessFileError(Exception):
    """what: which file. numbers: what is wrong with it. change: what to do."""

    def __init__(self, what: str, numbers: str, change: str) -> None:
        super().__init__(f"{what}: {numbers}; {change}")
        self.what = what
        self.numbers = numbers
        self.change = change


def read_private(path: Path, setting: str, *, closed_to: int) -> bytes:
    """The bytes of a file that others must not read. closed_to: mode bits that must be 0. Raises AccessFileError."""
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            data = file.read()
    except OSError as error:
        raise unreadable(path, setting, error) from None
    if mode & closed_to:
        numbers = f"{path} has mode {mode:04o}: others may read it"
        raise AccessFileError(f"{setting} is open to others", numbers, f"chmod 600 {path}")
    return data


def unreadable(path: Path, setting: str, error: OSError) -> AccessFileError:
    """A file that is absent or closed to us."""
    return AccessFileError(
        f"{setting} cannot be read", f"{path}: {error.strerror or error}", "give the path of a file that we may read"
    )
