"""Tests with clients and gateways of others: `make test-interop`, for they download what they drive."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support.services.interop import NoEnvironment, interop_node, interop_python, run_node
from tests.support.services.service import Service, serve

collect_ignore_glob = ["drivers/*"] if os.environ.get("OCTAVO_INTEROP") else ["*.py"]


def _python(name: str) -> Path:
    try:
        return interop_python(name)
    except NoEnvironment as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smg_python() -> Path:
    """An interpreter that has the `smg` gateway and the `openai` client; skips where they cannot be installed."""
    return _python("smg")


@pytest.fixture(scope="session")
def triton_python() -> Path:
    """An interpreter that has tritonclient; skips where it cannot be installed."""
    return _python("triton")


@pytest.fixture(scope="session")
def dynamo_python() -> Path:
    """An interpreter that has NVIDIA Dynamo; skips where it cannot be installed."""
    return _python("dynamo")


@pytest.fixture(scope="session")
def node() -> Callable[..., str]:
    """Runs a script with gRPC for Node; skips where that cannot be installed."""
    try:
        return partial(run_node, interop_node())
    except NoEnvironment as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """`octavo serve` with the embedded model: its own template and tokenizer, real weights."""
    with serve(tmp_path_factory.mktemp("first"), "--num-blocks=512") as running:
        yield running


@pytest.fixture(scope="session")
def second_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Another one."""
    with serve(tmp_path_factory.mktemp("second"), "--num-blocks=512") as running:
        yield running
