"""The arrows between folders, as docs/architecture.md has them: what each may import, in the code and at run time."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

OURS = {"octavo", "wire", "blockmgr", "grammar", "model", "worker", "gateway", "cli", "sim"}
MODEL_FILES_OF_WORKER = ("torch_runner", "cuda_", "runner_", "memory", "main", "model_card")

# folder -> (our folders that it may import, third-party packages that it may never import)
ARROWS: dict[str, tuple[set[str], set[str]]] = {
    "proto/octavo": ({"octavo"}, {"torch", "zmq", "transformers"}),
    "wire": ({"wire"}, {"torch", "grpc", "transformers"}),
    "blockmgr": ({"blockmgr"}, {"torch", "zmq", "grpc", "transformers", "msgspec"}),
    "grammar": ({"grammar", "wire"}, {"torch", "zmq", "grpc", "transformers"}),
    "model": ({"model", "wire"}, {"zmq", "grpc", "msgspec"}),  # of wire only checkpoint_files: the test below
    "worker": ({"worker", "blockmgr", "wire", "grammar"}, {"grpc"}),
    "gateway": ({"gateway", "wire", "octavo", "grammar"}, {"torch"}),
    "sim": ({"sim", "wire", "blockmgr", "worker", "gateway", "octavo"}, {"torch", "transformers"}),
}


def imports(path: Path) -> set[str]:
    """Top-level names of every module that a file imports, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


def allowed(folder: str, path: Path) -> set[str]:
    ours = ARROWS[folder][0]
    if folder == "worker" and path.stem.startswith(MODEL_FILES_OF_WORKER):
        return ours | {"model"}
    return ours


@pytest.mark.parametrize("folder", ARROWS)
def test_a_folder_imports_only_what_its_arrow_allows(folder: str, repository: Path) -> None:
    files = sorted((repository / folder).rglob("*.py"))
    wrong = {
        str(path.relative_to(repository)): sorted(extra)
        for path in files
        if (extra := ((imports(path) & OURS) - allowed(folder, path)) | (imports(path) & ARROWS[folder][1]))
    }
    assert files
    assert wrong == {}


def test_of_the_wire_the_model_knows_only_which_files_a_checkpoint_may_have(repository: Path) -> None:
    nodes = [node for path in (repository / "model").rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    assert {name for name in modules if name and name.split(".")[0] == "wire"} == {"wire.checkpoint_files"}


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("gateway.main", {"torch", "model", "worker", "blockmgr"}),
        ("wire.messages", {"torch", "grpc", "zmq"}),
        ("blockmgr", {"torch", "zmq", "grpc", "msgspec"}),
        ("worker.scheduler", {"torch", "zmq", "grpc"}),
        ("worker.oracle_runner", {"torch", "zmq", "grpc"}),
        ("model", {"zmq", "grpc", "msgspec", "transformers"}),
        ("octavo.v1.inference_pb2_grpc", {"torch", "zmq"}),
        ("cli.main", {"torch"}),
        ("sim.world", {"torch", "model"}),
    ],
)
def test_importing_a_module_brings_in_nothing_that_it_must_not_know(
    module: str, absent: set[str], repository: Path
) -> None:
    code = f"import sys, {module}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=repository,
        env={"PYTHONPATH": f"{repository}:{repository / 'proto'}", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert absent.isdisjoint(done.stdout.split())


def test_generated_stubs_are_current(repository: Path, tmp_path: Path) -> None:
    protoc = pytest.importorskip("grpc_tools.protoc")
    protos = sorted(str(path) for path in (repository / "proto/octavo").glob("*/*.proto"))
    arguments = ["protoc", f"-I{repository / 'proto'}", f"--python_out={tmp_path}", f"--grpc_python_out={tmp_path}"]
    assert protoc.main([*arguments, *protos]) == 0
    made = sorted((tmp_path / "octavo").glob("*/*.py"))
    assert made
    for path in made:
        assert path.read_text() == (repository / "proto" / path.relative_to(tmp_path)).read_text(), path.name


def test_nothing_deserializes_code(repository: Path) -> None:
    forbidden = {"pickle", "cloudpickle", "dill", "shelve", "marshal"}
    ours = [path for folder in ARROWS for path in (repository / folder).rglob("*.py")]
    assert {str(path) for path in [*ours, *(repository / "cli").rglob("*.py")] if imports(path) & forbidden} == set()
    assert [str(path) for path in ours if "torch.load(" in path.read_text() or "recv_pyobj" in path.read_text()] == []
