"""Client of Octavo: generate text over gRPC from paged memory.

    from octavo import Client

    with Client("127.0.0.1:50051") as client:
        for text in client.stream(messages=[("user", "Hello!")], max_tokens=64):
            print(text, end="", flush=True)

`AsyncClient` is the same for asyncio. The generated stubs are in `octavo.v1`; importing those alone does not import
the client.
"""

from importlib import import_module

TYPE_CHECKING = False  # typing itself takes time, in which Ctrl-C could not be told from a fault
if TYPE_CHECKING:
    from octavo.client.aio import AsyncClient, AsyncTextStream
    from octavo.client.blocking import Client, TextStream
    from octavo.client.errors import (
        Cancelled,
        ClientUnusable,
        DeadlineExceeded,
        InvalidRequest,
        NotFound,
        OctavoError,
        Overloaded,
        ServerFault,
        Unauthorized,
        Unavailable,
    )
    from octavo.client.options import tls_credentials
    from octavo.client.requests import generate_request
    from octavo.client.tools import assistant_turn, tool_result

_HOMES = {
    "Client": "client.blocking",
    "TextStream": "client.blocking",
    "AsyncClient": "client.aio",
    "AsyncTextStream": "client.aio",
    "generate_request": "client.requests",
    "assistant_turn": "client.tools",
    "tool_result": "client.tools",
    "Cancelled": "client.errors",
    "ClientUnusable": "client.errors",
    "DeadlineExceeded": "client.errors",
    "InvalidRequest": "client.errors",
    "NotFound": "client.errors",
    "OctavoError": "client.errors",
    "Overloaded": "client.errors",
    "ServerFault": "client.errors",
    "Unauthorized": "client.errors",
    "Unavailable": "client.errors",
    "tls_credentials": "client.options",
}

__all__ = [
    "AsyncClient",
    "AsyncTextStream",
    "Cancelled",
    "Client",
    "ClientUnusable",
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


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
