"""Random JSON schemas like those that services send: nested objects, enums, bounded arrays, references, unions,
patterns, formats. Each seed gives one schema. Everything is bounded, so that most outputs of a random model end."""

import random
from collections.abc import Callable
from typing import Any

Json = dict[str, Any]
_NAMES = "id name title status tags price email address city country items total kind notes score created owner"
_WORDS = "new open closed red green blue small medium large admin user guest low high eu us asap never"
NAMES, WORDS = _NAMES.split(), _WORDS.split()
PATTERNS = (
    r"^[A-Z]{2}-[0-9]{3}$", r"^[a-z]+@[a-z]{1,5}\.(com|org)$", r"^#[0-9a-f]{6}$", r"^(foo|bar){1,2}$",
    r"^[^\"\\]{1,4}$", r"^\d{1,3}(\.\d{1,3}){3}$", r"^é?[äöü]{1,2}$", r"[0-9]x",
)  # fmt: skip
FORMATS = ("date", "time", "date-time", "email", "uuid", "ipv4", "ipv6", "hostname", "uri")
MAX_DEPTH = 4


class SchemaMaker:
    """schema(seed) is an object schema with definitions."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._num_definitions = 0
        self._definitions: Json = {}

    def schema(self) -> Json:
        """The whole schema."""
        body = self._object(0) if self._random.random() < 0.85 else self._any(1)
        if self._random.random() < 0.3:
            body["title"] = "Something"
        return body | ({"$defs": self._definitions} if self._definitions else {})

    def _any(self, depth: int) -> Json:
        scalar: list[Callable[[], Json]] = [
            self._string, self._integer, self._number, self._enum, self._constant, self._formatted, self._patterned,
        ]  # fmt: skip
        scalar += [lambda: {"type": "boolean"}, lambda: {"type": "null"}, lambda: {"type": ["integer", "null"]}]
        nested: list[Callable[[], Json]] = [
            lambda: self._object(depth), lambda: self._array(depth), lambda: self._tuple(depth),
            lambda: self._union(depth), lambda: self._reference(depth), lambda: self._all_of(depth),
        ]  # fmt: skip
        is_leaf = depth >= MAX_DEPTH or self._random.random() < 0.55
        return self._random.choice(scalar if is_leaf else nested)()

    def _object(self, depth: int) -> Json:
        names = self._random.sample(NAMES, self._random.randint(1, 5 if depth < 2 else 3))
        properties = {name: self._any(depth + 1) for name in names}
        required = [name for name in names if self._random.random() < 0.6]
        schema: Json = {"type": "object", "properties": properties, "additionalProperties": False}
        if required:
            schema["required"] = required
        if self._random.random() < 0.1:
            schema["properties"][names[0]] |= {"description": "an annotation", "default": None}
        if self._random.random() < 0.08:
            schema |= {"minProperties": 1, "required": names}
        return schema

    def _array(self, depth: int) -> Json:
        low = self._random.randint(0, 2)
        return {
            "type": "array",
            "items": self._any(depth + 1),
            "minItems": low,
            "maxItems": low + self._random.randint(0, 2),
        }

    def _tuple(self, depth: int) -> Json:
        return {"type": "array", "prefixItems": [self._any(depth + 1), self._integer()], "items": False, "minItems": 2}

    def _union(self, depth: int) -> Json:
        if self._random.random() < 0.3:
            return {"oneOf": [self._string(), self._integer()]}
        return {"anyOf": [self._any(depth + 1) for _ in range(self._random.randint(2, 3))]}

    def _reference(self, depth: int) -> Json:
        self._num_definitions += 1
        name = f"d{self._num_definitions}"
        self._definitions[name] = {}  # reserves its place in the order
        self._definitions[name] = self._any(depth + 1)
        return {"$ref": f"#/$defs/{name}"}

    def _all_of(self, depth: int) -> Json:
        first, second = self._random.sample(NAMES, 2)
        return {
            "allOf": [
                {"type": "object", "properties": {first: self._integer()}, "required": [first]},
                {"properties": {second: self._any(depth + 1)}, "required": [second]},
            ],
            "maxProperties": 2,
            "type": "object",
            "properties": {first: {}, second: {}},
            "required": [first, second],
            "additionalProperties": False,
        }

    def _string(self) -> Json:
        low = self._random.randint(0, 3)
        return {"type": "string", "minLength": low, "maxLength": low + self._random.randint(0, 6)}

    def _integer(self) -> Json:
        low = self._random.choice((-40, 0, 1, 18, 1000))
        schema: Json = {"type": "integer", "minimum": low, "maximum": low + self._random.choice((0, 3, 250))}
        if self._random.random() < 0.2:
            schema = {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 30}
        if self._random.random() < 0.15:
            schema = {"type": "integer", "multipleOf": self._random.choice((2, 5, 10)), "minimum": 0, "maximum": 100}
        return schema

    def _number(self) -> Json:
        low = self._random.choice((-2.5, 0, 0.25, 100))
        return {"type": "number", "minimum": low, "maximum": low + self._random.choice((0.5, 1, 77))}

    def _enum(self) -> Json:
        values: list[Any] = self._random.sample(WORDS, self._random.randint(1, 4))
        if self._random.random() < 0.2:
            values += [3, None, {"a": [1, "ü\n"]}]
        return {"enum": values}

    def _constant(self) -> Json:
        return {"const": self._random.choice(("v1", 7, True, None, ["x", 2], {"deep": {"er": 1.5}}))}

    def _formatted(self) -> Json:
        return {"type": "string", "format": self._random.choice(FORMATS)}

    def _patterned(self) -> Json:
        schema = {"type": "string", "pattern": self._random.choice(PATTERNS)}
        return schema if self._random.random() < 0.7 else schema | {"maxLength": 12}
