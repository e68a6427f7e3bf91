"""Checks a JSON schema and brings it into the form that llguidance enforces completely.

Whatever validates something and is not enforced is refused by its name and its path in the schema; annotations and
unknown keywords mean nothing, as the specification has it. Properties come in the order of the schema.
"""

import json
from typing import Any

from grammar.errors import GrammarRefused, Refusal
from grammar.formats import LIBRARY_FORMATS, OWN_FORMATS
from grammar.limits import GrammarLimits

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalItems", "additionalProperties")
_ENFORCED_WORDS = (
    "type enum const $ref required minItems maxItems minLength maxLength pattern format minimum maximum multipleOf "
    "exclusiveMinimum exclusiveMaximum minProperties maxProperties $schema $id id $anchor"
)
_ENFORCED = frozenset((*_MAPS, *_LISTS, *_SINGLE, *_ENFORCED_WORDS.split()))
_REFUSED_WORDS = (
    "not if then else contains minContains maxContains uniqueItems dependentRequired dependentSchemas dependencies "
    "propertyNames unevaluatedProperties unevaluatedItems x-guidance $dynamicRef $dynamicAnchor $recursiveRef "
    "$recursiveAnchor $vocabulary extends disallow"
)
_REFUSED = frozenset(_REFUSED_WORDS.split())
# A space, or a new line with its indentation: as people and models write JSON, and never white space without end. No
# key is written with \u, which could hide its name.
WHITE_SPACE = {"whitespace_pattern": r"( |\n[ \t]{0,32})?", "json_allowed_escapes": 'nrtbf\\"'}

Json = dict[str, Any]


def parse_schema(text: str, limits: GrammarLimits) -> Json:
    """The schema as a checked object, for the whole output. Raises GrammarRefused."""
    schema = _read(text, limits)
    rewritten = rewrite(schema, limits)
    if not isinstance(rewritten, dict):
        rewritten = {} if rewritten else {"enum": []}
    return rewritten | {"x-guidance": WHITE_SPACE}


def rewrite(schema: Any, limits: GrammarLimits, *, root: str = "#", path: str = "") -> Any:
    """A checked copy. root: where the schema's own root will stand: its references are led there. Raises
    GrammarRefused."""
    return _Walk(limits, root).schema(schema, path, 1)


def _read(text: str, limits: GrammarLimits) -> Any:
    num_bytes = len(text.encode())
    if num_bytes > limits.max_source_bytes:
        raise GrammarRefused(Refusal.LIMIT, f"has {num_bytes} bytes, at most {limits.max_source_bytes} are allowed")
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise GrammarRefused(Refusal.LIMIT, f"is nested deeper than {limits.max_depth}") from None
    except ValueError as error:
        raise GrammarRefused(Refusal.SYNTAX, f"is not valid JSON: {error}") from None


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


class _Walk:
    """One pass over a schema."""

    def __init__(self, limits: GrammarLimits, root: str) -> None:
        self._max_depth = limits.max_depth
        self._root = root

    def schema(self, schema: Any, path: str, depth: int) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise GrammarRefused(Refusal.SYNTAX, "must be a schema: an object, true or false", path=path)
        if depth > self._max_depth:
            raise GrammarRefused(Refusal.LIMIT, f"is nested deeper than {self._max_depth}", path=path)
        self._check_keywords(schema, path)
        copy = {key: self._value(key, schema[key], _join(path, key), depth) for key in schema if key in _ENFORCED}
        return _with_format(self._without_base(copy), path)

    def _check_keywords(self, schema: Json, path: str) -> None:
        for key in schema:
            if key in _REFUSED and not (key == "uniqueItems" and schema[key] is False):
                raise GrammarRefused(Refusal.UNSUPPORTED, "is not supported", path=_join(path, key))
        _check_min_properties(schema, path)

    def _value(self, key: str, value: Any, path: str, depth: int) -> Any:
        if key in _MAPS:
            if not isinstance(value, dict):
                raise GrammarRefused(Refusal.SYNTAX, "must be an object of schemas", path=path)
            return {name: self.schema(each, _join(path, name), depth + 1) for name, each in value.items()}
        if key in _LISTS or (key == "items" and isinstance(value, list)):
            if not isinstance(value, list):
                raise GrammarRefused(Refusal.SYNTAX, "must be a list of schemas", path=path)
            return [self.schema(each, f"{path}[{index}]", depth + 1) for index, each in enumerate(value)]
        if key in _SINGLE:
            return self.schema(value, path, depth + 1)
        return self._reference(value, path) if key == "$ref" else value

    def _reference(self, value: Any, path: str) -> str:
        if not isinstance(value, str) or not value.startswith("#"):
            raise GrammarRefused(Refusal.UNSUPPORTED, "must point into the schema itself (#…)", path=path)
        if self._root == "#" or not (value == "#" or value.startswith("#/")):
            return value
        return self._root + value[1:]

    def _without_base(self, schema: Json) -> Json:
        """Names that would make references mean something else once the schema stands inside another."""
        inner = () if self._root == "#" else ("$schema",)
        return {key: value for key, value in schema.items() if key not in ("$id", "id", *inner)}


def _check_min_properties(schema: Json, path: str) -> None:
    """Keys that the schema does not name could be the same one twice, which counts as one."""
    least, required = schema.get("minProperties"), schema.get("required")
    if least is None or not isinstance(least, int) or least <= (len(required) if isinstance(required, list) else 0):
        return
    if schema.get("additionalProperties") is not False or schema.get("patternProperties"):
        raise GrammarRefused(
            Refusal.UNSUPPORTED,
            "is supported only with additionalProperties false and without patternProperties",
            path=_join(path, "minProperties"),
        )


def _with_format(schema: Json, path: str) -> Json:
    """The format as a pattern, where its expression is ours."""
    name = schema.get("format")
    if name is None or name in LIBRARY_FORMATS:
        return schema
    if name not in OWN_FORMATS:
        raise GrammarRefused(Refusal.UNSUPPORTED, f"{str(name)[:64]!r} is not supported", path=_join(path, "format"))
    others = {key: value for key, value in schema.items() if key != "format"}
    if "pattern" not in others:
        return others | {"pattern": OWN_FORMATS[name]}
    return others | {"allOf": [*others.get("allOf", ()), {"pattern": OWN_FORMATS[name]}]}


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
