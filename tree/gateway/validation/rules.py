"""Rules for single values. A rule says what is wrong with a value, or None."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from google.protobuf.descriptor import EnumDescriptor


class Rule(Protocol):
    """value: a set scalar field, or one element of a repeated one."""

    def __call__(self, value: object) -> str | None: ...


def _shown(number: float) -> str:
    return str(int(number)) if float(number).is_integer() else f"{number:g}"


def anything(value: object) -> str | None:
    """Every value of the field's type is good."""
    return None


def not_served(value: object) -> str | None:
    """The field is part of the contract, and this gateway does not serve it."""
    return "is not supported"


def must_be_true(value: object) -> str | None:
    """A choice between fields that has no other value."""
    return None if value is True else "must be true"


@dataclass(frozen=True, slots=True)
class InRange:
    """A finite number in [low, high]."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"[{_shown(self.low)}, {_shown(self.high)}]"

    def __call__(self, value: object) -> str | None:
        if not isinstance(value, int | float) or not math.isfinite(value):
            return f"must be a finite number in {self}"
        # float fields arrive as doubles: 0.1f is not 0.1, but borders such as 1 and 100 are exact.
        return None if self.low <= value <= self.high else f"must be in {self}, not {_shown(value)}"


@dataclass(frozen=True, slots=True)
class Above:
    """A finite number in (low, high]."""

    low: float
    high: float

    def __call__(self, value: object) -> str | None:
        wrong = InRange(self.low, self.high)(value)
        if wrong is not None or value == self.low:
            return f"must be in ({_shown(self.low)}, {_shown(self.high)}]"
        return None


@dataclass(frozen=True, slots=True)
class Utf8Bytes:
    """Text of low to high bytes."""

    low: int
    high: int

    def __call__(self, value: object) -> str | None:
        num_bytes = len(str(value).encode())
        if num_bytes < self.low:
            return "must not be empty"
        return None if num_bytes <= self.high else f"has {num_bytes} bytes, at most {self.high} are allowed"


@dataclass(frozen=True, slots=True)
class Visible:
    """Visible ASCII, at most `high` characters: it travels in headers and log lines."""

    high: int

    def __call__(self, value: object) -> str | None:
        text = str(value)
        if len(text) > self.high:
            return f"has {len(text)} characters, at most {self.high} are allowed"
        return None if all("!" <= character <= "~" for character in text) else "must be visible ASCII without spaces"


@dataclass(frozen=True, slots=True)
class OneOf:
    """A named value of an enum; zero is left to `required`."""

    enum: EnumDescriptor

    def __call__(self, value: object) -> str | None:
        return None if value in self.enum.values_by_number else f"{value} is no {self.enum.name}"


def json_object(value: object) -> str | None:
    """The text of a JSON object, in valid Unicode, without NaN and Infinity."""
    try:
        parsed = json.loads(str(value), parse_constant=_refuse_constant)
        json.dumps(parsed, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # JSONDecodeError and UnicodeEncodeError are ValueErrors
        return "is not valid JSON"
    return None if isinstance(parsed, dict) else "must be a JSON object"


def _refuse_constant(name: str) -> float:
    raise ValueError(name)


@dataclass(frozen=True, slots=True)
class Count:
    """How many elements a repeated field may have."""

    low: int
    high: int

    def __call__(self, values: Sequence[object]) -> str | None:
        if len(values) < self.low:
            return f"needs at least {self.low} element{'s' if self.low != 1 else ''}"
        return None if len(values) <= self.high else f"has {len(values)} elements, at most {self.high} are allowed"
