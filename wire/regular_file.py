"""Files that a setting names and that may be exchanged at any time: keys, certificates, lists of addresses."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def blaming(path: Path) -> Iterator[None]:
    """While a file is written: what the system says of a full disk then does not say which one."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def read_regular(path: Path) -> tuple[bytes, os.stat_result]:
    """(content, stat of the very file that was read). Links are followed.

    Raises OSError, also if the path is not a regular file: reading a pipe would wait for its writer, and devices never
    end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # else even opening a pipe waits
    try:
        info = os.fstat(descriptor)
        if stat.S_ISDIR(info.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "Not a regular file", str(path))
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(), info
    finally:
        os.close(descriptor)
