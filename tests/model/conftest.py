"""Fixtures for the tests of the model."""

from pathlib import Path

import pytest
import torch

from octavo.model import CausalLM, ModelConfig
from tests.support.model.checkpoints import tiny_config, write_tiny_checkpoint
from tests.support.model.interpreter import WARNINGS, let_comparisons_be_booleans

OF_KERNELS = ("gpu", "kernels")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What numpy says of arithmetic in triton's interpreter is no failure."""
    for item in items:
        if any(item.path.is_relative_to(Path(__file__).parent / folder) for folder in OF_KERNELS):
            for mark in WARNINGS:
                item.add_marker(mark)


@pytest.fixture(scope="session", autouse=True)
def booleans() -> None:
    """Kernels' masks are booleans in every version of the interpreter."""
    let_comparisons_be_booleans()


@pytest.fixture(scope="module", autouse=True)
def small_tensors(one_thread: None) -> None:
    """All tests of the model compute on small tensors."""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A tiny checkpoint folder that the test may change."""
    return write_tiny_checkpoint(tmp_path / "checkpoint")


@pytest.fixture(scope="session")
def tiny_model() -> CausalLM:
    """A tiny model in float32; do not change its weights."""
    return CausalLM.random(ModelConfig.from_dict(tiny_config()), seed=0, dtype=torch.float32)
