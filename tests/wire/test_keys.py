"""Key files: made closed, refused open, never printed."""

import os
from pathlib import Path

import pytest

from octavo.wire.keys import (
    KeyFileError,
    KeyPair,
    generate_keys,
    is_open_to_others,
    load_keys,
    load_public_key,
    save_keys,
)
from tests.support.full_disk import nothing_can_be_written


def test_keys_come_back_from_their_files(tmp_path: Path) -> None:
    keys = generate_keys()
    secret_file, public_file = save_keys(keys, tmp_path / "keys", "worker")
    assert (secret_file.name, public_file.name) == ("worker.key", "worker.pub")
    assert load_keys(secret_file) == keys
    assert load_public_key(public_file) == load_public_key(secret_file) == keys.public


def test_the_secret_file_is_ours_alone_and_the_public_one_has_no_secret(tmp_path: Path) -> None:
    keys = generate_keys()
    secret_file, public_file = save_keys(keys, tmp_path / "keys", "worker")
    assert secret_file.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o700
    assert keys.secret not in public_file.read_bytes()
    with pytest.raises(KeyFileError, match="no secret key"):
        load_keys(public_file)


def test_keys_are_never_overwritten(tmp_path: Path) -> None:
    keys = generate_keys()
    save_keys(keys, tmp_path, "worker")
    with pytest.raises(KeyFileError, match="exists"):
        save_keys(generate_keys(), tmp_path, "worker")
    assert load_keys(tmp_path / "worker.key") == keys


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_secret_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    secret_file, _ = save_keys(generate_keys(), tmp_path, "worker")
    secret_file.chmod(mode)
    with pytest.raises(KeyFileError, match="chmod 600"):
        load_keys(secret_file)


@pytest.mark.parametrize("content", ["", "public = 1", 'public = "short"', "\xff", "= =", 'secret = "x"'])
def test_a_malformed_file_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "odd.pub"
    path.write_text(content, "latin-1")
    with pytest.raises(KeyFileError, match=r"odd\.pub"):
        load_public_key(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="cannot read"):
        load_keys(tmp_path / "none.key")


def test_a_file_in_the_place_of_the_folder_is_told_as_such(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.touch()
    with pytest.raises(KeyFileError, match=f"^{file} is a file, not a folder$"):
        save_keys(generate_keys(), file, "a")


def test_a_secret_is_not_in_its_repr() -> None:
    assert "s3cret" not in repr(KeyPair(public=b"p", secret=b"s3cret"))


@pytest.mark.parametrize(
    ("owner", "mode", "is_open"),
    [
        (10001, 0o600, False),
        (10001, 0o640, True),
        (0, 0o440, False),  # as Kubernetes mounts a Secret for a pod with an fsGroup
        (0, 0o460, True),
        (0, 0o444, True),
    ],
)
def test_our_group_may_read_what_root_gave_to_it(
    owner: int, mode: int, is_open: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 10001)
    assert is_open_to_others(os.stat_result((0o100000 | mode, 0, 0, 1, owner, 10001, 0, 0, 0, 0))) is is_open


def test_root_itself_keeps_its_secrets_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert is_open_to_others(os.stat_result((0o100440, 0, 0, 1, 0, 0, 0, 0, 0, 0)))


def test_keys_of_two_pairs_are_refused_and_so_is_what_is_no_z85(tmp_path: Path) -> None:
    one, two, path = generate_keys(), generate_keys(), tmp_path / "mixed.key"
    path.touch(mode=0o600)
    path.write_text(f'public = "{one.public.decode()}"\nsecret = "{two.secret.decode()}"\n')
    with pytest.raises(KeyFileError, match=r"mixed\.key are not of one pair"):
        load_keys(path)
    path.write_text(f'public = "{one.public.decode()}"\nsecret = "{40 * " "}"\n')
    with pytest.raises(KeyFileError, match=r"mixed\.key has no secret key of 40 characters in Z85"):
        load_keys(path)
    path.write_text(f'public = "{40 * "#"}"\nsecret = "{40 * "#"}"\n')
    with pytest.raises(KeyFileError, match=r"mixed\.key are not of one pair"):
        load_keys(path)


def test_a_pipe_a_folder_and_what_is_nested_too_deeply_are_refused_at_once(tmp_path: Path) -> None:
    """Who opens a pipe waits for its writer."""
    pipe, folder, deep = tmp_path / "pipe.key", tmp_path / "folder.key", tmp_path / "deep.key"
    os.mkfifo(pipe, 0o600)
    folder.mkdir()
    deep.write_text("secret = " + 5000 * "[")
    for path, words in ((pipe, "Not a regular file"), (folder, "Is a directory"), (deep, "not a key file")):
        for load in (load_keys, load_public_key):
            with pytest.raises(KeyFileError, match=words):
                load(path)


def test_keys_that_a_full_disk_does_not_take_are_named_and_not_in_the_way_of_the_next_try(tmp_path: Path) -> None:
    with nothing_can_be_written(), pytest.raises(KeyFileError, match=r"cannot write .*/a\.key: "):
        save_keys(generate_keys(), tmp_path, "a")
    assert list(tmp_path.iterdir()) == []
    save_keys(generate_keys(), tmp_path, "a")
