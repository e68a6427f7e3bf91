"""Sets fields of messages from plain Python values; errors name the field that cannot hold its value. Pure: no I/O."""

from collections.abc import Iterable, Iterator, MutableSequence
from contextlib import contextmanager
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

M = TypeVar("M", bound=Message)


def made(message: M, **fields: object) -> M:
    """The message with these fields; those that are None stay unset. Raises as `assign`."""
    for name, value in fields.items():
        if value is not None and message.DESCRIPTOR.fields_by_name[name].is_repeated:
            extend(getattr(message, name), name, value)
        elif value is not None:
            assign(message, name, value)
    return message


def assign(message: Message, name: str, value: object) -> None:
    """Set a field. Raises TypeError or ValueError whose message begins with the field's name."""
    with naming(name):
        if message.DESCRIPTOR.fields_by_name[name].type == FieldDescriptor.TYPE_STRING:
            check_text(value)
        setattr(message, name, value)


def check_text(value: object) -> None:
    """Raises TypeError for what no field of text can hold: protobuf names neither the value nor what it should be."""
    if not isinstance(value, str | bytes):
        raise TypeError(f"is text, not {value!r}")


def extend(repeated: MutableSequence[Any], name: str, values: Any) -> None:
    """The same for a repeated field. A single text is a TypeError: each of its characters would become an element."""
    with naming(name):
        if isinstance(values, str):
            raise TypeError(f"is a sequence, not the text {values!r}")
        if not isinstance(values, Iterable):
            raise TypeError(f"is a sequence, not {values!r}")
        values = list(values)
        try:
            repeated.extend(values)
        except TypeError as error:
            if "argument type" not in str(error):  # which is of text alone
                raise
            wrong = next((each for each in values if not isinstance(each, str | bytes)), None)
            raise TypeError(f"{wrong!r} is no text") from None


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
