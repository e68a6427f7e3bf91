"""The run directory that holds ipc sockets: 0700 and ours, or nothing starts.

File permissions are the only thing that keeps other users of the host from an ipc socket.
"""

import errno
import os
import socket
import stat
from pathlib import Path


class RunDirError(Exception):
    """The run directory cannot be trusted or used; the message says what is wrong and what to do."""


def default_run_dir() -> Path:
    """$XDG_RUNTIME_DIR/octavo, else /tmp/octavo-<uid>."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "octavo" if runtime else Path("/tmp") / f"octavo-{os.geteuid()}"


def ensure_run_dir(folder: Path) -> Path:
    """Make the folder 0700 if it is absent, and check it. Raises RunDirError."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise RunDirError(f"cannot make run directory {folder}: {error.strerror}") from None
    check_run_dir(folder)
    return folder


def check_run_dir(folder: Path) -> None:
    """Raises RunDirError unless it is a directory (no link), owned by this user, closed to all others."""
    try:
        info = folder.lstat()
    except OSError as error:
        raise RunDirError(f"cannot read run directory {folder}: {error.strerror}") from None
    if not stat.S_ISDIR(info.st_mode):
        raise RunDirError(f"run directory {folder} is not a directory (links are refused)")
    if info.st_uid != os.geteuid():
        raise RunDirError(f"run directory {folder} belongs to uid {info.st_uid}, not to {os.geteuid()}")
    if stat.S_IMODE(info.st_mode) & 0o077:
        mode = stat.S_IMODE(info.st_mode)
        raise RunDirError(f"run directory {folder} has mode {mode:04o}; others must not enter: chmod 700 {folder}")


def clear_stale_socket(path: Path) -> None:
    """Unlink the socket of a process that has ended. Raises RunDirError where one listens, or where it is no socket."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise RunDirError(f"{path} exists and is not a socket; move it away")
    if _is_listening(path):
        raise RunDirError(f"{path} is in use by a running process; stop it or choose another run directory")
    path.unlink(missing_ok=True)


def _is_listening(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        code = probe.connect_ex(str(path))
    # EAGAIN: a process listens, and its backlog is full.
    return code not in (errno.ECONNREFUSED, errno.ENOENT)
