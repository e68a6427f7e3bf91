"""What tests of the CUDA runner have in common."""

import pytest
import torch

from tests.support.model.interpreter import cut_decodes_coarsely, prepare_interpreter


@pytest.fixture(scope="session", autouse=True)
def booleans() -> None:
    """Kernels' masks are booleans in every version of the interpreter."""
    prepare_interpreter()


@pytest.fixture
def few_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes in few programs, where Triton's interpreter runs them."""
    if not torch.cuda.is_available():
        cut_decodes_coarsely(monkeypatch)
