"""deploy/locks: what the images install is pinned with hashes, is what pyproject.toml allows, and comes from PyPI."""

import re
import runpy
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROLES = ("gateway", "worker-cpu", "worker-cuda")
DOCKERFILES = {"gateway": "gateway", "worker-cpu": "worker", "worker-cuda": "worker", "smg": "smg"}
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def entries(repository: Path, role: str) -> Iterator[tuple[Requirement, list[str]]]:
    """Each pin with its hashes."""
    text = (repository / f"deploy/locks/{role}.txt").read_text()
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]
    for line in lines:
        requirement, *rest = line.split(" --hash=")
        yield Requirement(requirement.strip()), [f"--hash={each.strip()}" for each in rest]


def pins(repository: Path, role: str) -> dict[str, Version]:
    """Versions on Linux, by canonical name."""
    linux = default_environment() | {"sys_platform": "linux", "platform_machine": "x86_64", "extra": ""}
    return {
        canonicalize_name(each.name): Version(str(each.specifier).removeprefix("=="))
        for each, _ in entries(repository, role)
        if each.marker is None or each.marker.evaluate({name: str(value) for name, value in linux.items()})
    }


def wanted(repository: Path, role: str) -> list[Requirement]:
    script = runpy.run_path(str(repository / "deploy/requirements.py"))
    return [Requirement(each) for each in script["requirements"](role)]


@pytest.mark.parametrize("role", DOCKERFILES)
def test_every_entry_is_one_version_with_hashes(repository: Path, role: str) -> None:
    found = list(entries(repository, role))
    assert len(found) >= 5
    for requirement, hashes in found:
        assert re.fullmatch(r"==[\w.]+", str(requirement.specifier)), requirement
        assert requirement.url is None
        assert hashes, requirement
        assert all(HASH.fullmatch(each) for each in hashes), requirement


@pytest.mark.parametrize("role", ROLES)
def test_a_lock_has_what_pyproject_asks_for(repository: Path, role: str) -> None:
    locked = pins(repository, role)
    wrong = {
        str(each): locked.get(canonicalize_name(each.name))
        for each in wanted(repository, role)
        if locked.get(canonicalize_name(each.name)) not in each.specifier
    }
    assert wrong == {}


@pytest.mark.parametrize("role", DOCKERFILES)
def test_no_lock_names_an_index_or_a_build_of_this_machine(repository: Path, role: str) -> None:
    text = (repository / f"deploy/locks/{role}.txt").read_text()
    assert not re.search(r"://|--index|--find-links|file:|\+cpu", text)
    assert "make lock" in text


def test_only_the_image_for_gpus_has_torch_in_its_lock_and_the_gateway_has_none(repository: Path) -> None:
    torch = runpy.run_path(str(repository / "deploy/install_torch.py"))["TORCH"]
    assert str(pins(repository, "worker-cuda")["torch"]) == torch
    for role in ("gateway", "worker-cpu"):
        names = pins(repository, role).keys()
        assert not [name for name in names if name in ("torch", "triton") or name.startswith(("nvidia-", "cuda-"))]


def test_the_lock_for_cpus_has_what_torch_needs_beside_itself(repository: Path) -> None:
    """Whose build is installed after it: nothing that has no hash may come with it."""
    needed = [Requirement(each) for each in requires("torch") or ()]
    of_cuda = ("nvidia-", "cuda-", "triton")
    names = {
        canonicalize_name(each.name)
        for each in needed
        if (each.marker is None or each.marker.evaluate({"extra": ""})) and not each.name.startswith(of_cuda)
    }
    assert names - pins(repository, "worker-cpu").keys() == set()


@pytest.mark.parametrize("role", DOCKERFILES)
def test_an_image_installs_from_its_lock_and_nothing_else(repository: Path, role: str) -> None:
    text = (repository / f"deploy/{DOCKERFILES[role]}.Dockerfile").read_text().replace("\\\n", " ")
    installs = re.findall(r"pip install[^\n&]*", "\n".join(line for line in text.splitlines() if line[:1] != "#"))
    from_lock = [each for each in installs if "--require-hashes" in each]
    assert len(from_lock) == 1
    assert "--no-deps" in from_lock[0]
    assert "--only-binary :all:" in from_lock[0]
    others = [each for each in installs if each not in from_lock]
    assert all(each.endswith("--no-deps --no-build-isolation ./proto .") for each in others)  # Octavo itself


@pytest.mark.parametrize("role", DOCKERFILES)
def test_a_lock_is_made_for_the_python_of_its_image(repository: Path, role: str) -> None:
    text = (repository / f"deploy/{DOCKERFILES[role]}.Dockerfile").read_text()
    versions = set(re.findall(r"^FROM python:(3\.\d+)", text, re.MULTILINE))
    assert versions == set(re.findall(r"--python-version (3\.\d+)", (repository / "Makefile").read_text()))
