"""Paths of the fields of a message, as violations and the capability handshake name them."""

from collections.abc import Iterator
from functools import cache

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from gateway.validation.rules import not_served
from gateway.validation.table import TABLE, MessageRules

_NO_RULES = MessageRules()


@cache
def supported_paths(message: Descriptor) -> tuple[str, ...]:
    """Every leaf that is served: "sampling.temperature", "chat.messages.role" (elements have no index here)."""
    return tuple(_paths(message, ""))


def _paths(message: Descriptor, prefix: str) -> Iterator[str]:
    rules = TABLE.get(message.full_name, _NO_RULES)
    for field in message.fields:
        if rules.fields.get(field.name) is not_served:
            continue
        if field.message_type is None or _is_map(field):
            yield prefix + field.name
        else:
            yield from _paths(field.message_type, f"{prefix}{field.name}.")


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry
