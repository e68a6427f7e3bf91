"""Walks a message by its descriptor and applies the table."""

from collections.abc import Iterator

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from octavo.gateway.errors import InvalidRequest, Violation
from octavo.gateway.validation.table import TABLE, not_served

MAX_VIOLATIONS = 16  # enough to see what is wrong; a hostile message does not make a long answer


def check(message: Message) -> None:
    """Raises InvalidRequest with the paths of what is wrong."""
    raise_if_any(first_violations(violations(message, "")))


def raise_if_any(found: tuple[Violation, ...]) -> None:
    """Raises InvalidRequest where there are violations."""
    if found:
        raise InvalidRequest(found)


def first_violations(found: Iterator[Violation]) -> tuple[Violation, ...]:
    """At most MAX_VIOLATIONS of them."""
    return tuple(violation for violation, _ in zip(found, range(MAX_VIOLATIONS), strict=False))


def violations(message: Message, prefix: str) -> Iterator[Violation]:
    """What is wrong in this message and those inside, in the order of the fields."""
    rules = TABLE[message.DESCRIPTOR.full_name]
    for unknown in UnknownFieldSet(message):  # type: ignore[attr-defined]
        yield Violation(field=f"{prefix}#{unknown.field_number}", description="unknown field")
    for name in rules.required_oneofs:
        if message.WhichOneof(name) is None:
            yield Violation(field=prefix + name, description="exactly one must be set")
    for name in rules.required:
        if not _is_set(message, name):
            yield Violation(field=prefix + name, description="must be set")
    miscounted = set[str]()
    for name, count in rules.counts.items():
        if (wrong := count(getattr(message, name))) is not None:
            miscounted.add(name)
            yield Violation(field=prefix + name, description=wrong)
    for field, value in message.ListFields():
        if field.name not in miscounted:  # elements of a list that is too long are not looked at
            yield from _field_violations(field, value, prefix + field.name)


def _is_set(message: Message, name: str) -> bool:
    field = message.DESCRIPTOR.fields_by_name[name]
    return message.HasField(name) if field.has_presence else bool(getattr(message, name))


def _field_violations(field: FieldDescriptor, value: object, path: str) -> Iterator[Violation]:
    assert field.containing_type is not None
    if TABLE[field.containing_type.full_name].fields[field.name] is not_served:
        yield Violation(field=path, description="is not supported")
    elif not field.is_repeated:
        yield from _value_violations(field, value, path)
    elif field.message_type is not None and field.message_type.GetOptions().map_entry:
        for key in sorted(value):  # type: ignore[call-overload]
            yield from _value_violations(field, value[key], f"{path}[{key}]")  # type: ignore[index]
    elif field.message_type is not None or field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        for index, element in enumerate(value):  # type: ignore[arg-type, var-annotated]
            yield from _value_violations(field, element, f"{path}[{index}]")
    # Repeated numbers are ids: what they may be depends on the model (see `generate`).


def _value_violations(field: FieldDescriptor, value: object, path: str) -> Iterator[Violation]:
    if isinstance(value, Message):
        yield from violations(value, path + ".")
        return
    assert field.containing_type is not None
    rule = TABLE[field.containing_type.full_name].fields[field.name]
    if (wrong := rule(value)) is not None:
        yield Violation(field=path, description=wrong)
