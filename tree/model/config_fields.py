"""Typed reading of a config's fields: each reader returns a checked value or raises ConfigError naming the field.

Must not know: which fields there are.
"""

import math
from collections.abc import Mapping
from typing import Any

from model.errors import ConfigError


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

    def names(self) -> set[str]:
        """Every field that is not null."""
        return {name for name in self._raw if self.has(name)}

    def path(self, name: str) -> str:
        """The field's name from the top of the file."""
        return f"{self._prefix}{name}"

    def value(self, name: str) -> Any:
        """The field as JSON gave it; a missing one is an error."""
        if not self.has(name):
            raise ConfigError(self.path(name), "is missing")
        return self._raw[name]

    def positive_int(self, name: str, default: int | None = None) -> int:
        """An integer of at least 1."""
        if default is not None and not self.has(name):
            return default
        value = self.value(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(self.path(name), f"must be a positive integer, is {value!r}")
        return value

    def positive_float(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        if default is not None and not self.has(name):
            return default
        value = self.value(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise ConfigError(self.path(name), f"must be a finite number above 0, is {value!r}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        """true or false."""
        if not self.has(name):
            return default
        value = self.value(name)
        if not isinstance(value, bool):
            raise ConfigError(self.path(name), f"must be true or false, is {value!r}")
        return value

    def text(self, name: str) -> str:
        """A string."""
        value = self.value(name)
        if not isinstance(value, str):
            raise ConfigError(self.path(name), f"must be a string, is {value!r}")
        return value

    def nested(self, name: str) -> "ConfigFields":
        """An object inside this one."""
        value = self.value(name)
        if not isinstance(value, dict):
            raise ConfigError(self.path(name), f"must be an object, is {value!r}")
        return ConfigFields(value, f"{self.path(name)}.")

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One token id or a list of them; empty where absent."""
        value = self.value(name) if self.has(name) else []
        ids = value if isinstance(value, list) else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in ids):
            raise ConfigError(self.path(name), f"must be a token id or a list of them, is {value!r}")
        return tuple(ids)

    def must_be(self, name: str, expected: str) -> None:
        """The field has this one supported value."""
        if self.text(name) != expected:
            raise ConfigError(self.path(name), f"{self.value(name)!r} is not supported, only {expected!r}")
