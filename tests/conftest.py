"""Fixtures and settings for every test."""

import functools
import gc
import os
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Kernels run in triton's interpreter where there is no GPU; triton reads this when it is imported.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")

REPOSITORY = Path(__file__).resolve().parent.parent

# What starts services, or looks at the time of its own process: a core of the machine for each would not be enough.
ALONE = (
    "browser", "cli/serve", "cli/test_errors.py", "deploy", "e2e", "examples", "faults",
    "gateway/observability/test_logs.py",
    "gateway/test_garbage.py", "gateway/test_main.py", "gateway/test_responsiveness.py", "gateway/workers", "soak",
    "worker/test_main.py", "worker/transport",
)  # fmt: skip
# Within those folders, what starts nothing.
NOT_ALONE = ("cli/serve/test_preflight.py", "examples/test_train_demo.py")
GPU = "gpu"  # the folder of which every test needs one
assert all((REPOSITORY / "tests" / each).exists() for each in ALONE + NOT_ALONE), "a test that runs alone was moved"

settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("OCTAVO_HYPOTHESIS", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-seconds", action="store_true", help="keep what each file takes in tests/seconds.json")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record-seconds") and not hasattr(config, "workerinput"):
        from tests.check import Recorder

        config.pluginmanager.register(Recorder())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays: no garbage is looked for meanwhile, which took two fifths of the time, nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of which `-m` takes nothing, alone or not, are not imported: every process would import all of them."""
    expression = config.option.markexpr
    terms = [] if " or " in expression or "(" in expression else expression.split(" and ")
    if collection_path.suffix != ".py":
        return None
    if "not gpu" in terms and _lies_in_gpu(collection_path):
        return True
    if not {"alone", "not alone"} & set(terms):
        return None
    alone = _lies_in_alone(collection_path)
    if "not alone" in terms:
        return True if alone else None
    return None if alone or "mark.alone" in collection_path.read_text() else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of services are marked `alone`: `make test` runs them after the others, a few files at once. With
    `--no-loadscope-reorder`, files are handed out in the order of their tests. Those of GPU are marked `gpu`."""
    for item in items:
        if _lies_in_alone(item.path):
            item.add_marker(pytest.mark.alone)
        if _lies_in_gpu(item.path):
            item.add_marker(pytest.mark.gpu)
    if hasattr(config, "workerinput"):
        from tests.check import longest_first, read_seconds

        longest_first(items, read_seconds())


def is_alone(place: Path | str) -> bool:
    """Of a file, from the folder of the tests."""
    return str(place) not in NOT_ALONE and any(Path(place).is_relative_to(each) for each in ALONE)


@functools.cache
def _lies_in_alone(path: Path) -> bool:
    return is_alone(path.relative_to(REPOSITORY / "tests"))


def _lies_in_gpu(path: Path) -> bool:
    return path.is_relative_to(REPOSITORY / "tests" / GPU)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference data beside the checkout (tokenizer, configs, vectors); skips where it is absent."""
    folder = Path(os.environ.get("OCTAVO_SHARED", REPOSITORY.parent / "shared"))
    if not (folder / "data").is_dir():
        pytest.skip(f"reference data is not at {folder} (set OCTAVO_SHARED)")
    return folder


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """torch computes with one thread: on small tensors, and on a busy machine, two mostly wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def oracle_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for `--runner oracle`: only its tokenizer and limits are read."""
    from tests.support.model.checkpoints import write_tiny_checkpoint

    return write_tiny_checkpoint(tmp_path_factory.mktemp("oracle"), max_position_embeddings=4096)


def _freeze() -> None:
    """What earlier tests have left is nobody's garbage: no collection need walk it. A gateway starts so, too."""
    gc.collect()
    gc.freeze()


frozen = pytest.fixture(_freeze)
frozen_for_all = pytest.fixture(_freeze, scope="module")  # tests of a file
