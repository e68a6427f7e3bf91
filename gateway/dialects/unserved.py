"""Finds what a dialect's request asks for and is not served, by the caller's own names: nothing is ignored. Also
reports gateways that did not answer, for which a dialect's answers have no field."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from octavo.gateway.errors import Violation
from octavo.gateway.validation.fields import REQUEST_ID, raise_if_any

SILENT_TRAILER = "x-unreachable-gateways"


class _Call(Protocol):
    def set_trailing_metadata(self, trailing_metadata: Any) -> None: ...


def tell_silent(call: _Call, silent: Sequence[str]) -> None:
    """Put the number of gateways that did not answer into the call's trailers; nothing if all did."""
    if silent:
        call.set_trailing_metadata(((SILENT_TRAILER, str(len(silent))),))


def unserved(
    message: Message, refused: Mapping[str, Mapping[str, str]], *, opaque: Sequence[str] = (), prefix: str = ""
) -> Iterator[Violation]:
    """Violations for unknown and refused fields, nested messages included. refused: message name -> field -> reason.
    opaque: fields whose contents are not checked."""
    for unknown in UnknownFieldSet(message):  # type: ignore[attr-defined]
        yield Violation(field=f"{prefix}#{unknown.field_number}", description="unknown field")
    reasons = refused.get(message.DESCRIPTOR.name, {})
    for field, value in message.ListFields():
        path = prefix + field.name
        if field.name in reasons:
            yield Violation(field=path, description=reasons[field.name])
        elif field.name in opaque or field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        elif isinstance(value, Message):
            yield from unserved(value, refused, opaque=opaque, prefix=f"{path}.")
        else:
            for index, element in enumerate(value):
                yield from unserved(element, refused, opaque=opaque, prefix=f"{path}[{index}].")


def path_by(table: Iterable[tuple[str, str]], path: str) -> str:
    """The path with its prefix replaced by the first matching row of (our prefix, their prefix)."""
    for ours, theirs in table:
        if path.startswith(ours):
            return theirs + path.removeprefix(ours)
    return path


def check_request_ids(ids: Iterable[str]) -> None:
    """Raises InvalidRequest that names the ids that no request can have."""
    found = (
        Violation(field=f"request_ids[{index}]", description=wrong)
        for index, request_id in enumerate(ids)
        if (wrong := REQUEST_ID(request_id)) is not None
    )
    raise_if_any(found)
