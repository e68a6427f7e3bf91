"""`octavo keys`: what is wrong with a name, a time or a file is told, and who reads the file of keys still can."""

import os
import stat
from pathlib import Path

import pytest

from octavo.cli.main import main
from octavo.gateway.auth.key_file import load_access_list


@pytest.fixture
def file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    path = tmp_path / "api-keys.toml"
    assert main(["keys", "new-api", "ann", "--file", str(path)]) == 0
    capsys.readouterr()
    return path


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("ann",), "there is a key of the name 'ann' already"),
        (("bob", "--expires", "tomorrow"), "--expires is 'tomorrow': Invalid value"),
        (("bob", "--expires", "2027-01-31"), "keys.bob: expires is a time with its zone"),
        (("bob", "--scope", "root"), "keys.bob: scopes must be a list"),
    ],
)
def test_what_is_wrong_with_a_key_is_told_and_nothing_else(
    words: tuple[str, ...], told: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = file.read_bytes()
    assert main(["keys", "new-api", *words, "--file", str(file)]) == 2
    what, numbers, _ = capsys.readouterr().err.splitlines()
    assert (what, numbers.strip()[: len(told)]) == ("error: the key cannot be added", told)
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "what"),
    [(None, "--file cannot be read"), ("[", "--file is not TOML"), ("[keys.a]", "--file has a bad entry")],
)
def test_a_file_of_keys_that_is_none_is_told_by_the_flag_that_named_it(
    content: str | None, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file"
    if content is None:
        path.mkdir()
    else:
        path.write_text(content)
        path.chmod(0o600)
    assert main(["keys", "new-api", "ann", "--file", str(path)]) == 2
    assert capsys.readouterr().err.splitlines()[0] == f"error: {what}"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_the_gateways_file_stays_the_gateways_where_root_adds_a_key(file: Path) -> None:
    os.chown(file, 4242, 4243)
    assert main(["keys", "new-api", "bob", "--file", str(file)]) == 0
    after = file.stat()
    assert (after.st_uid, after.st_gid, stat.S_IMODE(after.st_mode)) == (4242, 4243, 0o600)
    assert len(load_access_list(file).ring) == 2


@pytest.mark.parametrize("command", [("new", "a", "--folder"), ("new-api", "a", "--file")])
def test_a_place_that_cannot_be_written_is_told_with_what_to_give(
    command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "keys"
    assert main(["keys", *command, str(place / "more")]) == 1
    what, numbers, advice = capsys.readouterr().err.splitlines()
    assert "cannot be written" in what
    assert "Not a directory" in numbers
    assert command[-1] in advice
