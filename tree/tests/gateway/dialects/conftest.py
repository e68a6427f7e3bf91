"""The stub of VllmEngine on a channel to a gateway."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def vllm_stub() -> Callable[[Any], Any]:
    """vllm_stub(channel); skips where the stubs are not installed."""
    return pytest.importorskip("smg_grpc_proto").vllm_engine_pb2_grpc.VllmEngineStub  # type: ignore[no-any-return]
