"""Sets fields of messages from plain Python values; errors name the field that cannot hold its value. Pure: no I/O."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

M = TypeVar("M", bound=Message)


def made(message: M, **fields: object) -> M:
    """The message with these fields; those that are None stay unset. Raises as `assign`."""
    for name, value in fields.items():
        if value is not None and message.DESCRIPTOR.fields_by_name[name].is_repeated:
            extend(message, name, value)
        elif value is not None:
            assign(message, name, value)
    return message


def assign(message: Message, name: str, value: object) -> None:
    """Set a field. Raises TypeError or ValueError whose message begins with the field's name."""
    with naming(name):
        if _is_text(message, name) and not isinstance(value, str | bytes):
            raise TypeError(f"is text, not {value!r}")
        setattr(message, name, value)


def extend(message: Message, field: str, values: Any, *, name: str | None = None) -> None:
    """The same for a repeated field. name: what the caller knows it by, if not by the field's. A single text is a
    TypeError, as are bytes: each of its characters would become an element."""
    with naming(name or field):
        if isinstance(values, str | bytes | bytearray):
            raise TypeError(f"is a sequence, not the text {values!r}")
        if not isinstance(values, Iterable):
            raise TypeError(f"is a sequence, not {values!r}")
        values = list(values)
        wrong = [each for each in values if not isinstance(each, str | bytes)] if _is_text(message, field) else []
        if wrong:
            raise TypeError(f"{wrong[0]!r} is no text")
        getattr(message, field).extend(values)


def enum_value(name: str, value: object, values: Mapping[str, int]) -> Any:
    """What the contract calls this word. Raises ValueError whose message begins with the field's name."""
    if not isinstance(value, str) or value not in values:
        raise ValueError(f"{name} {value!r} is none of {', '.join(values)}")
    return values[value]


def _is_text(message: Message, field: str) -> bool:
    """Whether it takes text alone: of other values protobuf tells neither what they are nor what they should be."""
    return bool(message.DESCRIPTOR.fields_by_name[field].type == FieldDescriptor.TYPE_STRING)


@contextmanager
def naming(field: str) -> Iterator[None]:
    """Prefixes the field's name to what protobuf raises inside: its messages give only types and ranges."""
    try:
        yield
    except TypeError as error:
        raise TypeError(f"{field}: {error}") from None
    except UnicodeEncodeError as error:  # surrogates: from bytes that are not UTF-8, or half a pair
        raise ValueError(f"{field}: is not UTF-8 text, from its character {error.start + 1} on") from None
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{field}: {error}") from None
