"""`vllm.grpc.engine.VllmEngine`, where its stubs are installed (PyPI `smg-grpc-proto`).

The only file that may be imported without them.
"""

from collections.abc import Callable
from importlib.util import find_spec

import grpc

from octavo.gateway.peers.control import Control
from octavo.gateway.requests.tracker import Desk

SERVICE = "vllm.grpc.engine.VllmEngine"


def is_installed() -> bool:
    """Whether the stubs are there."""
    return find_spec("smg_grpc_proto") is not None


def attach(server: grpc.aio.Server, desk: Desk, control: Control, is_ready: Callable[[], bool]) -> None:
    """Serve it there. Raises ImportError without the stubs."""
    from smg_grpc_proto import vllm_engine_pb2_grpc  # type: ignore[import-untyped]

    from octavo.gateway.dialects.vllm.servicer import VllmServicer

    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(VllmServicer(desk, control, is_ready), server)
