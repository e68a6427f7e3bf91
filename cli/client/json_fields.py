"""Messages as the JSON that commands print for programs.

Knows no command.
"""

from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message


def json_fields(message: Message) -> dict[str, Any]:
    """All fields by the contract's names, those that are zero or empty too: a key that comes and goes with its value is
    a trap. 64-bit integers are text, as protobuf's JSON has them, since a seed fits into no double."""
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def numeric_fields(message: Message) -> dict[str, Any]:
    """As `json_fields`, with 64-bit integers as numbers: for messages where these are counts."""
    fields = json_fields(message)
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.cpp_type in (field.CPPTYPE_UINT64, field.CPPTYPE_INT64) and not field.is_repeated:
            fields[field.name] = value
        elif field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        elif field.is_repeated:
            fields[field.name] = [numeric_fields(each) for each in value]
        elif message.HasField(field.name):
            fields[field.name] = numeric_fields(value)
    return fields
