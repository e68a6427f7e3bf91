"""`vllm.grpc.engine.VllmEngine`, if its stubs are installed (PyPI `smg-grpc-proto`).

This is the only file here that can be imported without them.
"""

from importlib.util import find_spec

SERVICE = "vllm.grpc.engine.VllmEngine"


def is_installed() -> bool:
    """Whether the stubs are installed."""
    return find_spec("smg_grpc_proto") is not None
