"""What of a dialect's request is not served, by the caller's own names: nothing is ignored."""

from collections.abc import Iterator, Mapping, Sequence

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from octavo.gateway.errors import Violation


def unserved(
    message: Message, refused: Mapping[str, Mapping[str, str]], *, opaque: Sequence[str] = (), prefix: str = ""
) -> Iterator[Violation]:
    """Fields that are not known, and those that are refused, in messages inside of the message too. refused: message ->
    field -> why. opaque: fields that are not looked into."""
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
