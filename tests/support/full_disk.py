"""A disk that takes nothing more, as far as one process can play it."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def nothing_can_be_written() -> Iterator[None]:
    """Into files of any kind: each write fails as it does on a full disk, without a file's name."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
