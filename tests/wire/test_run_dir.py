"""The run directory: ours and closed, or nothing starts."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.wire.run_dir import (
    RunDirError,
    check_run_dir,
    clear_stale_socket,
    default_run_dir,
    ensure_run_dir,
    temporary_folder,
)


def test_a_new_run_directory_is_closed_to_others_whatever_the_umask(tmp_path: Path) -> None:
    former = os.umask(0)
    try:
        folder = ensure_run_dir(tmp_path / "a" / "run")
    finally:
        os.umask(former)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert ensure_run_dir(folder) == folder


@pytest.mark.parametrize("mode", [0o701, 0o710, 0o720, 0o755, 0o777, 0o1777])
def test_a_directory_that_others_can_enter_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(RunDirError, match="chmod 700"):
        ensure_run_dir(folder)


def test_a_link_to_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "run").symlink_to(tmp_path / "real")
    with pytest.raises(RunDirError, match="not a directory"):
        ensure_run_dir(tmp_path / "run")


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(RunDirError, match="not a directory"):
        ensure_run_dir(tmp_path / "run")


def test_a_directory_of_someone_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ensure_run_dir(tmp_path / "run")
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(RunDirError, match="belongs to uid"):
        check_run_dir(folder)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="gone"):
        check_run_dir(tmp_path / "gone")


def bound_socket(path: Path) -> socket.socket:
    bound = socket.socket(socket.AF_UNIX)
    bound.bind(str(path))
    return bound


def test_the_socket_of_a_dead_process_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "gateway-0.sock"
    with bound_socket(path):
        pass
    assert path.exists()
    clear_stale_socket(path)
    assert not path.exists()
    clear_stale_socket(path)


def test_the_socket_of_a_running_process_stays(tmp_path: Path) -> None:
    path = tmp_path / "gateway-0.sock"
    with bound_socket(path) as bound:
        bound.listen(0)
        with pytest.raises(RunDirError, match="in use"):
            clear_stale_socket(path)
        assert path.exists()


def test_a_file_that_is_no_socket_is_never_removed(tmp_path: Path) -> None:
    path = tmp_path / "gateway-0.sock"
    path.write_text("precious")
    with pytest.raises(RunDirError, match="not a socket"):
        clear_stale_socket(path)
    assert path.read_text() == "precious"


def test_the_default_is_in_the_users_runtime_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert default_run_dir() == Path("/run/user/7/octavo")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert default_run_dir() == Path(f"/tmp/octavo-{os.geteuid()}")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "run")  # each working directory would have another
    assert default_run_dir() == Path(f"/tmp/octavo-{os.geteuid()}")


_HOLD = """
import sys
from pathlib import Path
from octavo.wire.run_dir import temporary_folder
with temporary_folder("octavo-seat-", within=Path(sys.argv[1])) as folder:
    (folder / "worker_key_file").write_text("secret")
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_the_folder_of_a_process_that_was_killed_is_removed_by_the_next_and_no_other(tmp_path: Path) -> None:
    strange = tmp_path / "octavo-seat-of-nobody"  # not made here, or not locked yet
    strange.mkdir(mode=0o700)
    command = [sys.executable, "-c", _HOLD, str(tmp_path)]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as killed,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as living,
    ):
        assert killed.stdout is not None
        assert living.stdout is not None
        abandoned, held = Path(killed.stdout.readline().strip()), Path(living.stdout.readline().strip())
        killed.kill()
        killed.wait()
        assert (abandoned / "worker_key_file").exists()
        with temporary_folder("octavo-seat-", within=tmp_path) as own:
            assert own.stat().st_mode & 0o777 == 0o700
            assert set(tmp_path.iterdir()) == {own, held, strange}
            assert (held / "worker_key_file").exists()
        living.communicate("")
    assert set(tmp_path.iterdir()) == {strange}
