"""The two distributions, `octavo` and `octavo-client`: what is in them, that an sdist makes the same wheel, and that an
installation works beside folders that are called as ours."""

import email
import importlib.metadata
import json
import os
import re
import shutil
import site
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.slow

FOLDERS = ("wire", "blockmgr", "grammar", "model", "worker", "gateway", "cli")
WORKSHOP = ("bench", "sim", "tests", "examples", "deploy", "docs")
BUILT = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "proto", *FOLDERS, *WORKSHOP)
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "dist")
TIMEOUT_S = 240.0
BUILD = ["setuptools"]

# What a folder has that is called as ours; an import of one of these instead of ours ends with an error.
NAMESAKES = ("cli.py", "model/__init__.py", "worker/__init__.py", "gateway/__init__.py", "wire.py", "proto/__init__.py")


@dataclass(frozen=True)
class Wheels:
    server: Path
    client: Path


def run(command: list[str | Path], cwd: Path, **variables: str) -> str:
    """What it writes. Nothing is downloaded, and nothing of this checkout is found by PYTHONPATH."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OCTAVO_", "PYTHON"))}
    done = subprocess.run(
        command, cwd=cwd, env=kept | {"PIP_NO_INDEX": "1", "OMP_NUM_THREADS": "1"} | variables,
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def build(what: str, project: Path, into: Path) -> Path:
    """The file that `python -m build --no-isolation` makes of a project: `wheel` or `sdist`."""
    code = f"import sys, setuptools.build_meta as backend; print('made ' + backend.build_{what}(sys.argv[1]))"
    into.mkdir(exist_ok=True)
    return into / run([sys.executable, "-c", code, into], project).rpartition("made ")[2].strip()


@pytest.fixture(scope="module")
def tree(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, for building leaves folders behind."""
    copy = tmp_path_factory.mktemp("packages") / "tree"
    copy.mkdir()
    for name in BUILT:
        if (repository / name).is_dir():
            shutil.copytree(repository / name, copy / name, ignore=LEFT_OUT)
        else:
            shutil.copy(repository / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheels(tree: Path) -> Wheels:
    into = tree.parent / "wheels"
    return Wheels(server=build("wheel", tree, into), client=build("wheel", tree / "proto", into))


@pytest.fixture(scope="module")
def sdists(tree: Path) -> Wheels:
    into = tree.parent / "sdists"
    return Wheels(server=build("sdist", tree, into), client=build("sdist", tree / "proto", into))


def contents(wheel: Path) -> set[str]:
    """Names of its files, without what describes the distribution."""
    with zipfile.ZipFile(wheel) as opened:
        return {name for name in opened.namelist() if not name.split("/")[0].endswith(".dist-info")}


def sources(root: Path, prefix: str) -> set[str]:
    """Files under a folder as a wheel is to call them."""
    return {f"{prefix}/{each.relative_to(root).as_posix()}" for each in root.rglob("*") if each.is_file()}


def of_the_server_alone(tree: Path) -> set[str]:
    """Stubs of contracts that Octavo's own client does not speak."""
    names = ("kserve", "vllm")
    return set().union(*(sources(tree / "proto/octavo" / name, f"octavo/{name}") for name in names))


def test_the_servers_wheel_has_its_folders_whole_and_nothing_else(tree: Path, wheels: Wheels) -> None:
    """A folder that lost its `__init__.py`, or data that no line of pyproject.toml names, would be missing here."""
    wanted = set().union(*(sources(tree / folder, f"octavo/{folder}") for folder in FOLDERS))
    assert contents(wheels.server) == wanted | of_the_server_alone(tree)


def test_the_clients_wheel_has_the_package_itself_the_client_and_typed_stubs(tree: Path, wheels: Wheels) -> None:
    wanted = sources(tree / "proto/octavo", "octavo") - of_the_server_alone(tree)
    assert contents(wheels.client) == wanted
    assert {"octavo/__init__.py", "octavo/py.typed", "octavo/v1/inference_pb2.pyi"} <= wanted
    assert not contents(wheels.client) & contents(wheels.server)  # what is in both, uninstalling one would take away


def test_each_wheel_is_only_octavo_and_its_license(wheels: Wheels) -> None:
    for wheel in (wheels.server, wheels.client):
        with zipfile.ZipFile(wheel) as opened:
            tops = {name.split("/")[0] for name in opened.namelist()}
            assert [name for name in opened.namelist() if name.endswith("/licenses/LICENSE")]
        assert len(tops) == 2
        assert "octavo" in tops


def test_an_sdist_has_no_workshop_and_makes_the_same_wheel(tree: Path, wheels: Wheels, sdists: Wheels) -> None:
    for wheel, sdist in ((wheels.server, sdists.server), (wheels.client, sdists.client)):
        unpacked = tree.parent / f"unpacked-{sdist.name}"
        with tarfile.open(sdist) as opened:
            opened.extractall(unpacked, filter="data")
        (project,) = unpacked.iterdir()
        assert not {each.name for each in project.iterdir()} & set(WORKSHOP)
        assert contents(build("wheel", project, unpacked)) == contents(wheel)


def test_the_two_versions_are_one_and_the_server_asks_for_it(repository: Path) -> None:
    """They are changed together, since they share a package and the stubs: a client of another version in the server's
    environment would be refused by the installer."""
    server, client = (
        tomllib.loads((repository / each / "pyproject.toml").read_text())["project"] for each in (".", "proto")
    )
    assert server["version"] == client["version"]
    assert server["requires-python"] == client["requires-python"]
    assert f"octavo-client=={client['version']}" in server["dependencies"]
    assert (repository / "proto/LICENSE").read_text() == (repository / "LICENSE").read_text()


def test_the_clients_ranges_begin_where_its_stubs_do(repository: Path) -> None:
    """Stubs refuse to run with libraries that are older than their generator."""
    wanted = tomllib.loads((repository / "proto/pyproject.toml").read_text())["project"]["dependencies"]
    lowest = {
        Requirement(each).name: next(str(part.version) for part in Requirement(each).specifier if part.operator == ">=")
        for each in wanted
    }
    stubs = [path.read_text() for path in (repository / "proto/octavo").glob("*/*_pb2*.py")]
    grpcio = {match for text in stubs for match in re.findall(r"GRPC_GENERATED_VERSION = '(.*)'", text)}
    protobuf = {match for text in stubs for match in re.findall(r"Protobuf Python Version: (.*)", text)}
    assert grpcio == {lowest["grpcio"]}
    assert {version.removesuffix(".0") for version in protobuf} == {lowest["protobuf"]}


def environment(folder: Path) -> Path:
    """The interpreter of a new environment that has nothing."""
    run([sys.executable, "-m", "venv", "--without-pip", folder], folder.parent)
    return folder / "bin/python"


def install(python: Path, *what: str | Path) -> None:
    """By this environment's pip, into another one."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), "install", "--quiet"]
    run([*pip, "--no-deps", "--no-build-isolation", *map(str, what)], python.parent)


def site_packages(python: Path) -> Path:
    (found,) = (python.parent.parent / "lib").glob("python3*/site-packages")
    return found


def share_what_others_made(python: Path) -> None:
    """Everything of others is that of this environment."""
    theirs = {path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")}
    (site_packages(python) / "others.pth").write_text("\n".join(sorted(theirs | set(site.getsitepackages()))) + "\n")


@pytest.fixture(scope="module")
def server_python(tree: Path, wheels: Wheels) -> Path:
    """Where both wheels are installed."""
    python = environment(tree.parent / "server")
    install(python, wheels.client, wheels.server)
    share_what_others_made(python)
    return python


@pytest.fixture
def namesakes(tmp_path: Path) -> Path:
    for name in NAMESAKES:
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"raise SystemExit('{name} of the user was imported')\n")
    return tmp_path


def test_it_is_the_installed_package_that_runs(server_python: Path, namesakes: Path) -> None:
    code = "import octavo, octavo.gateway, octavo.kserve, octavo.worker; print(octavo.__file__, octavo.worker.__file__)"
    for each in run([server_python, "-c", code], namesakes).split():
        assert Path(each).is_relative_to(site_packages(server_python))


def test_the_installed_command_gives_the_tour_beside_folders_called_as_ours(
    server_python: Path, namesakes: Path
) -> None:
    command = server_python.parent / "octavo"
    assert "serve" in run([command, "--help"], namesakes)
    told = run([command, "tour"], namesakes, HOME=str(namesakes), XDG_CACHE_HOME=str(namesakes / "cache"))
    assert "paged" in told or "tokens" in told
    assert "of the user was imported" not in told


def test_a_checkout_that_is_installed_to_be_edited_is_one_package_too(tree: Path, namesakes: Path) -> None:
    """As `make install` does it: the package comes from one distribution, its folders from another."""
    python = environment(tree.parent / "editable")
    share(python, closure(BUILD))
    install(python, "-e", tree / "proto", "-e", tree)
    share_what_others_made(python)
    names = ("client", "v1", "kserve", "openengine", "vllm", "wire", "gateway.rpc")
    modules = ("octavo", *(f"octavo.{name}" for name in names))
    code = f"import {', '.join(modules)}; print({', '.join(f'{each}.__file__' for each in modules)}, sep='\\n')"
    found = [Path(line).parent for line in run([python, "-c", code], namesakes).splitlines()]
    places = ("proto/octavo", *(f"proto/octavo/{name}" for name in names[:5]), "wire", "gateway/rpc")
    assert found == [tree / each for each in places]
    assert run([python.parent / "octavo", "--version"], namesakes).startswith("octavo ")


def share(python: Path, names: set[str]) -> None:
    """Links to the files of these distributions."""
    for name in names:
        for file in importlib.metadata.files(name) or ():
            if ".." not in file.parts and file.suffix != ".pyc":
                link = site_packages(python) / file
                link.parent.mkdir(parents=True, exist_ok=True)
                if not link.exists():
                    link.symlink_to(Path(str(file.locate())))


def closure(requirements: list[str]) -> set[str]:
    """Names of the distributions that these requirements bring, without extras."""
    found: set[str] = set()
    todo = [Requirement(each) for each in requirements]
    while todo:
        each = todo.pop()
        name = canonicalize_name(each.name)
        if name not in found and (each.marker is None or each.marker.evaluate({"extra": ""})):
            found.add(name)
            todo += [Requirement(more) for more in importlib.metadata.requires(name) or ()]
    return found


@pytest.fixture(scope="module")
def client_python(tree: Path, wheels: Wheels) -> Path:
    """Where the client is installed, and links to what it asks for: nothing else can be imported there."""
    python = environment(tree.parent / "client")
    install(python, wheels.client)
    with zipfile.ZipFile(wheels.client) as opened:
        (metadata,) = (name for name in opened.namelist() if name.endswith(".dist-info/METADATA"))
        wanted = email.message_from_bytes(opened.read(metadata)).get_all("Requires-Dist") or []
    share(python, closure(wanted))
    return python


def test_who_only_calls_octavo_installs_five_packages(client_python: Path) -> None:
    """Itself, three that it asks for, and typing_extensions for grpcio."""
    code = "import importlib.metadata, json; print(json.dumps([d.name for d in importlib.metadata.distributions()]))"
    found = {canonicalize_name(each) for each in json.loads(run([client_python, "-I", "-c", code], Path("/")))}
    wanted = {"octavo-client", "grpcio", "protobuf", "googleapis-common-protos"}
    assert wanted <= found <= wanted | {"typing-extensions"}


SERVER = """
import sys
from tests.support.gateway.scripted_server import Script, running
with running(Script()) as address:
    print(address, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def target(repository: Path) -> Iterator[str]:
    """The address of a scripted server, in a process of its own: tests after this one fork, which gRPC remarks upon."""
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, cwd=repository, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.communicate(timeout=30)


CALLER = """
import asyncio, sys
from octavo import AsyncClient, Client, OctavoError, generate_request, tool_result
from octavo.v1 import admin_pb2_grpc
async def main():
    async with AsyncClient(sys.argv[1]) as client:
        return "".join([text async for text in client.stream(text="hi")])
with Client(sys.argv[1]) as client:
    assert "".join(client.stream(text="hi")) == asyncio.run(main()) == "Hello, w\\u00f6rld"
print(*sorted({name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names))
"""


def test_the_client_works_with_nothing_but_what_it_asks_for(client_python: Path, target: str, tmp_path: Path) -> None:
    (tmp_path / "caller.py").write_text(CALLER)
    imported = run([client_python, "-I", "-W", "error", "caller.py", target], tmp_path).split()
    theirs = {"grpc", "google", "octavo", "cython_runtime", "typing_extensions"}
    assert {name for name in imported if not name.startswith(("_", "sitecustomize"))} <= theirs


def test_the_client_is_typed_for_its_callers(client_python: Path, tmp_path: Path) -> None:
    (tmp_path / "caller.py").write_text(
        "from octavo import Client\n"
        "from octavo.v1 import inference_pb2\n"
        "client = Client('127.0.0.1:1')\n"
        "reveal_type(client.complete(text='hi'))\n"
        "reveal_type(inference_pb2.GenerateRequest().num_outputs)\n"
        "client.complete(txt='hi')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--python-executable", str(client_python), "--config-file=", "caller.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    revealed = re.findall(r'Revealed type is "(.*)"', done.stdout)
    assert len(revealed) == 2, done.stdout
    assert revealed[0].startswith("octavo.v1.inference_pb2."), done.stdout
    assert revealed[1].endswith("int"), done.stdout
    assert 'Unexpected keyword argument "txt"' in done.stdout
