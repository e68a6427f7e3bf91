"""`make test-wheels`: which interpreters it takes, and what it says of those that it does not find.

It runs for minutes; its logic is looked at here, with interpreters that are scripts.
"""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def script(repository: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("try_wheels", repository / "deploy" / "try_wheels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No interpreter but what a test puts there: `bin` is on PATH, `pyenv` is pyenv's."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    return tmp_path


def put(file: Path, *lines: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(("#!/bin/sh", *lines, "")))
    file.chmod(0o755)
    return file


def test_the_versions_are_those_that_the_project_names(script: ModuleType) -> None:
    assert script.MINORS == ("3.11", "3.12", "3.13")
    assert script.PROJECT["requires-python"] == ">=3.11"
    assert script.TOO_OLD == "3.10"


def test_an_interpreter_is_taken_that_is_what_it_is_called(machine: Path, script: ModuleType) -> None:
    shim = put(machine / "bin" / "python3.12", "echo 'pyenv: python3.12: command not found' >&2; exit 127")
    assert script.interpreter("3.12") is None
    put(shim, "echo 3.11")
    assert script.interpreter("3.12") is None
    put(shim, "echo 3.12")
    assert script.interpreter("3.12") == shim


def test_pyenvs_latest_comes_first_and_one_without_venv_is_none(machine: Path, script: ModuleType) -> None:
    old = put(machine / "pyenv" / "versions" / "3.13.0" / "bin" / "python", "echo 3.13")
    new = put(machine / "pyenv" / "versions" / "3.13.1" / "bin" / "python", "echo 3.13")
    assert script.interpreter("3.13") == new
    put(new, "echo \"No module named 'ensurepip'\" >&2; exit 1")  # as Debian's without python3-venv
    assert script.interpreter("3.13") == old


def test_what_is_not_found_is_named_and_no_failure(
    machine: Path, script: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = machine / "octavo-0.1.0-py3-none-any.whl"
    wheel.write_bytes(b"")
    monkeypatch.setattr(script, "build", lambda into: wheel)
    assert script.main([]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "not found here: Python 3.11, Python 3.12, Python 3.13, Python 3.10, to be refused, pipx"
    )


def test_one_that_fails_fails_all_with_its_output(
    machine: Path, script: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = machine / "octavo-0.1.0-py3-none-any.whl"
    wheel.write_bytes(b"")
    monkeypatch.setattr(script, "build", lambda into: wheel)
    put(
        machine / "bin" / "python3.12",
        'case "$*" in *venv*version_info*) echo 3.12;; *) echo no space left; exit 3;; esac',
    )
    assert script.main(["3.12"]) == 1
    told = capsys.readouterr().out
    assert "Python 3.12: FAILED" in told
    assert "no space left" in told


def test_a_version_that_octavo_is_not_for_is_one_sentence(
    script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["3.9"]) == 2
    assert capsys.readouterr().err == "error: Python 3.9 is none of 3.11, 3.12, 3.13\n"


def test_a_tour_without_an_answer_is_a_failure(script: ModuleType) -> None:
    with pytest.raises(ValueError, match="without an answer"):
        script.check_tour("the service did not start")
    script.check_tour("I am Folio, a small demo model")


def test_an_older_python_has_to_be_refused_for_its_version(machine: Path, script: ModuleType, tmp_path: Path) -> None:
    python = put(machine / "old", f'exec {sys.executable} -c "pass"')
    pip = put(
        tmp_path / "venv" / "bin" / "pip", "echo \"ERROR: Package 'octavo' requires a different Python\" >&2; exit 1"
    )
    script.check_refusal(python, tmp_path / "octavo.whl", tmp_path)
    put(pip, "exit 0")
    with pytest.raises(ValueError, match=r"Python 3\.10 was not refused"):
        script.check_refusal(python, tmp_path / "octavo.whl", tmp_path)
    assert os.access(pip, os.X_OK)
