"""Sets fields of messages from plain Python values, and says which field it is that cannot hold one. Pure."""

from collections.abc import Iterator, MutableSequence
from contextlib import contextmanager
from typing import Any

from google.protobuf.message import Message


def assign(message: Message, name: str, value: object) -> None:
    """Raises TypeError and ValueError that begin with the field's name."""
    with naming(name):
        setattr(message, name, value)


def extend(repeated: MutableSequence[Any], name: str, values: Any) -> None:
    """The same for a repeated field. One text is a TypeError: each of its characters would be an element."""
    with naming(name):
        if isinstance(values, str):
            raise TypeError(f"is a sequence, not the text {values!r}")
        repeated.extend(values)


@contextmanager
def naming(field: str) -> Iterator[None]:
    """What protobuf raises in it begins with the field's name: it tells types and ranges alone."""
    try:
        yield
    except TypeError as error:
        raise TypeError(f"{field}: {error}") from None
    except UnicodeEncodeError as error:  # what Python made of bytes that are not UTF-8, or half of a character
        raise ValueError(f"{field}: is not UTF-8 text, from its character {error.start + 1} on") from None
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{field}: {error}") from None
