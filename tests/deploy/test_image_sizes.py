"""What is said of the images' sizes is added up from wheels, and the page has a row for each lock."""

import subprocess
import sys
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import pytest


def run(repository: Path, *arguments: str, path: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(repository / "deploy" / "image_sizes.py"), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env={"PYTHONPATH": path, "PATH": ""}
    )


@pytest.fixture
def pip(tmp_path: Path) -> Path:
    """A pip that "downloads" two wheels, or fails where a file says so."""
    for name, size in (("large", 3_000_000), ("small", 1_000_000)):
        with ZipFile(tmp_path / f"{name}-1.0-py3-none-any.whl", "w", ZIP_DEFLATED) as archive:
            archive.writestr("data", b"\0" * size)
    folder = tmp_path / "fake" / "pip"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()  # else any other pip would come first
    (folder / "__main__.py").write_text(
        "import pathlib, shutil, sys\n"
        f"here = pathlib.Path({str(tmp_path)!r})\n"
        "if (here / 'broken').exists(): sys.exit('no such index')\n"
        "for wheel in here.glob('*.whl'): shutil.copy(wheel, sys.argv[sys.argv.index('-d') + 1])\n"
    )
    return tmp_path


def test_a_row_is_the_sum_of_its_wheels(repository: Path, pip: Path) -> None:
    done = run(repository, "gateway", path=str(pip / "fake"))
    assert done.stdout == "| `gateway` | 2 | 0 MB | 4 MB | large 3 MB, small 1 MB |\n", done.stderr


def test_what_cannot_be_fetched_is_one_sentence(repository: Path, pip: Path) -> None:
    (pip / "broken").touch()
    done = run(repository, path=str(pip / "fake"))
    assert done.returncode == 1
    assert "error: pip could not fetch the wheels of deploy/locks/gateway.txt; the lines above say why" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_role_without_an_image_is_one_sentence(repository: Path) -> None:
    done = run(repository, "smg", path="")
    assert (done.returncode, done.stderr) == (
        2,
        "error: 'smg' has no image; there are gateway, worker-cpu, worker-cuda\n",
    )


def test_the_page_has_a_row_for_each_lock_of_ours(repository: Path) -> None:
    page = (repository / "docs" / "supply-chain.md").read_text()
    roles = {lock.stem for lock in (repository / "deploy" / "locks").glob("*.txt")} - {"smg"}
    assert [role for role in sorted(roles) if f"| `{role}` | " not in page] == []
