"""`vllm.grpc.engine.VllmEngine`, where its stubs are installed (PyPI `smg-grpc-proto`).

The only file that may be imported without them.
"""

from importlib.util import find_spec

SERVICE = "vllm.grpc.engine.VllmEngine"


def is_installed() -> bool:
    """Whether the stubs are there."""
    return find_spec("smg_grpc_proto") is not None
