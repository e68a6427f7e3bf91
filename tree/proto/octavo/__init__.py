"""Client of Octavo: generate text over gRPC from paged memory.

    from octavo import Client

    with Client("127.0.0.1:50051") as client:
        for text in client.stream(messages=[("user", "Hello!")], max_tokens=64):
            print(text, end="", flush=True)

`AsyncClient` is the same for asyncio. The generated stubs are in `octavo.v1`; importing those alone does not import
the client.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.client import Client, TextStream
    from octavo.client_aio import AsyncClient, AsyncTextStream
    from octavo.client_errors import (
        Cancelled,
        DeadlineExceeded,
        InvalidRequest,
        NotFound,
        OctavoError,
        Overloaded,
        ServerFault,
        Unauthorized,
        Unavailable,
    )
    from octavo.client_options import tls_credentials
    from octavo.client_requests import generate_request
    from octavo.client_tools import assistant_turn, tool_result

_HOMES = {
    "Client": "client",
    "TextStream": "client",
    "AsyncClient": "client_aio",
    "AsyncTextStream": "client_aio",
    "generate_request": "client_requests",
    "assistant_turn": "client_tools",
    "tool_result": "client_tools",
    "Cancelled": "client_errors",
    "DeadlineExceeded": "client_errors",
    "InvalidRequest": "client_errors",
    "NotFound": "client_errors",
    "OctavoError": "client_errors",
    "Overloaded": "client_errors",
    "ServerFault": "client_errors",
    "Unauthorized": "client_errors",
    "Unavailable": "client_errors",
    "tls_credentials": "client_options",
}

__all__ = [
    "AsyncClient",
    "AsyncTextStream",
    "Cancelled",
    "Client",
    "DeadlineExceeded",
    "InvalidRequest",
    "NotFound",
    "OctavoError",
    "Overloaded",
    "ServerFault",
    "TextStream",
    "Unauthorized",
    "Unavailable",
    "assistant_turn",
    "generate_request",
    "tls_credentials",
    "tool_result",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    return getattr(import_module(f"octavo.{_HOMES[name]}"), name)
