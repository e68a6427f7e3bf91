"""The run directory for ipc sockets, which must be ours and 0700; and temporary folders that go with their process.

File permissions are the only thing that keeps other users of the host from an ipc socket.
"""

import errno
import fcntl
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MAX_SOCKET_PATH_BYTES = 107  # sockaddr_un.sun_path less its NUL
MAX_RUN_DIR_BYTES = MAX_SOCKET_PATH_BYTES - len("/gateway-99.peers.sock")
_HELD = ".held"
"""In each temporary folder of ours: whoever made it has it locked for as long as it lives."""


class RunDirError(Exception):
    """The run directory cannot be trusted or used; the message says what is wrong and what to do."""


def default_run_dir() -> Path:
    """$XDG_RUNTIME_DIR/octavo, else /tmp/octavo-<uid>. A variable that is no absolute path is none, as the standard has
    it: it would name another folder in each working directory."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(runtime) / "octavo" if runtime.startswith("/") else Path("/tmp") / f"octavo-{os.geteuid()}"


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


@contextmanager
def temporary_folder(prefix: str, *, within: Path | None = None) -> Iterator[Path]:
    """A new folder only for this user, removed at the end. If a process was killed, its folder stays behind; such
    folders of ours with the same prefix are removed first. within: where; None: the system's folder for temporary
    files. Raises OSError."""
    place = within or Path(tempfile.gettempdir())
    _remove_abandoned(place, prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
    try:
        unlocked = folder / f"{_HELD}.new"  # nobody who looks around takes it for abandoned before it is locked
        with unlocked.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            unlocked.rename(folder / _HELD)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def folder_of_sockets(prefix: str) -> Iterator[Path]:
    """A `temporary_folder` whose path, even with `run` appended, is short enough for sockets: in $TMPDIR if possible,
    else in this user's run directory. Raises OSError, RunDirError."""
    longest = Path(tempfile.gettempdir()) / f"{prefix}12345678" / "run"  # as mkdtemp names them
    in_place = len(os.fsencode(longest)) <= MAX_RUN_DIR_BYTES
    with temporary_folder(prefix, within=None if in_place else ensure_run_dir(default_run_dir())) as folder:
        yield folder


@contextmanager
def held_run_dir(folder: Path) -> Iterator[None]:
    """Hold a run directory exclusively: another process would take the names of its sockets and files. Raises
    RunDirError if it is held already."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # some file systems lock no folders
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunDirError(f"another service that runs has the run directory {folder}") from None
        yield
    finally:
        os.close(descriptor)


def check_room_for_sockets(folder: Path) -> None:
    """Raises RunDirError if sockets in this folder would have paths that are too long to bind."""
    if (length := len(os.fsencode(folder))) > MAX_RUN_DIR_BYTES:
        raise RunDirError(
            f"the path of run directory {folder} has {length} bytes, of which {MAX_RUN_DIR_BYTES} leave room for the "
            "names of sockets: choose a shorter one"
        )


def _remove_abandoned(place: Path, prefix: str) -> None:
    for folder in place.glob(f"{prefix}*"):
        with suppress(OSError, RunDirError):  # it is held, another user's, or just gone
            check_run_dir(folder)
            descriptor = os.open(folder / _HELD, os.O_WRONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def clear_stale_socket(path: Path) -> None:
    """Unlink the socket of a process that has ended. Raises RunDirError if a process listens on it, or it is not a
    socket."""
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
