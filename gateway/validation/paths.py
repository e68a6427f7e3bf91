"""Paths of the fields of a message, as violations and the capability handshake name them."""

from collections.abc import Iterator
from functools import cache

from google.protobuf.descriptor import Descriptor


@cache
def supported_paths(message: Descriptor) -> tuple[str, ...]:
    """Every leaf: "sampling.temperature", "chat.messages.role" (elements have no index here)."""
    return tuple(_paths(message, ""))


def _paths(message: Descriptor, prefix: str) -> Iterator[str]:
    for field in message.fields:
        if field.message_type is None:
            yield prefix + field.name
        else:
            yield from _paths(field.message_type, f"{prefix}{field.name}.")
