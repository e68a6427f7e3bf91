"""A cache folder works, or one sentence names it and the variable that chooses another."""

import errno
import os
import tempfile
from pathlib import Path

import pytest

from octavo.model.cache_folder import CacheUnusable, cache_folder, require_executable, require_writable


def test_it_is_where_the_variable_says_or_in_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder("paths") == Path("/home/somebody/.cache/octavo/paths")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/octavo")
    assert cache_folder("paths") == Path("/var/cache/octavo/octavo/paths")


def test_a_user_without_a_home_is_told_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a container that runs under a number which no file of users has."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(CacheUnusable, match=r"^this user has no home folder: name a folder with XDG_CACHE_HOME$"):
        cache_folder("native")


def test_a_folder_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    require_executable(tmp_path / "a" / "b", "HERE")
    assert (tmp_path / "a" / "b").stat().st_mode & 0o077 == 0
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(dir: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(CacheUnusable) as caught:
        require_writable(tmp_path, "HERE")
    said = f"{tmp_path} cannot be written (No space left on device): name another folder with HERE"
    assert str(caught.value) == said
