"""A full disk, as far as one process can simulate it."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def nothing_can_be_written() -> Iterator[None]:
    """Every write to a file, of any kind, fails as on a full disk, with an error that names no file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
