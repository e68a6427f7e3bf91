"""Checks a JSON schema and rewrites it into a form that llguidance enforces completely.

A validation keyword that cannot be enforced is refused, with its path in the schema. Annotations and unknown keywords
are ignored, as the specification says. Conditions, dependencies and the like become `anyOf` and `allOf` of keywords
that the library supports. Properties are generated in the order of the schema.
"""

import json
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from octavo.grammar.errors import GrammarRefused, Refusal
from octavo.grammar.json_literals import (
    BOUNDS,
    COUNTS,
    LIBRARY_FORMATS,
    OWN_FORMATS,
    Divisors,
    Json,
    bounds,
    check_encoding,
    check_literal,
    check_type,
    count,
    encode,
    has_depth,
    has_fractions,
    mentions,
    names_of,
    pattern,
    pointed_to,
    property_counts,
)
from octavo.grammar.json_logic import ASSERTED, Logic, Schema, pattern_of
from octavo.grammar.limits import GrammarLimits

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalItems", "additionalProperties")
_ENFORCED_WORDS = "type enum const $ref required pattern format multipleOf $schema $id id $anchor"
_ENFORCED = frozenset((*_MAPS, *_LISTS, *_SINGLE, *BOUNDS, *COUNTS, *_ENFORCED_WORDS.split()))
_REFUSED_WORDS = (
    "contains minContains maxContains unevaluatedItems x-guidance $dynamicRef $dynamicAnchor $recursiveRef "
    "$recursiveAnchor $vocabulary extends disallow"
)
_REFUSED = frozenset(_REFUSED_WORDS.split())
# The targets of other references are moved to the definitions, since their own place may be dropped.
_PLAIN_REFERENCE = re.compile(r"#|#/(?:\$defs|definitions)/[\w-]+")
_MOVED = "moved:"
_MAX_NESTING = 120  # the limit of the library's parser, less what is put around a schema
# A space, or a new line with its indentation: as people and models write JSON, and never endless white space. No \u
# escapes, which could hide the name of a key.
WHITE_SPACE = {"whitespace_pattern": r"( |\n[ \t]{0,32})?", "json_allowed_escapes": 'nrtbf\\"'}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of a schema. root: in the schema for the library, for references. path: in what the caller sent."""

    root: str = "#"
    path: str = ""


def schema_text(text: str, limits: GrammarLimits, *, format_as_annotation: bool = False) -> str:
    """A checked schema for the whole output, as JSON text for the library. Raises GrammarRefused."""
    num_bytes = len(text.encode())
    if num_bytes > limits.max_source_bytes:
        raise GrammarRefused(Refusal.LIMIT, f"has {num_bytes} bytes, at most {limits.max_source_bytes} are allowed")
    schema = rewrite(read_json(text, limits), limits, Place(), format_as_annotation=format_as_annotation)
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    return encode(schema | {"x-guidance": WHITE_SPACE})


def read_json(text: str, limits: GrammarLimits) -> Any:
    """The value of a JSON text, with Decimal for numbers with a fraction or exponent. Raises GrammarRefused."""
    try:
        value = json.loads(text, parse_float=Decimal, parse_constant=_refuse_constant)
    except RecursionError:
        raise GrammarRefused(Refusal.LIMIT, f"is nested deeper than {limits.max_depth}") from None
    except (ValueError, ArithmeticError) as error:  # of a number, Python says how to allow it
        why = error if "JSON" in f"{type(error).__name__} {error}" else "a number in it is too long or too large"
        raise GrammarRefused(Refusal.SYNTAX, f"is not valid JSON: {why}") from None
    if has_depth(value, _MAX_NESTING):
        raise GrammarRefused(Refusal.LIMIT, f"has values nested deeper than {_MAX_NESTING}")
    if "\\u" in text:
        check_encoding(value, "")
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def rewrite(schema: Any, limits: GrammarLimits, place: Place, *, format_as_annotation: bool = False) -> Schema:
    """A checked copy. format_as_annotation: unknown formats are ignored, not refused. Raises GrammarRefused."""
    return _Walk(schema, limits, place, format_as_annotation=format_as_annotation).rewritten()


class _Walk:
    """One pass over a schema."""

    def __init__(self, whole: Any, limits: GrammarLimits, place: Place, *, format_as_annotation: bool) -> None:
        self._whole = whole
        self._limits = limits
        self._place = place
        self._are_formats_annotations = format_as_annotation
        self._nearest = has_fractions(whole) or mentions(whole, ("not", "if", "oneOf"))  # negations may have some
        self._divisors = Divisors(whole)
        self._logic = Logic(self._target, self._outline)
        self._pointers: dict[str, str] = {}  # the caller's references, by rewritten reference
        self._targets: dict[str, Schema | None] = {}  # by rewritten reference
        self._outlines: dict[str, Json] = {}  # by rewritten reference

    def rewritten(self) -> Schema:
        """A checked copy of the whole schema; moved targets of references are added to its definitions."""
        schema = self.schema(self._whole, self._place.path, 1)
        moved: Json = {}
        start = f"{self._place.root}/$defs/{_MOVED}"
        while isinstance(schema, dict):
            waiting = [each for each in self._pointers if each.startswith(start) and each not in moved]
            if not waiting:
                break
            for reference in waiting:
                moved[reference] = self._target(reference)
        if not isinstance(schema, dict) or not moved:
            return schema
        definitions = {reference.removeprefix(start[: -len(_MOVED)]): each for reference, each in moved.items()}
        return schema | {"$defs": schema.get("$defs", {}) | definitions}

    def schema(self, schema: Any, path: str, depth: int) -> Schema:
        """A checked copy of a part of the schema."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise GrammarRefused(Refusal.SYNTAX, "must be a schema: an object, true or false", path=path)
        if depth > self._limits.max_depth:
            raise GrammarRefused(Refusal.LIMIT, f"is nested deeper than {self._limits.max_depth}", path=path)
        for key in schema:
            if key in _REFUSED:
                raise GrammarRefused(Refusal.UNSUPPORTED, "is not supported", path=_join(path, key))
        if schema is not self._whole and _is_base(schema.get("$id")) and mentions(schema, ("$ref",)):
            description = "is supported within a schema only where no references are inside"
            raise GrammarRefused(Refusal.UNSUPPORTED, description, path=_join(path, "$id"))
        copy = {key: self._value(key, schema[key], _join(path, key), depth) for key in schema if key in _ENFORCED}
        if not isinstance(copy.get("items"), list):  # it has no meaning, but the library would ignore prefixItems
            copy.pop("additionalItems", None)
        copy = self._with_bounds(property_counts(copy, path), path)
        copy = self._with_format(self._without_base(copy), path)
        if "$ref" in copy and pointed_to(self._whole, self._pointers.get(copy["$ref"], "")) is False:
            return False  # the library would refuse the whole schema
        return self._with_conditions(self._with_exclusive_options(copy, path), schema, path, depth)

    def _value(self, key: str, value: Any, path: str, depth: int) -> Any:
        if key in _MAPS:
            if not isinstance(value, dict):
                raise GrammarRefused(Refusal.SYNTAX, "must be an object of schemas", path=path)
            named = {name: self.schema(each, _join(path, name), depth + 1) for name, each in value.items()}
            if key == "patternProperties":
                return {pattern(name, _join(path, name)): each for name, each in named.items()}
            return named
        if key in _LISTS or (key == "items" and isinstance(value, list)):
            if not isinstance(value, list):
                raise GrammarRefused(Refusal.SYNTAX, "must be a list of schemas", path=path)
            return [self.schema(each, f"{path}[{index}]", depth + 1) for index, each in enumerate(value)]
        if key in _SINGLE:
            return self.schema(value, path, depth + 1)
        return self._word(key, value, path)

    def _word(self, key: str, value: Any, path: str) -> Any:
        """The checked value of a keyword that contains no schemas."""
        match key:
            case "$ref":
                return self._reference(value, path)
            case "const":
                check_literal(value, path)
            case "enum" if isinstance(value, list):
                check_literal(value, path)
            case "required" if isinstance(value, list) and all(isinstance(name, str) for name in value):
                pass
            case "enum" | "required":
                raise GrammarRefused(Refusal.SYNTAX, f"must be a list{' of names' * (key == 'required')}", path=path)
            case "pattern":
                return pattern(value, path)
            case "type":
                check_type(value, path)
            case "multipleOf":
                return self._divisors.add(value, path)
            case _ if key in COUNTS:
                return count(value, path)
        return value

    def _reference(self, value: Any, path: str) -> str:
        if not isinstance(value, str) or not value.startswith("#"):
            raise GrammarRefused(Refusal.UNSUPPORTED, "must point into the schema itself (#…)", path=path)
        if value != "#" and not value.startswith("#/"):
            return value  # an anchor's name
        reference = self._place.root + value[1:]
        if not _PLAIN_REFERENCE.fullmatch(value) and pointed_to(self._whole, value) is not None:
            known = [each for each, pointer in self._pointers.items() if pointer == value]
            reference = known[0] if known else f"{self._place.root}/$defs/{_MOVED}{len(self._pointers)}"
        self._pointers[reference] = value
        return reference

    def _target(self, reference: str) -> Schema | None:
        """The rewritten target of a rewritten reference; None if that is not known, or not yet."""
        if reference not in self._targets:
            self._targets[reference] = None
            pointer = self._pointers.get(reference)
            schema = None if pointer is None else pointed_to(self._whole, pointer)
            if pointer is not None and isinstance(schema, dict | bool):
                self._targets[reference] = self.schema(schema, self._path_of(pointer), 1)
        return self._targets[reference]

    def _path_of(self, pointer: str) -> str:
        return ".".join([*([self._place.path] if self._place.path else []), *names_of(pointer)])

    def _outline(self, reference: str) -> Json:
        """The part of a target that is known before it is rewritten, for schemas that include themselves."""
        if reference not in self._outlines:
            pointer = self._pointers.get(reference, "")
            self._outlines[reference] = self._outlined(pointed_to(self._whole, pointer), self._path_of(pointer), 2)
        return self._outlines[reference]

    def _outlined(self, schema: Any, path: str, depth: int) -> Json:
        if not isinstance(schema, dict) or depth == 0:
            return {}
        words = [key for key in ("type", "const", "enum", "required") if key in schema]
        outline = {key: self._word(key, schema[key], _join(path, key)) for key in words}
        if isinstance(properties := schema.get("properties"), dict):
            path = _join(path, "properties")
            inner = {name: self._outlined(each, _join(path, name), depth - 1) for name, each in properties.items()}
            outline["properties"] = inner
        return outline

    def _without_base(self, schema: Json) -> Json:
        """The schema without names that would change what references mean once it is inside another."""
        inner = () if self._place.root == "#" else ("$schema",)
        return {key: value for key, value in schema.items() if key not in ("$id", "id", *inner)}

    def _with_bounds(self, schema: Json, path: str) -> Json:
        if not any(key in schema for key in BOUNDS):
            return schema
        held = bounds(schema, f"{path}." if path else "", nearest=self._nearest)
        return {key: value for key, value in schema.items() if key not in BOUNDS} | held

    def _with_format(self, schema: Json, path: str) -> Json:
        """The schema with its format as a pattern, if it is one of OWN_FORMATS."""
        name = schema.get("format")
        if "format" not in schema or (isinstance(name, str) and name in LIBRARY_FORMATS):
            return schema
        others = {key: value for key, value in schema.items() if key != "format"}
        if not isinstance(name, str) or name not in OWN_FORMATS:
            if self._are_formats_annotations and isinstance(name, str):
                return others
            raise GrammarRefused(
                Refusal.UNSUPPORTED, f"{str(name)[:64]!r} is not supported", path=_join(path, "format")
            )
        if "pattern" not in others:
            return others | {"pattern": OWN_FORMATS[name]}
        return others | {"allOf": [*others.get("allOf", ()), {"pattern": OWN_FORMATS[name]}]}

    # ------------------------------------------------------------ keywords that the library does not support

    def _with_exclusive_options(self, schema: Json, path: str) -> Json:
        """`oneOf` as `anyOf` of options that exclude each other; those that do not are made to."""
        options = schema.get("oneOf")
        if options is None:
            return schema
        beside = {key: value for key, value in schema.items() if key != "oneOf"}
        conditions: list[list[Schema]] = [[option] for option in options]
        for pair in sorted(self._logic.meeting(options, beside)):
            for index, other in (pair, pair[::-1]):
                without = self._logic.negation(options[other])
                if without is None:
                    description = f"is supported where options exclude each other; [{pair[0]}] and [{pair[1]}] may not"
                    raise GrammarRefused(Refusal.UNSUPPORTED, description, path=_join(path, "oneOf"))
                conditions[index].append(without)
        alone = [each[0] if len(each) == 1 else {"allOf": each} for each in conditions]
        name = "anyOf" if "anyOf" not in beside else "allOf"
        added = alone if name == "anyOf" else [*beside.get("allOf", ()), {"anyOf": alone}]
        return {("anyOf" if key == "oneOf" and name == "anyOf" else key): value for key, value in schema.items()
                if key != "oneOf" or name == "anyOf"} | {name: added}  # fmt: skip

    def _with_conditions(self, copy: Json, schema: Json, path: str, depth: int) -> Json:
        """copy: the rewritten schema so far."""
        added: list[Schema] = []
        if "if" in schema:
            added.append(self._condition(schema, path, depth))
        if "not" in schema:
            added.append(self._negated(schema["not"], _join(path, "not"), depth))
        for key in ("dependentRequired", "dependentSchemas", "dependencies"):
            if key in schema:
                added += self._dependencies(schema[key], _join(path, key), depth)
        if "propertyNames" in schema:
            added.append(self._names(schema, _join(path, "propertyNames"), depth))
        if schema.get("uniqueItems", False) is not False:
            added.append(self._distinct(copy, schema["uniqueItems"], _join(path, "uniqueItems")))
        added = [each for each in added if each is not True]
        if added:
            copy = copy | {"allOf": [*copy.get("allOf", ()), *added]}
        copy = self._with_fewer_ways(copy)
        if schema.get("unevaluatedProperties", True) is True:
            return copy
        return self._with_closed_names(copy, schema["unevaluatedProperties"], path, depth)

    def _with_fewer_ways(self, schema: Json) -> Json:
        """The schema with several alternatives replaced by those combinations that can be valid: the library would
        follow all."""
        included = schema.get("allOf", [])
        groups = [options for each in included if (options := _alternatives(each)) is not None]
        beside = {key: value for key, value in schema.items() if key != "allOf"}
        ways = self._logic.ways(groups, beside) if len(groups) > 1 else None
        if ways is None:
            return schema
        others = [each for each in included if _alternatives(each) is None]
        return schema | {"allOf": [*others, {"anyOf": [{"allOf": way} for way in ways]} if ways else False]}

    def _condition(self, schema: Json, path: str, depth: int) -> Schema:
        condition = self.schema(schema["if"], _join(path, "if"), depth + 1)
        then, otherwise = (
            self.schema(schema[key], _join(path, key), depth + 1) if key in schema else True for key in ("then", "else")
        )
        if then is True:
            return True if otherwise is True else {"anyOf": [condition, otherwise]}
        fails = self._logic.negation(condition)
        if fails is None:
            description = "is supported where the opposite can be written; not with this condition"
            raise GrammarRefused(Refusal.UNSUPPORTED, description, path=_join(path, "if"))
        holds = {"allOf": [condition, then]}
        return {"anyOf": [holds, fails if otherwise is True else {"allOf": [fails, otherwise]}]}

    def _negated(self, value: Any, path: str, depth: int) -> Schema:
        other = self._logic.negation(self.schema(value, path, depth + 1))
        if other is None:
            raise GrammarRefused(Refusal.UNSUPPORTED, "is not supported with this schema", path=path)
        return other if isinstance(other, bool) else other | {ASSERTED: True}

    def _dependencies(self, value: Any, path: str, depth: int) -> list[Schema]:
        if not isinstance(value, dict):
            raise GrammarRefused(Refusal.SYNTAX, "must be an object", path=path)
        return [self._dependency(name, each, _join(path, name), depth) for name, each in value.items()]

    def _dependency(self, name: str, value: Any, path: str, depth: int) -> Schema:
        """A dependency of one property: either without the property, or with what it needs."""
        without = {"properties": {name: False}}
        if isinstance(value, list) and all(isinstance(each, str) for each in value):
            return {"anyOf": [without, {"required": [name, *value]}]} if value else True
        needed = self.schema(value, path, depth + 1)
        return True if needed is True else {"anyOf": [without, {"required": [name], "allOf": [needed]}]}

    def _names(self, schema: Json, path: str, depth: int) -> Schema:
        names = self.schema(schema["propertyNames"], path, depth + 1)
        pattern = pattern_of(names, self._target)
        if pattern is None or (schema.get("patternProperties") and names is not False):
            description = "is supported as one pattern, a length or a list of names, without patternProperties"
            raise GrammarRefused(Refusal.UNSUPPORTED, description, path=path)
        if names is True:
            return True
        named = {} if names is False else {"patternProperties": {pattern: True}}
        return named | {"additionalProperties": False, ASSERTED: True}

    def _distinct(self, copy: Json, value: Any, path: str) -> Schema:
        if value is not True:
            raise GrammarRefused(Refusal.SYNTAX, "must be true or false", path=path)
        distinct = self._logic.distinct_items(copy)
        if distinct is None:
            description = "is supported for at most one item, for up to five given values, and for places that differ"
            raise GrammarRefused(Refusal.UNSUPPORTED, description, path=path)
        return distinct

    def _with_closed_names(self, copy: Json, value: Any, path: str, depth: int) -> Json:
        place = _join(path, "unevaluatedProperties")
        others = self.schema(value, place, depth + 1)
        evaluated = self._logic.evaluated(copy)
        if evaluated is None:
            raise GrammarRefused(
                Refusal.UNSUPPORTED, "is not supported beside anyOf, oneOf, conditions and dependencies", path=place
            )
        return copy | {"allOf": [*copy.get("allOf", ()), evaluated | {"additionalProperties": others}]}


def _alternatives(schema: Schema) -> list[Schema] | None:
    """The options of a schema that is only an `anyOf`, with nested ones flattened; None for any other."""
    while isinstance(schema, dict) and schema.keys() - {ASSERTED} == {"allOf"} and len(schema["allOf"]) == 1:
        schema = schema["allOf"][0]
    if not isinstance(schema, dict) or schema.keys() - {ASSERTED} != {"anyOf"}:
        return None
    return [each for option in schema["anyOf"] for each in (_alternatives(option) or [option])]


def _is_base(name: Any) -> bool:
    """Whether this id is a new base for the references inside; an anchor, as before 2019-09, is not."""
    return name is not None and not str(name).startswith("#")


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
