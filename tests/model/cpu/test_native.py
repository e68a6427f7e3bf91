"""Where the compiled kernels come from, and that nothing needs them."""

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.cli.settings.groups import ServeSettings
from octavo.cli.tools.doctor_model import _check_kernels
from octavo.model.cpu import native


def forget_the_library() -> None:
    native._outcome.cache_clear()
    native.native_library.cache_clear()


@pytest.fixture(autouse=True)
def forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, and no library loaded before or after. What is compiled need not be fast."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "_FLAGS", (*native._FLAGS, "-O0"))
    forget_the_library()
    yield tmp_path / "octavo" / "native"
    forget_the_library()


def test_without_a_compiler_there_is_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert native.native_library() is None


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, forgotten: Path) -> None:
    monkeypatch.setenv("OCTAVO_NATIVE", "off")
    assert native.native_library() is None
    assert not forgotten.exists()


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder in which the first test that compiles leaves the library for others."""
    return tmp_path_factory.mktemp("compiled")


@pytest.mark.parametrize("word", ["on", "1", "True"])
def test_switched_on_it_is_there(word: str, compiled_once: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(compiled_once))
    monkeypatch.setenv("OCTAVO_NATIVE", word)
    forget_the_library()
    assert native.why_missing() is None
    assert native.native_library() is not None
    forget_the_library()


def test_an_unknown_word_of_the_switch_is_named(monkeypatch: pytest.MonkeyPatch, forgotten: Path) -> None:
    monkeypatch.setenv("OCTAVO_NATIVE", "perhaps")
    assert native.native_library() is None
    assert native.why_missing() == "OCTAVO_NATIVE is 'perhaps', neither on nor off"


def test_what_the_switch_says_is_told_from_what_else_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the reason names: it may have any path in it."""
    folder = tmp_path / "OCTAVO_NATIVE"
    folder.mkdir()
    compiler = folder / "cc"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CC", str(compiler))
    told = []
    for word in ("", "off", "perhaps"):
        monkeypatch.setenv("OCTAVO_NATIVE", word)
        forget_the_library()
        assert native.native_library() is None
        findings = _check_kernels(ServeSettings(device="cpu"))
        told.append((native.is_switched_off(), findings[-1].advice == "unset OCTAVO_NATIVE"))
    assert told == [(False, False), (True, True), (True, True)]


def test_a_compiler_that_fails_means_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && echo one\n')
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CC", str(compiler))
    assert native.native_library() is None
    assert native.why_missing() == f"{compiler} could not compile them"


def test_what_a_compiler_complains_of_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a disk that is full, or where the headers of the C library are not installed."""
    compiler = tmp_path / "cc"
    said = "a.c: In function 'f':\na.c:12:10: fatal error: stdlib.h: No such file or directory\ncompilation ended\n"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit\ncat >&2 << "EOF"\n{said}EOF\nexit 1\n')
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CC", str(compiler))
    why = "could not compile them: a.c:12:10: fatal error: stdlib.h: No such file or directory"
    assert native.why_missing() == f"{compiler} {why}"


def test_a_folder_that_others_may_write_to_is_not_trusted(forgotten: Path) -> None:
    forgotten.mkdir(parents=True)
    forgotten.chmod(0o777)
    assert native.native_library() is None


@pytest.mark.skipif(native.shutil.which("cc") is None, reason="no C compiler here")
def test_it_is_compiled_once_and_not_missing_then(forgotten: Path) -> None:
    assert native.native_library() is not None
    assert native.why_missing() is None
    (file,) = forgotten.iterdir()
    before = file.stat().st_mtime_ns
    forget_the_library()
    assert native.native_library() is not None
    assert [(each.name, each.stat().st_mtime_ns) for each in forgotten.iterdir()] == [(file.name, before)]


@pytest.mark.skipif(native.shutil.which("cc") is None, reason="no C compiler here")
def test_a_file_that_is_not_whole_is_compiled_again(forgotten: Path) -> None:
    compiler = native._compiler()
    assert compiler is not None
    forgotten.mkdir(parents=True, mode=0o700)
    torn = forgotten / f"kernels-{native._fingerprint(compiler)}.so"
    torn.write_bytes(b"\x7fELF" + bytes(60))
    assert native.native_library() is not None
    assert torn.stat().st_size > 64


def test_switched_off_they_are_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_NATIVE", "off")
    assert native.why_missing() is None


def test_why_they_are_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: Path) -> None:
    with monkeypatch.context() as without_compiler:
        without_compiler.setattr("shutil.which", lambda name: None)
        assert native.why_missing() == "there is no C compiler (cc)"
    forget_the_library()
    forgotten.mkdir(parents=True)
    forgotten.chmod(0o777)
    monkeypatch.setenv("CC", "true")
    assert native.why_missing() == f"{forgotten} belongs to others, or others may write there"
    forget_the_library()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    said = f"{tmp_path}/file/octavo/native cannot be written (Not a directory): name another folder with XDG_CACHE_HOME"
    assert native.why_missing() == said
