"""Fixtures for the tests of the model."""

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.model import CausalLM, ModelConfig
from tests.support.model.checkpoints import tiny_config, write_tiny_checkpoint
from tests.support.model.interpreter import WARNINGS, prepare_interpreter, sum_products_in_one_order
from tests.support.model.ranks import alone, on_ranks

OF_KERNELS = ("gpu", "kernels")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What numpy says of arithmetic in triton's interpreter is no failure."""
    folders = {
        path: any(path.is_relative_to(Path(__file__).parent / folder) for folder in OF_KERNELS)
        for path in {item.path for item in items}
    }
    for item in items:
        if folders[item.path]:
            for mark in WARNINGS:
                item.add_marker(mark)


@pytest.fixture(scope="session", autouse=True)
def booleans() -> None:
    """Kernels' masks are booleans in every version of the interpreter."""
    prepare_interpreter()


@pytest.fixture(scope="module", autouse=True)
def small_tensors(one_thread: None) -> None:
    """All tests of the model compute on small tensors."""


@pytest.fixture(scope="module")
def one(request: pytest.FixtureRequest, folder: Path) -> dict[str, Any]:
    """What one rank gives: a module's `compute(ranks, folder)` of its own fixture `folder`."""
    found: dict[str, Any] = alone(request.module.compute, folder)
    return found


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def group(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank of a group gives. Four have two KV heads between them, but where a checkpoint has four."""
    return on_ranks(request.param, request.module.compute, tmp_path_factory.mktemp("ranks"), folder)


@pytest.fixture
def one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of triton's interpreter are summed in one order, as a device does."""
    if not torch.cuda.is_available():
        sum_products_in_one_order(monkeypatch)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A tiny checkpoint folder that the test may change."""
    return write_tiny_checkpoint(tmp_path / "checkpoint")


@pytest.fixture(scope="session")
def tiny_model() -> CausalLM:
    """A tiny model in float32; do not change its weights."""
    return CausalLM.random(ModelConfig.from_dict(tiny_config()), seed=0, dtype=torch.float32)
