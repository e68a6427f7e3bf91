"""The arrows between folders, as docs/architecture.md has them: what each may import, in the code and at run time."""

import ast
import re
import subprocess
import sys
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

# folder -> (folders that it may import, third-party packages that it may never import)
ARROWS: dict[str, tuple[set[str], set[str]]] = {
    "proto/octavo": ({"client"}, {"torch", "zmq", "transformers"}),
    "integrations/dynamo": ({"client"}, {"torch", "zmq", "transformers", "msgspec"}),
    "wire": ({"wire"}, {"torch", "grpc", "transformers"}),
    "blockmgr": ({"blockmgr"}, {"torch", "zmq", "grpc", "transformers", "msgspec"}),
    "grammar": ({"grammar", "wire"}, {"torch", "zmq", "grpc", "transformers"}),
    "model": ({"model", "wire"}, {"zmq", "grpc", "msgspec"}),  # of wire only checkpoint_files: the test below
    "worker": ({"worker", "blockmgr", "wire", "grammar", "model"}, {"grpc"}),  # model: MODEL_FOLDERS alone
    "gateway": ({"gateway", "wire", "client", "grammar"}, {"torch"}),
    "cli": ({"cli", "wire", "grammar", "model", "worker", "gateway", "client"}, set()),
    "sim": ({"sim", "wire", "blockmgr", "worker", "gateway", "client"}, {"torch", "transformers"}),
}
FOLDERS = {"wire", "blockmgr", "grammar", "model", "worker", "gateway", "cli", "sim"}
MODEL_FOLDERS = ("worker/loading/", "worker/runners/", "worker/main.py")  # what of the worker knows tensors
MODEL_FREE = ("worker/runners/interface.py", "worker/runners/oracle/")

# Between the folders inside of a folder: which of its neighbours each may import. What stands in the folder itself
# (config, errors, …) is "": everybody may import it, but it imports only what its own row has.
INNER: dict[str, dict[str, set[str]]] = {
    "worker": {
        "": {"engine", "grammar", "loading", "runners", "scheduler", "transport"},  # main puts the parts together
        "scheduler": set(),
        "engine": {"scheduler", "grammar", "runners"},
        "transport": {"engine", "scheduler"},
        "grammar": {"loading", "runners", "scheduler"},
        "runners": {"scheduler"},
        "runners/oracle": {"loading", "runners", "scheduler"},
        "runners/torch": {"runners", "scheduler"},
        "runners/cuda": {"loading", "runners", "scheduler"},
        "loading": {"runners", "runners/oracle", "runners/torch", "runners/cuda", "scheduler"},
    },
    "gateway": {
        "": {
            "auth",
            "dialects",
            "requests",
            "rpc",
            "page",
        }
        | {"observability", "servicers", "streams", "peers", "text", "watching", "workers"},  # app puts parts together
        "workers": set(),
        "text": set(),
        "peers": {"auth", "observability", "requests", "workers"},
        "validation": {"text"},
        "auth": set(),
        "rpc": {"auth", "observability", "validation"},
        "streams": {"text"},
        "requests": {"auth", "observability", "rpc", "streams", "text", "validation", "workers"},
        "servicers": {"peers", "requests", "rpc", "streams", "text", "validation", "watching", "workers"},
        "page": {"rpc"},
        "watching": {"observability", "peers", "requests", "workers"},
        "dialects": {"dialects/kserve", "dialects/openengine", "dialects/vllm", "dialects/vllm_native", "validation"}
        | {"peers", "requests"},
        "dialects/kserve": {"dialects", "requests", "rpc", "streams", "validation"},
        "dialects/openengine": {
            "auth",
            "dialects",
            "peers",
            "requests",
            "rpc",
            "streams",
            "text",
            "validation",
            "workers",
        },
        "dialects/vllm_native": {"dialects", "peers", "requests", "rpc", "streams", "text", "validation", "workers"},
        "dialects/vllm": {"dialects", "peers", "requests", "rpc", "streams", "validation", "workers"},
        "observability": {"rpc", "workers"},
        "front": {"auth"},  # a process of its own, a client of the service: of auth its certificate alone
    },
    "model": {
        "": {"attention", "checkpoint", "cpu", "families", "layers", "quantization"},
        "attention": {"cpu", "families", "layers", "quantization"},
        "checkpoint": {"families", "layers", "quantization"},
        "cpu": set(),
        "families": set(),
        "gpu": {"attention", "families", "kernels", "kernels/attention", "kernels/products", "kernels/sampling"}
        | {"kernels/small_batch", "layers", "quantization", "sampling"},
        "kernels": set(),
        "kernels/attention": {"kernels"},
        "kernels/products": {"kernels", "quantization"},
        "kernels/sampling": {"kernels", "sampling"},
        "kernels/small_batch": {"kernels", "kernels/attention"},
        "layers": {"attention", "cpu", "quantization"},
        "quantization": {"families", "layers"},
        "sampling": {"cpu"},
        "verify": {"attention", "checkpoint", "families", "layers", "quantization"},
    },
    "sim": {
        "": {"callers", "edges", "faults", "processes"},
        "edges": set(),
        "processes": {"edges"},
        "callers": {"edges", "processes"},
        "faults": {"edges", "processes"},
    },
    "cli": {
        "": {"bench", "client", "serve", "settings", "tools"},
        "settings": set(),
        "bench": {"client", "settings"},
        "client": {"settings"},
        "serve": {"settings"},
        "tools": {"client", "serve", "settings"},
    },
}


@cache
def tree_of(path: Path) -> ast.Module:
    """Parsed once for all tests of this file."""
    return ast.parse(path.read_text())


@cache
def modules_of(path: Path) -> set[str]:
    """Dotted names of every module that a file imports, also inside functions; a module of ours without `octavo.`."""
    names: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("octavo.") if folder_of(name) in FOLDERS else name for name in names}


def folder_of(name: str) -> str:
    """Of ours: the folder that a module is in, "client" for what is in proto. Of others: the package."""
    first, _, rest = name.partition(".")
    if first != "octavo":
        return first
    inner = rest.split(".")[0]
    return inner if inner in FOLDERS else "client"


@cache
def imports(path: Path) -> set[str]:
    """Folders of ours and packages of others that a file imports."""
    return {folder_of(name if name.split(".")[0] not in FOLDERS else f"octavo.{name}") for name in modules_of(path)}


def knows_the_model(path: str) -> bool:
    return path.startswith(MODEL_FOLDERS) and not path.startswith(MODEL_FREE)


@pytest.mark.parametrize("folder", ARROWS)
def test_a_folder_imports_only_what_its_arrow_allows(folder: str, repository: Path) -> None:
    ours, never = ARROWS[folder]
    wrong = {}
    files = sorted((repository / folder).rglob("*.py"))
    for file in files:
        name, found = str(file.relative_to(repository)), imports(file)
        allowed = ours - {"model"} if folder == "worker" and not knows_the_model(name) else ours
        if extra := ((found & (FOLDERS | {"client"})) - allowed) | (found & never):
            wrong[name] = sorted(extra)
    assert files
    assert wrong == {}


def test_the_page_has_the_arrows_and_packages_that_are_imported(repository: Path) -> None:
    """cli may import everything, and the row says so."""
    page = (repository / "docs/architecture.md").read_text()
    rows = re.findall(r"^\| `([\w/]+)/` \|[^|]+\|([^|]+)\|[^|]*\|$", page, re.MULTILINE)
    told = {folder: set(re.findall(r"\w+", cell)) for folder, cell in rows}
    arrows = {folder: (may & FOLDERS) - {folder} for folder, (may, _) in ARROWS.items() if folder in told}
    assert told.keys() | {"integrations/dynamo"} == ARROWS.keys()
    assert {folder: FOLDERS & words for folder, words in told.items() if folder != "cli"} == {
        folder: may for folder, may in arrows.items() if folder != "cli"
    }
    packages = packages_distributions().keys()
    for folder, words in told.items():
        imported = {name for path in (repository / folder).rglob("*.py") for name in imports(path)}
        assert (words & packages) - imported <= {"octavo"}, folder


@pytest.mark.parametrize("folder", sorted(FOLDERS))
def test_everything_of_ours_is_imported_by_its_installed_name(folder: str, repository: Path) -> None:
    """`import gateway` would be another module than `octavo.gateway`, and found in a checkout only."""
    bare = FOLDERS - {"sim"}
    wrong = [
        str(file.relative_to(repository))
        for file in (repository / folder).rglob("*.py")
        for node in ast.walk(tree_of(file))
        if (isinstance(node, ast.ImportFrom) and node.level == 0 and str(node.module).split(".")[0] in bare)
        or (isinstance(node, ast.Import) and any(alias.name.split(".")[0] in bare for alias in node.names))
    ]
    assert wrong == []


@pytest.mark.parametrize("folder", INNER)
def test_the_folders_inside_of_a_folder_import_only_what_their_arrows_allow(folder: str, repository: Path) -> None:
    root, wrong = repository / folder, {}
    places = {str(each.parent.relative_to(root)).replace(".", "", 1) for each in root.rglob("*.py")}
    assert places == set(INNER[folder])
    for file in sorted(root.rglob("*.py")):
        place = str(file.parent.relative_to(root)).replace(".", "", 1)
        found = {
            _deepest(name.removeprefix(f"{folder}.").split("."), places)
            for name in modules_of(file)
            if name.startswith(f"{folder}.")
        }
        if extra := found - {"", place} - INNER[folder][place]:
            wrong[str(file.relative_to(repository))] = sorted(extra)
    assert wrong == {}


def _deepest(parts: list[str], places: set[str]) -> str:
    """The innermost folder that a dotted name leads to."""
    return max(("/".join(parts[:depth]) for depth in range(3) if "/".join(parts[:depth]) in places), key=len)


@pytest.mark.parametrize("folder", sorted(FOLDERS | {"bench", "tests/support", "tests/cli"}))
def test_no_folder_has_more_than_twenty_modules_side_by_side(folder: str, repository: Path) -> None:
    folders = {repository / folder, *(each.parent for each in (repository / folder).rglob("*.py"))}
    sizes = {str(each.relative_to(repository)): len({*each.glob("*.py")} - {each / "__init__.py"}) for each in folders}
    assert {name: size for name, size in sizes.items() if size > 20} == {}


def test_no_modules_import_one_another_in_a_circle(repository: Path) -> None:
    files = {
        ".".join(file.relative_to(repository).with_suffix("").parts).removesuffix(".__init__"): file
        for folder in FOLDERS
        for file in (repository / folder).rglob("*.py")
    }
    graph = {name: _imported_at_once(file, files) - {name} for name, file in files.items()}
    while free := {name for name, needs in graph.items() if not needs & graph.keys()}:
        graph = {name: needs for name, needs in graph.items() if name not in free}
    needed = set().union(*graph.values()) if graph else set()
    assert {name: sorted(needs & graph.keys()) for name, needs in graph.items() if name in needed} == {}


def _imported_at_once(file: Path, files: dict[str, Path]) -> set[str]:
    """Modules of ours that a file imports when it is imported itself: not inside functions, not for types alone."""
    found: set[str] = set()
    body = list(tree_of(file).body)
    while body:
        node = body.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.dump(node.test):
            body += node.body + node.orelse
        elif isinstance(node, ast.ImportFrom) and node.module:
            module = node.module.removeprefix("octavo.")
            for alias in node.names:
                found |= (
                    {f"{module}.{alias.name}", module} & files.keys()
                    if f"{module}.{alias.name}" not in files
                    else {f"{module}.{alias.name}"}
                )
    return found


def test_of_the_wire_the_model_knows_only_which_files_a_checkpoint_may_have(repository: Path) -> None:
    names = {name for path in (repository / "model").rglob("*.py") for name in modules_of(path)}
    assert {name.rpartition(".")[0] for name in names if name.startswith("wire.")} == {"wire.checkpoint_files"}


OF_COMMANDS = {"torch", "numpy", "grpc", "zmq", "structlog", "jinja2", "psutil", "google.protobuf"}
"""What the command line brings into no process, before it knows the command."""


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("octavo.gateway.main", {"torch", "octavo.model", "octavo.worker", "octavo.blockmgr"}),
        ("octavo.wire.messages", {"torch", "grpc", "zmq"}),
        ("octavo.blockmgr", {"torch", "zmq", "grpc", "msgspec"}),
        ("octavo.worker.scheduler.scheduler", {"torch", "zmq", "grpc"}),
        ("octavo.worker.runners.oracle.runner", {"torch", "zmq", "grpc"}),
        ("octavo.model", {"zmq", "grpc", "msgspec", "transformers"}),
        ("octavo.v1.inference_pb2_grpc", {"torch", "zmq"}),
        ("octavo", {"torch", "zmq", "transformers", "msgspec"}),
        # Each process of a service waits for what the command line imports; a worker then for torch, before all else.
        ("octavo.cli.app", OF_COMMANDS),
        ("octavo.cli.bench.commands", OF_COMMANDS),
        ("octavo.cli.client.commands", OF_COMMANDS),
        ("octavo.cli.tools.commands", OF_COMMANDS),
        ("octavo.cli.serve.commands", OF_COMMANDS | {"typer", "rich"}),
        ("octavo.cli.serve.preflight", {"torch", "numpy", "grpc", "structlog", "jinja2", "prometheus_client"}),
        ("octavo.cli.settings.worker_config", {"torch", "numpy", "grpc", "zmq", "structlog", "jinja2"}),
        ("octavo.cli.serve.serve", {"torch", "numpy", "jinja2", "prometheus_client", "grpc_health.v1"}),
        ("sim.world", {"torch", "octavo.model"}),
    ],
)
def test_importing_a_module_brings_in_nothing_that_it_must_not_know(
    module: str, absent: set[str], repository: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, {module}; print(*sorted(sys.modules))"],
        cwd=repository,
        env={"PYTHONPATH": str(repository), "PATH": ""},  # for sim, which is not installed
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert absent.isdisjoint(done.stdout.split())


def test_generated_stubs_are_current(repository: Path, tmp_path: Path) -> None:
    """But for what tells the versions of the generator: `make proto` has an older one than these tests."""
    protoc = pytest.importorskip("grpc_tools.protoc")
    protos = sorted(str(path) for path in (repository / "proto/octavo").glob("*/*.proto"))
    well_known = Path(protoc.__file__).parent / "_proto"
    arguments = [
        "protoc",
        f"-I{repository / 'proto'}",
        f"-I{well_known}",
        f"--python_out={tmp_path}",
        f"--grpc_python_out={tmp_path}",
    ]
    assert protoc.main([*arguments, *protos]) == 0
    made = sorted((tmp_path / "octavo").glob("*/*.py"))
    assert made
    for path in made:
        ours = (repository / "proto" / path.relative_to(tmp_path)).read_text()
        assert _without_versions(path.read_text()) == _without_versions(ours), path.name


def _without_versions(stub: str) -> str:
    """From the first descriptor or class on."""
    start = re.search(r"^(DESCRIPTOR = |class )", stub, re.MULTILINE)
    return stub[start.start() :].replace("(object):", ":") if start else ""


def test_nothing_deserializes_code(repository: Path) -> None:
    forbidden = {"pickle", "cloudpickle", "dill", "shelve", "marshal"}
    ours = [path for folder in ARROWS for path in (repository / folder).rglob("*.py")]
    assert {str(path) for path in ours if imports(path) & forbidden} == set()
    assert [str(path) for path in ours if "torch.load(" in path.read_text() or "recv_pyobj" in path.read_text()] == []
