"""Files that others read while they are written anew: whoever opens one finds the old text or the new one, whole.

For one user alone (0600), since some of them hold secrets.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from octavo.wire.regular_file import blaming


def write_whole(path: Path, text: str) -> None:
    """Replace the file. Raises OSError; then it is unchanged."""
    with _replacing(path) as file:
        file.write(text)


def write_durably(path: Path, text: str) -> None:
    """`write_whole`, and the content is on disk when this returns, even if the power fails then. Keeps the file's
    owner, also if root writes it. Raises OSError."""
    with _replacing(path) as file:
        with suppress(FileNotFoundError):
            before = path.stat()
            os.fchown(file.fileno(), before.st_uid, before.st_gid)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _replacing(path: Path) -> Iterator[TextIO]:
    fresh = path.with_name(f".{path.name}.{os.getpid()}")  # another process may write the same file now
    try:
        fresh.unlink(missing_ok=True)  # of a process that had this id, and was killed
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with blaming(path), os.fdopen(descriptor, "w", encoding="utf-8") as file:
            yield file
        fresh.replace(path)
    except BaseException:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise
