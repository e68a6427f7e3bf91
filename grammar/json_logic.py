"""Logic on JSON schemas: whether one value can be valid under several, and a schema's negation.

Expects schemas as `grammar.json_schema` rewrites them, so that each keyword is enforced. Answers err on the safe side:
a value may be said to be possible though it is not, and a negation is given only if it is exact.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import combinations, permutations, product
from typing import Any

from octavo.grammar.errors import GrammarRefused, Refusal
from octavo.grammar.json_literals import BOUNDS, TYPES, Json, bounds, is_number

Schema = Json | bool
Resolve = Callable[[str], Schema | None]

_MAX_DEPTH = 6
_MAX_WORK = 200_000  # about half a second
_MAX_WAYS = 64
_MAX_ARRANGEMENTS = 400  # of distinct items: enough for all arrangements of five values
ASSERTED = "x-asserted"  # marks a schema made for a keyword that evaluates no property; the library ignores it
_ANNOTATIONS = ("$schema", "$id", "id", "$anchor", "$defs", "definitions", ASSERTED)
_INCLUDING = ("allOf", "anyOf", "oneOf", "$ref")
_EXCLUDED = "x-excluded"  # values that a pattern made here excludes; the library ignores the keyword
_INFINITE = float("inf")


@dataclass
class _Facts:
    """Several schemas under which one value must be valid. bases: their own keywords; groups: the options of each
    `anyOf` or `oneOf`."""

    bases: list[Json] = field(default_factory=list)
    groups: list[list[Schema]] = field(default_factory=list)
    is_never: bool = False
    is_complete: bool = True  # no reference was left out

    def of(self, keyword: str) -> list[Any]:
        return [base[keyword] for base in self.bases if keyword in base]


class Logic:
    """resolve: the schema to which a reference points, None if that is not known; outline: a part of it."""

    def __init__(self, resolve: Resolve, outline: Callable[[str], Json] = lambda reference: {}) -> None:
        self._resolve = resolve
        self._outline = outline
        self._work = 0

    def can_meet(self, *schemas: Schema) -> bool:
        """False if no value can be valid under all of the schemas; True if one can, or that is not certain."""
        return not self._is_never(schemas, _MAX_DEPTH)

    def meeting(self, options: list[Schema], beside: Schema) -> set[tuple[int, int]]:
        """Pairs of options, lower index first, under both of which one value may be valid that is also valid under
        ``beside``."""
        values = [self._values(self._facts([option])) for option in options]
        having: dict[Any, list[int]] = {}
        for index, each in enumerate(values):
            for value in each or ():
                having.setdefault(_key(value), []).append(index)
        unclear = [index for index, each in enumerate(values) if each is None]
        self._pay(len(unclear) * len(options) + sum(len(indices) ** 2 for indices in having.values()))
        pairs = {pair for indices in having.values() for pair in combinations(indices, 2)}
        pairs |= {(min(pair), max(pair)) for pair in product(unclear, range(len(options))) if pair[0] != pair[1]}
        return {pair for pair in pairs if self.can_meet(beside, *(options[index] for index in pair))}

    def negation(self, schema: Schema) -> Schema | None:
        """A schema for all other values; None if it cannot be written."""
        return self._negation(schema, _MAX_DEPTH)

    def ways(self, groups: list[list[Schema]], beside: Schema) -> list[list[Schema]] | None:
        """Every choice of one option per group under which some value may be valid together with ``beside``; None if
        there are too many."""
        ways: list[list[Schema]] = [[]]
        for options in groups:
            longer = [[*way, option] for way in ways for option in options]
            ways = [way for way in longer if self.can_meet(beside, *way)]
            if len(ways) > _MAX_WAYS:
                return None
        return ways

    def evaluated(self, schema: Json) -> Json | None:
        """`properties` and `patternProperties` that are evaluated by a schema and those that it includes; None if that
        depends on the value, or is not known."""
        facts = self._facts([schema], without=ASSERTED)
        if facts.groups or not facts.is_complete:
            return None
        if any(others is not False for others in facts.of("additionalProperties")):
            return {"patternProperties": {"": True}}
        names = {name: True for properties in facts.of("properties") for name in properties}
        patterns = {pattern: True for properties in facts.of("patternProperties") for pattern in properties}
        return {"properties": names, "patternProperties": patterns}

    def distinct_items(self, schema: Json) -> Schema | None:
        """The schema that `uniqueItems` adds to an array schema; None if it cannot be written."""
        most, prefix, items = schema.get("maxItems"), schema.get("prefixItems", []), schema.get("items", True)
        if isinstance(items, list):  # as before 2020-12
            prefix, items = items, schema.get("additionalItems", True)
        most = min(_INFINITE if most is None else most, len(prefix) if items is False else _INFINITE)
        if most <= 1:
            return True
        places = [*prefix[: int(most)]] if most <= len(prefix) else None
        if places is not None and not any(self.can_meet(*pair) for pair in combinations(places, 2)):
            return True
        values = self._values(self._facts([items])) if not prefix else None
        if values is None:
            return None
        arrangements: list[list[Any]] = []
        for length in range(schema.get("minItems", 0), int(min(len(values), most)) + 1):
            for arrangement in permutations(values, length):
                arrangements.append([*arrangement])
                if len(arrangements) > _MAX_ARRANGEMENTS:
                    return None
        others = [name for name in TYPES if name != "array"]
        return {"anyOf": [{"enum": arrangements}, {"type": others}]}

    # ------------------------------------------------------------ several schemas together

    def _facts(self, schemas: Iterable[Schema], *, without: str = "") -> _Facts:
        facts, seen = _Facts(), set[str]()
        waiting = [*schemas]
        while waiting:
            schema = waiting.pop(0)
            self._spend(schema)
            if isinstance(schema, bool):
                facts.is_never |= not schema
                continue
            facts.bases.append({key: value for key, value in schema.items() if key not in _INCLUDING})
            facts.groups += [schema[keyword] for keyword in ("anyOf", "oneOf") if keyword in schema]
            waiting += (each for each in schema.get("allOf", ()) if isinstance(each, bool) or without not in each)
            reference = schema.get("$ref")
            if reference is not None and reference not in seen:
                seen.add(reference)
                target = self._resolve(reference)
                facts.is_complete &= target is not None
                waiting.append(self._outline(reference) if target is None else target)
        return facts

    def _spend(self, schema: Schema) -> None:
        self._pay(1 if isinstance(schema, bool) else 1 + len(schema) + len(schema.get("enum", ())) // 4)

    def _pay(self, work: int) -> None:
        """Count work; there is one limit for a whole schema. Raises GrammarRefused beyond it."""
        self._work += work
        if self._work > _MAX_WORK:
            raise GrammarRefused(
                Refusal.LIMIT, "is too complex: its oneOf, conditions or the like take too long to check"
            )

    def _types(self, facts: _Facts) -> set[str]:
        types = {*TYPES}
        for named in facts.of("type"):
            names = {named} if isinstance(named, str) else {*named}
            types &= {"number" if name == "integer" else name for name in names}
        for value in facts.of("const"):
            types &= {_type_of(value)}
        for values in facts.of("enum"):
            types &= {_type_of(value) for value in values}
        for options in facts.groups:
            types &= {name for option in options for name in self._shallow_types(option)}
        return types

    @staticmethod
    def _shallow_types(option: Schema) -> set[str]:
        if isinstance(option, bool):
            return {*TYPES} if option else set()
        return Logic(lambda reference: None)._types(_Facts(bases=[option]))

    def _values(self, facts: _Facts) -> list[Any] | None:
        """All values that can be valid, and possibly others; None if they cannot be listed."""
        lists = [*facts.of("enum"), *([value] for value in facts.of("const"))]
        types = self._types(facts)
        if not lists and types <= {"null", "boolean"}:
            lists = [[value for value in (None, False, True) if _type_of(value) in types]]
        if not lists:
            return None
        values = {_key(value): value for value in lists[0]}
        for others in lists[1:]:
            keys = {_key(value) for value in others}
            values = {key: value for key, value in values.items() if key in keys}
        return [value for value in values.values() if all(_may_be(value, base) for base in facts.bases)]

    def _is_never(self, schemas: Iterable[Schema], depth: int) -> bool:
        facts = self._facts(schemas)
        if facts.is_never or self._values(facts) == []:
            return True
        if depth == 0:
            return False
        groups, facts.groups = facts.groups, []
        for options in groups:
            if all(self._is_never([*facts.bases, option], depth - 1) for option in options):
                return True
        return all(self._has_none(name, facts, depth - 1) for name in self._types(facts))

    def _has_none(self, name: str, facts: _Facts, depth: int) -> bool:
        """Whether no value of this type can be valid."""
        match name:
            case "number":
                return _is_empty_range(facts)
            case "string":
                return _is_empty(facts, "minLength", "maxLength")
            case "array":
                return _is_empty(facts, "minItems", "maxItems")
            case "object":
                required = {key for keys in facts.of("required") for key in keys}
                return _is_empty(facts, "minProperties", "maxProperties") or any(
                    self._is_never([_property(base, key) for base in facts.bases], depth) for key in required
                )
        return False

    # ------------------------------------------------------------ opposites

    def _negation(self, schema: Schema, depth: int) -> Schema | None:
        if isinstance(schema, bool):
            return not schema
        if depth == 0:
            return None
        self._spend(schema)
        parts: list[Schema] = []
        for keyword, value in schema.items():
            if keyword in _ANNOTATIONS or keyword == _EXCLUDED:
                continue
            others = self._negations(keyword, value, depth - 1)
            if others is None:
                return None
            parts += [other for other in others if other is not False]
        return False if not parts else parts[0] if len(parts) == 1 else {"anyOf": parts}

    def _negations(self, keyword: str, value: Any, depth: int) -> list[Schema] | None:
        """Schemas such that a value is valid under at least one of them if it violates the keyword, and under none
        otherwise; None if they cannot be written."""
        match keyword:
            case "type":
                named = {value} if isinstance(value, str) else {*value}
                if "integer" in named and "number" not in named:
                    return None
                return [{"type": [name for name in TYPES if name not in named]}]
            case "const":
                return _others([value])
            case "enum":
                return _others(value)
            case "required":
                return [{"type": "object", "properties": {key: False}} for key in value]
            case "properties":
                inner = {key: self._negation(each, depth) for key, each in value.items()}
                found = [_having(key, other) for key, other in inner.items() if other is not None]
                return found if len(found) == len(inner) else None
            case "allOf":
                inners = [self._negation(each, depth) for each in value]
                return None if None in inners else [each for each in inners if each is not None]
            case "anyOf" | "oneOf":
                inners = [self._negation(each, depth) for each in value]
                return None if None in inners else [{"allOf": inners}]
            case "$ref":
                target = self._resolve(value)
                other = None if target is None else self._negation(target, depth)
                return None if other is None else [other]
            case "additionalProperties" | "items":
                return [] if value is True or value == {} else None
        return _beyond(keyword, value)


def _beyond(keyword: str, value: Any) -> list[Schema] | None:
    """Schemas for the values on the other side of a bound; None for other keywords, or if they cannot be written."""
    opposite = dict(zip(BOUNDS, reversed(BOUNDS), strict=True))
    if keyword in opposite:
        return _range({opposite[keyword]: value})
    for name, suffix in (("string", "Length"), ("array", "Items")):
        if keyword == f"min{suffix}":
            return [{"type": name, f"max{suffix}": value - 1}] if value else []
        if keyword == f"max{suffix}":
            return [{"type": name, f"min{suffix}": value + 1}]
    return None


def _range(ends: Json) -> list[Schema] | None:
    """A list of one schema, for the numbers between two ends; None if the library cannot hold these."""
    try:
        return [{"type": "number"} | bounds(ends, "", nearest=True)]
    except GrammarRefused:
        return None


def _having(key: str, schema: Schema) -> Schema:
    return False if schema is False else {"type": "object", "required": [key], "properties": {key: schema}}


def _others(values: list[Any]) -> list[Schema] | None:
    """Schemas for all values but these; None if they cannot be written."""
    types = {_type_of(value) for value in values}
    if types & {"array", "object"}:
        return None
    found: list[Schema] = [{"type": [name for name in TYPES if name not in types]}]
    if "boolean" in types:
        found.append({"enum": [value for value in (False, True) if not any(value is each for each in values)]})
    if "string" in types:
        pattern = f"^(?:{_other_texts([value for value in values if isinstance(value, str)])})$"
        found.append({"type": "string", "pattern": pattern, _EXCLUDED: values})
    numbers = sorted({value for value in values if is_number(value)})
    for low, high in zip([None, *numbers], [*numbers, None], strict=True) if numbers else ():
        ends = {"exclusiveMinimum": low, "exclusiveMaximum": high}
        between = _range({key: end for key, end in ends.items() if end is not None})
        if between is None:
            return None
        found += between
    return found


def _other_texts(texts: list[str]) -> str:
    """A regular expression for every text but these: each character either departs from all of them or follows some."""
    following: dict[str, list[str]] = {}
    for text in texts:
        if text:
            following.setdefault(text[0], []).append(text[1:])
    ways = [f"{escaped(first)}(?:{_other_texts(rests)})" for first, rests in following.items()]
    inside = "".join(map(escaped, following))
    ways.append(rf"[^\x00{inside}][\s\S]*" if inside else r"[\s\S]+")  # as in `json_literals.pattern`
    return "|".join(ways if "" in texts else [*ways, ""])


def escaped(text: str) -> str:
    """A text as a regular expression."""
    return "".join(each if each.isalnum() else f"\\x{{{ord(each):x}}}" for each in text)


# ---------------------------------------------------------------- values


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", list: "array", dict: "object", type(None): "null"}
    return names.get(type(value), "number")


def _key(value: Any) -> Any:
    """A hashable key, equal exactly for values that are equal in JSON."""
    if isinstance(value, list):
        return ("array", *map(_key, value))
    if isinstance(value, dict):
        return ("object", frozenset((name, _key(item)) for name, item in value.items()))
    return _type_of(value), value


def _may_be(value: Any, base: Json) -> bool:
    """False only if the keywords of a schema certainly exclude a value."""
    if "type" in base:
        named = [base["type"]] if isinstance(base["type"], str) else base["type"]
        is_whole = is_number(value) and value == int(value)
        if _type_of(value) not in named and not (is_whole and "integer" in named):
            return False
    if is_number(value):
        return not _is_empty_range(_Facts(bases=[base, {"minimum": value, "maximum": value}]))
    if isinstance(value, str):
        if value in base.get(_EXCLUDED, ()):
            return False
        return bool(base.get("minLength", 0) <= len(value) <= base.get("maxLength", _INFINITE))
    return True


def _property(base: Json, key: str) -> Schema:
    """The schema of one property; True if that is not clear."""
    properties = base.get("properties", {})
    if key in properties:
        return properties[key]  # type: ignore[no-any-return]
    return True if base.get("patternProperties") else base.get("additionalProperties", True)


def _is_empty(facts: _Facts, least: str, most: str) -> bool:
    return bool(max(facts.of(least), default=0) > min(facts.of(most), default=_INFINITE))


def _is_empty_range(facts: _Facts) -> bool:
    minimum, above, maximum, below = (facts.of(keyword) for keyword in BOUNDS)
    low, high = max([*minimum, *above], default=-_INFINITE), min([*maximum, *below], default=_INFINITE)
    return bool(low > high or (low == high and (low in above or high in below)))


def pattern_of(schema: Schema, resolve: Resolve) -> str | None:
    """A regular expression for the texts that are valid under a schema; None if it cannot be written as one."""
    if isinstance(schema, dict) and schema.keys() == {"$ref"}:
        target = resolve(schema["$ref"])
        return None if target is None else pattern_of(target, lambda reference: None)
    if isinstance(schema, bool):
        return "" if schema else r"[^\s\S]"
    known = {key: value for key, value in schema.items() if key not in (*_ANNOTATIONS, "type")}
    if schema.get("type", "string") != "string" or len(known.keys() - {"minLength", "maxLength"}) > 1:
        return None
    if known.keys() <= {"minLength", "maxLength"}:
        return rf"^[\s\S]{{{known.get('minLength', 0)},{known.get('maxLength', '')}}}$"
    match known:
        case {"pattern": str(pattern), **others} if not others:
            return pattern
        case {"enum": list(values), **others} if not others:
            return "^(?:" + "|".join(escaped(value) for value in values if isinstance(value, str)) + ")$"
        case {"const": str(value), **others} if not others:
            return f"^{escaped(value)}$"
    return None
