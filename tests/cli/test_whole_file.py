"""A file that is written anew is the old one or the new one, whole, for this user alone."""

import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.cli.whole_file import write_durably, write_whole
from tests.support.full_disk import nothing_can_be_written

both = pytest.mark.parametrize("write", [write_whole, write_durably])


@both
def test_a_file_is_replaced_and_nothing_else_is_left(write: Callable[[Path, str], None], tmp_path: Path) -> None:
    path = tmp_path / "peers"
    path.write_text("old")
    path.chmod(0o644)
    write(path, "neu, größer")
    assert path.read_text(encoding="utf-8") == "neu, größer"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["peers"]


@both
def test_what_had_the_old_file_open_still_reads_all_of_it(write: Callable[[Path, str], None], tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("old")
    with path.open() as held:
        write(path, "new")
        assert (held.read(), path.read_text()) == ("old", "new")


@both
def test_a_text_that_cannot_be_written_leaves_the_file_as_it_was(
    write: Callable[[Path, str], None], tmp_path: Path
) -> None:
    path = tmp_path / "peers"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write(path, "no UTF-8: \ud800")
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["peers"]


def test_a_folder_that_is_not_there_is_an_error_that_stays_the_same(tmp_path: Path) -> None:
    said = set()
    for _ in range(2):
        with pytest.raises(FileNotFoundError) as raised:
            write_whole(tmp_path / "gone" / "peers", "text")
        said.add(str(raised.value))
    assert len(said) == 1  # who tells a failure once knows it again


@both
def test_a_full_disk_is_told_with_the_file(write: Callable[[Path, str], None], tmp_path: Path) -> None:
    with nothing_can_be_written(), pytest.raises(OSError, match="file"):
        write(tmp_path / "file", "x")
    assert list(tmp_path.iterdir()) == []
