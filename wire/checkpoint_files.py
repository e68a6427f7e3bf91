"""The files of a checkpoint folder, and that none of them leads out of it.

The author of a checkpoint chooses what its links point to; what is read may reach callers (the chat template does, word
by word). A file counts where it is in the folder itself, or, in a snapshot of the hub's cache, among the blobs of the
same repository:

    models--Qwen--Qwen2.5-0.5B/snapshots/COMMIT/config.json  ->  models--Qwen--Qwen2.5-0.5B/blobs/0123…

Knows no model and imports nothing but the standard library, so that workers without torch can use it.
"""

import os
import stat
from pathlib import Path

_CACHES = ("models--", "datasets--", "spaces--")


class FileRefused(ValueError):
    """A checkpoint file that leads out of the folder, is not a regular file, or is too large; the message names it."""


def find_file(folder: Path, name: str) -> Path | None:
    """The file of this plain name, or None. Raises FileRefused."""
    path = folder / name
    if os.path.basename(name) != name or name in ("", ".", ".."):
        raise FileRefused(f"{name!r} is not the plain name of a file in {folder}")
    if not os.path.lexists(path):
        return None
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError):
        raise FileRefused(f"{name} in {folder} is a link that leads to no file") from None
    if not any(target.is_relative_to(root) for root in _roots(folder)):
        raise FileRefused(f"{name} in {folder} is a link that leads out of the checkpoint, so it is not read")
    if not stat.S_ISREG(target.stat().st_mode):
        raise FileRefused(f"{name} in {folder} is not a regular file")
    return path


def check_files(folder: Path, *, suffixes: tuple[str, ...]) -> None:
    """Check every file with one of these endings. Raises FileRefused naming the first that leads elsewhere."""
    for name in sorted(os.listdir(folder)):
        if name.endswith(suffixes):
            find_file(folder, name)


def read_small_file(path: Path, *, most_bytes: int) -> bytes:
    """The content. Raises FileRefused if it is larger than most_bytes, OSError."""
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise FileRefused(f"{path.name} in {path.parent} is larger than {most_bytes:,} bytes")
    return content


def _roots(folder: Path) -> tuple[Path, ...]:
    """Folders in which this folder's files may be."""
    real = folder.resolve()
    repository = real.parent.parent
    if real.parent.name == "snapshots" and repository.name.startswith(_CACHES):
        return real, repository / "blobs"
    return (real,)
