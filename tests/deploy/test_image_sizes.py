"""What is said of the images' sizes is added up from wheels, and the page has a row for each lock."""

import re
import subprocess
import sys
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement


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


def num_wheels(lock: Path) -> int:
    """Of a lock, on the images' Linux."""
    image = default_environment() | {
        "implementation_name": "cpython", "platform_machine": "x86_64", "platform_system": "Linux",
        "python_full_version": "3.12.0", "python_version": "3.12", "sys_platform": "linux",
    }  # fmt: skip
    needed = [Requirement(line) for line in re.findall(r"^(\w[^\n]*==[^\\\n]*)", lock.read_text(), re.MULTILINE)]
    return sum(each.marker is None or each.marker.evaluate(image) for each in needed)


def test_the_page_has_a_row_for_each_lock_of_ours_with_as_many_wheels(repository: Path) -> None:
    """Another number: `python deploy/image_sizes.py` prints the rows anew."""
    page = (repository / "docs" / "supply-chain.md").read_text()
    locks = [lock for lock in (repository / "deploy" / "locks").glob("*.txt") if lock.stem != "smg"]
    assert len(locks) == 3
    missing = [row for lock in locks if (row := f"| `{lock.stem}` | {num_wheels(lock)} | ") not in page]
    assert missing == []
