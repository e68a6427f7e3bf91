"""`octavo models`: what a service serves."""

import json
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table

from cli.connect import connect
from cli.settings import ClientSettings


def show_models(settings: ClientSettings, *, as_json: bool) -> int:
    """Print a table, one row per model, or one JSON object a line."""
    with connect(settings) as client:
        models = client.models()
    if as_json:
        for model in models:
            print(json.dumps(_fields(model)))  # noqa: T201
        return 0
    table = Table()
    for title in ("model", "dtype", "max tokens", "workers", "KV tokens", "fingerprint"):
        table.add_column(title, overflow="fold")
    for model in models:
        table.add_row(
            model.name,
            model.dtype,
            f"{model.max_model_len:,}",
            str(model.num_workers),
            f"{model.kv_capacity_tokens:,}",
            model.fingerprint[:12],
        )
    Console().print(table)
    return 0


def _fields(message: Message) -> dict[str, Any]:
    """Every field, also those that are empty; 64 bits as numbers, which protobuf's own JSON writes as text."""
    fields: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    for field in message.DESCRIPTOR.fields:
        if field.cpp_type in (field.CPPTYPE_UINT64, field.CPPTYPE_INT64) and not field.is_repeated:
            fields[field.name] = getattr(message, field.name)
        elif field.message_type is not None and not field.is_repeated and message.HasField(field.name):
            fields[field.name] = _fields(getattr(message, field.name))
    return fields
