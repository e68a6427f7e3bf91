"""Where in a JSON schema the library's complaint belongs: of a pattern or a reference it says what is wrong, not where.

Knows only schemas that were refused; must not decide whether one is.
"""

from collections.abc import Callable, Iterator
from typing import Any

from octavo.grammar.errors import GrammarRefused, Refusal
from octavo.grammar.json_literals import Json, pointed_to

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
_SINGLE = (
    "items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "propertyNames",
    "unevaluatedProperties",
)  # fmt: skip
_NO_TARGET = "Pointer "
"""How the library begins to say that a reference points to nothing."""


def placed(refusal: GrammarRefused, schema: Any, refusal_of: Callable[[str], GrammarRefused | None]) -> GrammarRefused:
    """The refusal with the path of the first pattern that is refused in the same words, or of the first reference that
    points to nothing; as it is where there is none. refusal_of: of a pattern alone."""
    for path, each in _schemas(schema, ""):
        start = f"{path}." if path else ""
        reference = each.get("$ref")
        if refusal.description.startswith(_NO_TARGET) and isinstance(reference, str) and reference.startswith("#/"):
            if not isinstance(pointed_to(schema, reference), dict | bool):
                return GrammarRefused(Refusal.SYNTAX, "points to no schema", path=f"{start}$ref")
            continue
        for key, pattern in _patterns(each):
            found = refusal_of(pattern)
            if found is not None and found.description == refusal.description:
                return GrammarRefused(found.refusal, found.description, path=f"{start}{key}")
    return refusal


def _patterns(schema: Json) -> Iterator[tuple[str, str]]:
    """Those of the schema itself, each with its place in it."""
    if isinstance(schema.get("pattern"), str):
        yield "pattern", schema["pattern"]
    if isinstance(names := schema.get("patternProperties"), dict):
        yield from ((f"patternProperties.{name}", name) for name in names)


def _schemas(schema: Any, path: str) -> Iterator[tuple[str, Json]]:
    """The schema and those inside it, with their paths."""
    if not isinstance(schema, dict):
        return
    yield path, schema
    start = f"{path}." if path else ""
    for key in _MAPS:
        if isinstance(named := schema.get(key), dict):
            for name, each in named.items():
                yield from _schemas(each, f"{start}{key}.{name}")
    for key in _LISTS:
        if isinstance(listed := schema.get(key), list):
            for index, each in enumerate(listed):
                yield from _schemas(each, f"{start}{key}[{index}]")
    for key in _SINGLE:
        yield from _schemas(schema.get(key), f"{start}{key}")
