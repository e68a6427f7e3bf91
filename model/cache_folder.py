"""Folders for what costs time to make and outlives a process: compiled kernels, choices that were measured.

Must not know: what is kept there.
"""

import os
import tempfile
from pathlib import Path

VARIABLE = "XDG_CACHE_HOME"


class CacheUnusable(OSError):
    """A folder that cannot be used; the text is one sentence that names it and the variable to set."""


def cache_folder(part: str) -> Path:
    """$XDG_CACHE_HOME/octavo/PART, or ~/.cache/octavo/PART; it may not exist. Raises CacheUnusable if there is no
    home."""
    try:
        root = Path(os.environ.get(VARIABLE) or Path.home() / ".cache")
    except RuntimeError as error:
        raise CacheUnusable(f"this user has no home folder: name a folder with {VARIABLE}") from error
    return root / "octavo" / part


def triton_folder() -> Path:
    """Where triton keeps compiled kernels ($TRITON_CACHE_DIR)."""
    from triton import knobs

    return Path(knobs.cache.dir)


def require_writable(folder: Path, variable: str) -> None:
    """Create the folder if it is missing, and check that it is writable. Raises CacheUnusable."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"\0")
    except OSError as error:
        raise CacheUnusable(
            f"{folder} cannot be written ({error.strerror}): name another folder with {variable}"
        ) from error


def require_executable(folder: Path, variable: str) -> None:
    """`require_writable` for a folder from which compiled libraries are loaded too. Raises CacheUnusable."""
    require_writable(folder, variable)
    if os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0):
        raise CacheUnusable(
            f"{folder} is mounted noexec, so nothing compiled there can be loaded: name another folder with {variable}"
        )
