"""Typed reading of a config's fields: each reader returns a checked value or raises ConfigError naming the field.

Must not know: which fields there are.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.model.errors import ConfigError


class ConfigFields:
    """Reads one JSON object. `prefix` stands before the names in errors ("rope_scaling." for a nested object).

    A field that is null counts as absent, as transformers writes it.
    """

    def __init__(self, raw: Mapping[str, Any], prefix: str = "") -> None:
        self._raw = raw
        self._prefix = prefix

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._raw.get(name) is not None

    def is_null(self, name: str) -> bool:
        """Whether the field is there and null, for the few whose default is something else."""
        return name in self._raw and self._raw[name] is None

    def names(self) -> set[str]:
        """All fields that are not null."""
        return {name for name in self._raw if self.has(name)}

    def path(self, name: str) -> str:
        """The field's name from the top of the file, as used in errors."""
        return f"{self._prefix}{name if name.isprintable() and len(name) <= 100 else shown(name)}"

    def value(self, name: str) -> Any:
        """The field's JSON value; an error if it is missing."""
        if not self.has(name):
            raise ConfigError(self.path(name), "is missing")
        return self._raw[name]

    def positive_int(self, name: str, default: int | None = None, *, most: int = 2**31 - 1) -> int:
        """An integer from 1 to `most`, so that absurd sizes are refused before memory is allocated."""
        if default is not None and not self.has(name):
            return default
        value = self.value(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(self.path(name), f"must be a positive integer, is {shown(value)}")
        if value > most:
            raise ConfigError(self.path(name), f"must be at most {most}, is {shown(value)}")
        return value

    def count(self, name: str, default: int) -> int:
        """An integer of at least 0."""
        value = self.value(name) if self.has(name) else default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
            raise ConfigError(self.path(name), f"must be 0 or a positive integer, is {shown(value)}")
        return value

    def positive_float(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        if default is not None and not self.has(name):
            return default
        value = self.value(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise ConfigError(self.path(name), f"must be a finite number above 0, is {shown(value)}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        """true or false."""
        if not self.has(name):
            return default
        value = self.value(name)
        if not isinstance(value, bool):
            raise ConfigError(self.path(name), f"must be true or false, is {shown(value)}")
        return value

    def text(self, name: str) -> str:
        """A string."""
        value = self.value(name)
        if not isinstance(value, str):
            raise ConfigError(self.path(name), f"must be a string, is {shown(value)}")
        return value

    def nested(self, name: str) -> "ConfigFields":
        """An object inside this one."""
        value = self.value(name)
        if not isinstance(value, dict):
            raise ConfigError(self.path(name), f"must be an object, is {shown(value)}")
        return ConfigFields(value, f"{self.path(name)}.")

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One token id or a list of them; empty where absent."""
        value = self.value(name) if self.has(name) else []
        ids = value if isinstance(value, list) else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < 2**31 for item in ids):
            raise ConfigError(self.path(name), f"must be a token id or a list of them, is {shown(value)}")
        return tuple(ids)

    def must_be_one_of(self, name: str, supported: Sequence[str]) -> None:
        """The field has a supported value."""
        if self.text(name) not in supported:
            only = " and ".join(map(repr, supported))
            raise ConfigError(self.path(name), f"{shown(self.value(name))} is not supported, only {only}")


def shown(value: object) -> str:
    """A value as quoted in errors: at most one line."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**30:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # integers of thousands of digits, objects in objects in objects
        return f"a {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:100]}…"
