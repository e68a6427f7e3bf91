"""pyproject.toml tells the truth: what code imports is declared, what is declared is imported, and torch's range fits
the compiler that each torch brings."""

import ast
import re
import runpy
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, files, packages_distributions, version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

STUBS = ("proto/octavo/kserve", "proto/octavo/vllm")  # that only the server has
SERVER = ("blockmgr", "cli", "gateway", "grammar", "model", *STUBS, "wire", "worker")
CLIENT = ("proto/octavo",)  # octavo-client
PRODUCT = (*SERVER, *CLIENT)
WORKSHOP = ("sim", "bench", "examples", "tests", "deploy")
OURS = {*PRODUCT, *WORKSHOP, "octavo", "octavo_dynamo"}

# What is needed without being imported: command-line tools, plugins of pytest, of mypy and of protoc, types.
TOOLS = {
    "mypy", "ruff", "pytest-asyncio", "pytest-cov", "pytest-timeout", "pytest-rerunfailures", "pytest-xdist",
    "check-jsonschema", "grpcio-tools",
}  # fmt: skip
OTHER_ENVIRONMENTS = ("tests/interop/drivers", "tests/faults/injected", "bench/cpu/peers/scripts")
"""Not run by our own Python's packages."""

TRITON_OF_TORCH = {"2.11": "3.6.0", "2.12": "3.7.1", "2.13": "3.7.1", "2.14": "3.8.0", "2.15": "3.9.0"}
"""What each torch for CUDA asks for, exactly (its METADATA, `Requires-Dist: triton==`)."""


@pytest.fixture(scope="module")
def project(repository: Path) -> dict[str, Any]:
    return tomllib.loads((repository / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def client(repository: Path) -> dict[str, Any]:
    """The project of octavo-client."""
    return tomllib.loads((repository / "proto/pyproject.toml").read_text())["project"]


def names(requirements: Iterable[str]) -> set[str]:
    return {canonicalize_name(Requirement(each).name) for each in requirements}


def specifier(requirements: Iterable[str], name: str) -> SpecifierSet:
    found = [Requirement(each).specifier for each in requirements if canonicalize_name(Requirement(each).name) == name]
    assert len(found) == 1, f"{name} is declared {len(found)} times"
    return found[0]


def extras(project: dict[str, Any], *, without: str) -> set[str]:
    return names(each for name, extra in project["optional-dependencies"].items() if name != without for each in extra)


@cache
def imported_modules(path: Path) -> tuple[str, ...]:
    """Full names of what a file imports, also inside functions."""
    return tuple(_imported_modules(path))


def _imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def packages_by_module() -> Mapping[str, list[str]]:
    """Asks every installed package, which takes long."""
    return packages_distributions()


@cache
def installed_files(distribution: str) -> set[str]:
    return {str(path) for path in files(distribution) or ()}


@cache
def distribution_of(module: str) -> str | None:
    """The package that a module comes from; None for the standard library and our own. What is not installed is taken
    to be called as it is imported."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top in OURS:
        return None
    found = sorted(set(packages_by_module().get(top, ())))
    if len(found) > 1:  # a namespace that several packages fill, as `google` is
        found = [name for name in found if any(has_module(name, part) for part in (module, module.rpartition(".")[0]))]
    return canonicalize_name(found[0] if found else top)


def has_module(distribution: str, module: str) -> bool:
    place = module.replace(".", "/")
    try:
        installed = installed_files(distribution)
    except PackageNotFoundError:
        return False
    return any(name.startswith((f"{place}/", f"{place}.")) for name in installed)


def imports_of(repository: Path, folders: Iterable[str]) -> dict[str, list[str]]:
    """Package -> the files that import it."""
    found: dict[str, list[str]] = defaultdict(list)
    for folder in folders:
        for path in sorted((repository / folder).rglob("*.py")):
            place = str(path.relative_to(repository))
            if not place.startswith(OTHER_ENVIRONMENTS):
                for package in {distribution_of(module) for module in imported_modules(path)} - {None}:
                    found[str(package)].append(place)
    return dict(found)


def test_every_package_that_the_server_imports_is_declared(repository: Path, project: dict[str, Any]) -> None:
    """Also what the client brings: the server's own range of it is narrower."""
    declared = names(project["dependencies"]) | extras(project, without="dev")
    imported = imports_of(repository, SERVER)
    assert {package: places for package, places in imported.items() if package not in declared} == {}


def test_every_declared_package_is_imported_by_the_server(repository: Path, project: dict[str, Any]) -> None:
    imported = imports_of(repository, SERVER).keys()
    assert names(project["dependencies"]) - imported == {"octavo-client"}  # ours


def test_the_client_declares_what_it_imports_and_nothing_else(repository: Path, client: dict[str, Any]) -> None:
    assert names(client["dependencies"]) == imports_of(repository, CLIENT).keys()


def test_the_servers_ranges_lie_within_the_clients(project: dict[str, Any], client: dict[str, Any]) -> None:
    """Else no environment could have both."""
    for each in client["dependencies"]:
        name = canonicalize_name(Requirement(each).name)
        assert version(name) in specifier(project["dependencies"], name)
        assert version(name) in specifier(client["dependencies"], name)


def test_every_package_that_tests_and_benches_import_is_declared(repository: Path, project: dict[str, Any]) -> None:
    declared = names(project["dependencies"]) | extras(project, without="")
    imported = imports_of(repository, WORKSHOP)
    assert {package: places for package, places in imported.items() if package not in declared} == {}


def test_every_package_for_development_is_used(repository: Path, project: dict[str, Any]) -> None:
    wanted = {name for name in names(project["optional-dependencies"]["dev"]) if not name.startswith("types-")}
    imported = imports_of(repository, (*PRODUCT, *WORKSHOP)).keys()
    assert wanted - imported - TOOLS == set()


def test_what_only_an_extra_brings_is_not_needed_to_start(repository: Path, project: dict[str, Any]) -> None:
    """Optional packages are imported where they are used: every process comes up without them."""
    optional = extras(project, without="dev") - names(project["dependencies"])
    modules = {module for module, owners in packages_by_module().items() if names(owners) & optional}
    assert {"triton", "smg_grpc_proto"} <= modules
    hidden = "".join(f"sys.modules[{module!r}] = None; " for module in sorted(modules))
    modules = "octavo.cli.app, octavo.gateway.main, octavo.worker.main, octavo.worker.loading.loader"
    code = f"import sys; {hidden}import {modules}, octavo.model.verify.verify"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, timeout=300, check=False,
        env={"PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_every_range_has_an_upper_end(project: dict[str, Any], client: dict[str, Any]) -> None:
    wanted = [Requirement(each) for each in project["dependencies"] + client["dependencies"]]
    open_ended = [
        str(each) for each in wanted if not any(part.operator in ("<", "==", "~=") for part in each.specifier)
    ]
    assert open_ended == []


@pytest.mark.parametrize("minor", TRITON_OF_TORCH)
def test_tests_can_be_installed_beside_each_torch_for_cuda(minor: str, project: dict[str, Any]) -> None:
    assert f"{minor}.0" in specifier(project["dependencies"], "torch")
    for extra in ("dev", "cuda"):
        assert TRITON_OF_TORCH[minor] in specifier(project["optional-dependencies"][extra], "triton")


def test_kernels_are_tested_with_the_triton_of_the_images(repository: Path) -> None:
    torch = runpy.run_path(str(repository / "deploy/install_torch.py"))["TORCH"]
    wanted = TRITON_OF_TORCH[torch.rpartition(".")[0]]
    assert f"\nTRITON := {wanted}\n" in (repository / "Makefile").read_text()
    assert f"\ntriton=={wanted} " in (repository / "deploy/locks/worker-cuda.txt").read_text()
    known = re.search(r"KNOWN_VERSIONS = (\(.*\))", (repository / "model/kernels/gluon.py").read_text())
    assert known is not None
    assert wanted.startswith(ast.literal_eval(known[1]))


def test_the_table_above_covers_torchs_range(project: dict[str, Any]) -> None:
    allowed = specifier(project["dependencies"], "torch")
    assert [f"2.{minor}" for minor in range(40) if f"2.{minor}.0" in allowed] == list(TRITON_OF_TORCH)


def test_every_extra_that_a_page_names_is_there_and_installed_from_here(
    repository: Path, project: dict[str, Any]
) -> None:
    """Octavo is on no package index: what is installed is the checkout."""
    pages = [repository / "README.md", *(repository / "docs").rglob("*.md"), repository / "Makefile"]
    named = [
        (page.name, what)
        for page in pages
        for what in re.findall(r"install [^\n]*?([\w.\"']*\[[\w,-]+\])", page.read_text())
    ]
    assert named
    for page, what in named:
        base, _, listed = what.strip("\"'").rstrip("]").partition("[")
        assert base == ".", f"{page}: {what} is on no index"
        assert set(listed.split(",")) <= project["optional-dependencies"].keys(), f"{page}: {what}"
