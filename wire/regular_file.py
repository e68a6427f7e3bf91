"""Files that a setting names and that may be exchanged at any time: keys, certificates, lists of addresses."""

import errno
import os
import stat
from pathlib import Path


def read_regular(path: Path) -> tuple[bytes, os.stat_result]:
    """The content, and what the system says of the very file that was read; links are followed.

    Raises OSError, also where the path leads to something else than a file: who reads a pipe waits for its writer, and
    devices have no end.
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
