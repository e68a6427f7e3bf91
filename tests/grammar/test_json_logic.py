"""Keywords that llguidance does not have: what is taken is exactly what `jsonschema` finds valid, over every value that
can be made of a few parts."""

import json
import random
from functools import cache
from itertools import product
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from octavo.grammar.check import check_grammar
from octavo.grammar.errors import GrammarRefused, Refusal
from octavo.grammar.limits import GrammarLimits
from octavo.grammar.source import to_llguidance
from octavo.wire.messages import Grammar, GrammarKind
from octavo.worker.grammar.vocabulary import Vocabulary
from tests.support.grammar.models import oracle_speaker

LIMITS = GrammarLimits()
ABSENT = object()


@cache
def vocabulary() -> Vocabulary:
    return oracle_speaker(259).vocabulary()


def taken(schema: Any, texts: list[str]) -> list[str]:
    """Those of the texts that may come out."""
    grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, source=json.dumps(schema))
    check_grammar(grammar, LIMITS)
    start = LLMatcher(vocabulary().tokenizer, to_llguidance(grammar, LIMITS), limits=LIMITS.for_parser())
    found = []
    for text in texts:
        matcher, ids = start.deep_copy(), vocabulary().tokenizer.tokenize_bytes(text.encode())
        if matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting():
            found.append(text)
    return found


def objects(**members: list[Any]) -> list[str]:
    """JSON of every object of these members, in this order, each with one of its values or absent."""
    rows = product(*([ABSENT, *values] for values in members.values()))
    named = ({key: value for key, value in zip(members, row, strict=True) if value is not ABSENT} for row in rows)
    return [json.dumps(each, ensure_ascii=False) for each in named]


def values(*values: Any) -> list[str]:
    """Their JSON."""
    return [json.dumps(value) for value in values]


def arrays(*items: Any, up_to: int) -> list[str]:
    """JSON of every array of these items."""
    return [json.dumps(row) for length in range(up_to + 1) for row in product(items, repeat=length)]


OBJECT = {"type": "object", "additionalProperties": False}
ABC = OBJECT | {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "boolean"}}}
SOME_ABC = objects(a=[1, 7], b=["", "x"], c=[True])
SCALARS = values(None, True, False, 0, 1, 2, 5, -1, 1.5, "", "a", "ab", "abc", "b", [], [1], {}, {"a": 1})
ADDRESS = OBJECT | {
    "properties": {"country": {"enum": ["US", "NL", "CA"]}, "zip": {"type": "string"}},
    "required": ["country"],
}
IN_US = {"properties": {"country": {"const": "US"}}, "required": ["country"]}

CASES: dict[str, tuple[Any, list[str]]] = {
    # exactly one
    "one of two required": (ABC | {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, SOME_ABC),
    "one of three required": (ABC | {"oneOf": [{"required": [key]} for key in "abc"]}, SOME_ABC),
    "one of overlapping pairs": (ABC | {"oneOf": [{"required": ["a", "b"]}, {"required": ["b", "c"]}]}, SOME_ABC),
    "one of two lengths": ({"type": "string", "oneOf": [{"maxLength": 1}, {"minLength": 3}]}, SCALARS),
    "one of two lengths that overlap": ({"type": "string", "oneOf": [{"maxLength": 2}, {"minLength": 2}]}, SCALARS),
    "one of two ranges that overlap": ({"type": "integer", "oneOf": [{"minimum": 1}, {"maximum": 2}]}, SCALARS),
    "one of numbers": ({"oneOf": [{"const": 1}, {"const": 2}, {"enum": [5, "a"]}]}, SCALARS),
    "one of values that overlap": ({"oneOf": [{"enum": ["a", "b", 1]}, {"enum": ["b", "ab", 1, 2]}]}, SCALARS),
    "one of types": ({"oneOf": [{"type": "null"}, {"type": ["string", "boolean"]}, {"type": "array"}]}, SCALARS),
    "one of tagged objects by reference": (
        {
            "oneOf": [{"$ref": "#/$defs/circle"}, {"$ref": "#/$defs/box"}],
            "$defs": {
                "circle": OBJECT
                | {"properties": {"kind": {"const": "circle"}, "r": {"type": "integer"}}, "required": ["kind", "r"]},
                "box": OBJECT | {"properties": {"kind": {"const": "box"}, "r": {"type": "null"}}, "required": ["kind"]},
            },
        },
        objects(kind=["circle", "box", "x"], r=[1, None]),
    ),
    "one of a text and an object, beside anyOf": (
        {"oneOf": [{"type": "string"}, {"type": "number"}], "anyOf": [{"maxLength": 1}, {"minimum": 2}]},
        SCALARS,
    ),
    # conditions
    "if then else": (
        ADDRESS
        | {
            "if": IN_US,
            "then": {"required": ["zip"], "properties": {"zip": {"minLength": 5}}},
            "else": {"properties": {"zip": {"maxLength": 4}}},
        },
        objects(country=["US", "NL"], zip=["1", "1234", "12345", "123456"]),
    ),
    "if then": (ADDRESS | {"if": IN_US, "then": {"required": ["zip"]}}, objects(country=["US", "NL"], zip=["1"])),
    "if else": (ADDRESS | {"if": IN_US, "else": {"required": ["zip"]}}, objects(country=["US", "CA"], zip=["1"])),
    "if without effect": (ADDRESS | {"if": IN_US}, objects(country=["US", "NL"], zip=["1"])),
    "if over an open text": (
        OBJECT
        | {
            "properties": {"k": {"type": "string"}, "v": {"type": "integer"}},
            "if": {"properties": {"k": {"enum": ["ab", "abc", ""]}}, "required": ["k"]},
            "then": {"required": ["v"]},
        },
        objects(k=["", "a", "ab", "abc", "abcd", "b", "é"], v=[1]),
    ),
    "if over a number": (
        OBJECT
        | {
            "properties": {"n": {"type": "number"}, "v": {"type": "null"}},
            "if": {"properties": {"n": {"enum": [1, 2.5]}}, "required": ["n"]},
            "then": {"required": ["v"]},
        },
        objects(n=[0, 1, 1.5, 2.5, 3, -1], v=[None]),
    ),
    "if over a property that may be absent": (
        OBJECT
        | {
            "properties": {"on": {"type": "boolean"}, "v": {"type": "integer"}},
            "if": {"properties": {"on": {"const": True}}},
            "then": {"required": ["v"]},
        },
        objects(on=[True, False], v=[1]),
    ),
    "conditions one after another": (
        ADDRESS
        | {
            "allOf": [
                {"if": IN_US, "then": {"properties": {"zip": {"minLength": 2}}}},
                {"if": {"properties": {"country": {"const": "NL"}}}, "then": {"required": ["zip"]}},
            ]
        },
        objects(country=["US", "NL", "CA"], zip=["1", "22"]),
    ),
    "if by reference": (
        ADDRESS | {"if": {"$ref": "#/$defs/us"}, "then": {"required": ["zip"]}, "$defs": {"us": IN_US}},
        objects(country=["US", "NL"], zip=["1"]),
    ),
    "if over types": (
        {"if": {"type": "string"}, "then": {"maxLength": 1}, "else": {"type": ["null", "boolean"]}},
        SCALARS,
    ),
    # negations
    "not required": (ABC | {"not": {"required": ["a"]}}, SOME_ABC),
    "not both": (ABC | {"not": {"required": ["a", "b"]}}, SOME_ABC),
    "not any": (ABC | {"not": {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}}, SOME_ABC),
    "not a type": ({"not": {"type": ["array", "object", "number"]}}, SCALARS),
    "not a value": ({"type": ["string", "boolean", "null"], "not": {"enum": ["a", True, None]}}, SCALARS),
    "not a range": ({"type": "integer", "not": {"minimum": 1, "maximum": 2}}, SCALARS),
    "not a length": ({"not": {"type": "string", "minLength": 2}}, SCALARS),
    "not nothing": ({"type": "string", "not": False}, SCALARS),
    "not a range, beside a bound": (
        {"type": "number", "exclusiveMinimum": 1, "not": {"minimum": 2}},
        values(0, 1, 1.0, 1.5, 2, 3),
    ),
    "a reference to nothing": (
        OBJECT | {"properties": {"a": {"$ref": "#/$defs/no"}, "b": {}}, "$defs": {"no": False}},
        objects(a=[1], b=[1]),
    ),
    # dependencies
    "dependent required": (ABC | {"dependentRequired": {"a": ["b", "c"], "c": ["b"]}}, SOME_ABC),
    "dependent schemas": (
        ABC | {"dependentSchemas": {"a": {"properties": {"b": {"minLength": 1}}}, "c": False}},
        SOME_ABC,
    ),
    "dependencies": (ABC | {"dependencies": {"a": ["b"], "b": {"required": ["c"]}, "c": []}}, SOME_ABC),
    # names
    "names by pattern": (
        {"type": "object", "propertyNames": {"pattern": "^[a-b]+$"}, "additionalProperties": {"type": "integer"}},
        objects(a=[1, "x"], ab=[1], c=[1]),
    ),
    "names by length": (
        {"type": "object", "propertyNames": {"minLength": 2, "maxLength": 3}},
        objects(a=[1], ab=[1], abcd=[1]),
    ),
    "names by list": (
        {"type": "object", "propertyNames": {"enum": ["a", "b.c"]}},
        objects(a=[1], **{"b.c": [1], "bxc": [1]}),
    ),
    "names of named properties": (ABC | {"propertyNames": {"pattern": "^[ab]$"}}, SOME_ABC),
    "names by reference": (
        {"type": "object", "propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": {"type": "string", "pattern": "^a"}}},
        objects(a=[1], ab=[1], b=[1]),
    ),
    "no names": ({"type": "object", "propertyNames": False}, objects(a=[1])),
    "closed after including": (
        {
            "type": "object",
            "allOf": [{"$ref": "#/$defs/base"}],
            "properties": {"b": {"type": "integer"}},
            "unevaluatedProperties": False,
            "$defs": {"base": {"properties": {"a": {"type": "integer"}}}},
        },
        objects(a=[1], b=[1], c=[1]),
    ),
    "closed, names by pattern": (
        {
            "type": "object",
            "$ref": "#/$defs/base",
            "unevaluatedProperties": False,
            "properties": {"bb": True},
            "$defs": {"base": {"properties": {"a": True}, "propertyNames": {"pattern": "^.$"}}},
        },
        objects(a=[1], bb=[1], c=[1]),
    ),
    "closed, with an opposite": (
        {
            "type": "object",
            "not": {"properties": {"a": {"const": 1}, "b": {"const": 1}}},
            "properties": {"a": True},
            "unevaluatedProperties": False,
        },
        objects(a=[1, 2], b=[1, 2]),
    ),
    # distinct items
    "distinct values": (
        {"type": "array", "items": {"enum": ["x", "y", 1]}, "uniqueItems": True},
        arrays("x", "y", 1, "z", up_to=3),
    ),
    "distinct values, two or three": (
        {"type": "array", "items": {"enum": ["x", "y", 1]}, "uniqueItems": True, "minItems": 2},
        arrays("x", "y", 1, up_to=4),
    ),
    "distinct booleans": (
        {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True},
        arrays(True, False, 1, up_to=3),
    ),
    "distinct places": (
        {
            "type": "array",
            "prefixItems": [{"type": "string"}, {"type": "integer"}],
            "items": False,
            "uniqueItems": True,
        },
        arrays("x", 1, up_to=3),
    ),
    "one item is distinct": (
        {"type": "array", "maxItems": 1, "items": {"type": "integer"}, "uniqueItems": True},
        arrays(1, 2, up_to=2),
    ),
    "distinct where it is an array": (
        {"items": {"enum": [1, 2]}, "uniqueItems": True},
        [*arrays(1, 2, up_to=3), *SCALARS],
    ),
    # references
    "a reference to where no schema is kept": (
        {
            "type": "object",
            "required": ["pet"],
            "properties": {"pet": {"$ref": "#/components/schemas/Pet"}},
            "additionalProperties": False,
            "components": {
                "schemas": {
                    "Pet": {"oneOf": [{"type": "string"}, {"$ref": "#/components/schemas/Old%20Pet"}]},
                    "Old Pet": {"type": "array", "items": {"$ref": "#/components/schemas/Pet"}},
                }
            },
        },
        objects(pet=["x", 1, [], ["x", ["y"]], [1]]),
    ),
    "a reference into another schema": (
        {
            "type": "object",
            "properties": {"a": {"oneOf": [{"type": "null"}, {"const": "x"}]}, "b": {"$ref": "#/properties/a/oneOf/1"}},
            "additionalProperties": False,
        },
        objects(a=[None, "x", 1], b=[None, "x"]),
    ),
    # words of another draft
    "additionalItems without effect beside prefixItems": (
        {"type": "array", "prefixItems": [{"type": "integer"}], "additionalItems": False, "maxItems": 2},
        arrays(1, "a", up_to=3),
    ),
    "additionalItems without effect beside items": (
        {"type": "array", "items": {"type": "integer"}, "additionalItems": False, "maxItems": 2},
        arrays(1, "a", up_to=3),
    ),
    "a schema with a name of its own": ({"anyOf": [{"$id": "x", "const": 1}, {"$id": "#y", "const": "a"}]}, SCALARS),
}


@pytest.mark.parametrize("name", CASES)
def test_exactly_what_is_valid_may_come_out(name: str) -> None:
    schema, texts = CASES[name]
    validator = jsonschema.Draft202012Validator(schema)
    if "dependencies" in schema:  # of the drafts before
        validator = jsonschema.Draft7Validator(schema)
    valid = [text for text in texts if validator.is_valid(json.loads(text))]
    assert 0 < len(valid) < len(texts) or "without effect" in name or "not nothing" in name
    assert taken(schema, texts) == valid


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"properties": {"a": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}}, "properties.a.oneOf"),
        ({"oneOf": [{"pattern": "^a"}, {"pattern": "b$"}]}, "oneOf"),
        ({"items": {"if": {"pattern": "^a"}, "then": {"maxLength": 3}}}, "items.if"),
        ({"if": {"type": "integer"}, "then": {"minimum": 3}}, "if"),
        ({"if": {}, "then": {"properties": {"a": {"contains": {}}}}}, "then.properties.a.contains"),
        ({"if": {}, "else": {"unevaluatedItems": False}}, "else.unevaluatedItems"),
        ({"not": {"multipleOf": 3}}, "not"),
        ({"not": {"const": {"a": 1}}}, "not"),
        ({"not": {"contains": {}}}, "not.contains"),
        ({"dependentRequired": {"a": "b"}}, "dependentRequired.a"),
        ({"dependentSchemas": {"a": {"not": {"pattern": "x"}}}}, "dependentSchemas.a.not"),
        ({"dependencies": []}, "dependencies"),
        ({"propertyNames": {"format": "email"}}, "propertyNames"),
        ({"propertyNames": {"pattern": "a", "minLength": 2}}, "propertyNames"),
        ({"propertyNames": {"pattern": "a"}, "patternProperties": {"b": True}}, "propertyNames"),
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "items": {"enum": [1, 2, 3, 4, 5, 6]}, "uniqueItems": True}, "uniqueItems"),
        ({"prefixItems": [{"type": "integer"}, {"const": 1}], "items": False, "uniqueItems": True}, "uniqueItems"),
        ({"unevaluatedProperties": False, "anyOf": [{"properties": {"a": True}}]}, "unevaluatedProperties"),
    ],
)  # fmt: skip
def test_what_cannot_be_exact_is_refused_by_its_path(schema: Any, path: str) -> None:
    with pytest.raises(GrammarRefused) as caught:
        check_grammar(Grammar(kind=GrammarKind.JSON_SCHEMA, source=json.dumps(schema)), LIMITS)
    assert caught.value.path == path
    assert caught.value.refusal in (Refusal.UNSUPPORTED, Refusal.SYNTAX)


class SchemaOfThree:
    """Random schemas of objects with three properties, in every mixture of the keywords above."""

    _LEAVES: tuple[Any, ...] = (
        {"type": "integer"}, {"const": 1}, {"enum": [1, "x"]}, {"type": "string"}, {"maxLength": 1}, {"minLength": 2},
        {"minimum": 2}, {"maximum": 1}, {"exclusiveMinimum": 1}, {"type": ["string", "null"]}, {"type": "boolean"},
        {"const": True}, {"const": None}, True, False, {"enum": ["x", "yy", None]}, {"type": "number", "maximum": 7.5},
        {"const": "yy"}, {"pattern": "^y"}, {},
    )  # fmt: skip

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def schema(self) -> Any:
        schema: Any = {"type": "object", "properties": {name: self._leaf() for name in "abc"}}
        schema["allOf"] = [self._part(2) for _ in range(self._random.randint(1, 2))]
        if self._random.random() < 0.7:
            schema["additionalProperties"] = False
        if self._random.random() < 0.15:
            schema["propertyNames"] = self._random.choice([{"pattern": "^[ab]$"}, {"enum": ["a", "c"]}])
        return schema | {"$defs": {"leaf": self._random.choice(self._LEAVES), "part": self._part(0)}}

    def _leaf(self) -> Any:
        return self._random.choice([*self._LEAVES, {"$ref": "#/$defs/leaf"}])

    def _part(self, depth: int) -> Any:
        kinds = [self._required, self._properties]
        if depth:
            kinds += [
                self._several,
                self._several,
                self._not,
                self._if,
                self._depends,
                lambda _: {"$ref": "#/$defs/part"},
            ]
        return self._random.choice(kinds)(depth - 1)

    def _required(self, depth: int) -> Any:
        return {"required": self._random.sample("abc", self._random.randint(1, 2))}

    def _properties(self, depth: int) -> Any:
        found = {"properties": {name: self._leaf() for name in self._random.sample("abc", 2)}}
        return found | ({"required": self._random.sample("abc", 1)} if self._random.random() < 0.5 else {})

    def _several(self, depth: int) -> Any:
        return {self._random.choice(["allOf", "anyOf", "oneOf"]): [self._part(depth), self._part(depth)]}

    def _not(self, depth: int) -> Any:
        return {"not": self._part(depth)}

    def _if(self, depth: int) -> Any:
        otherwise = {"else": self._part(depth)} if self._random.random() < 0.5 else {}
        return {"if": self._part(depth), "then": self._part(depth)} | otherwise

    def _depends(self, depth: int) -> Any:
        of_schema = {"dependentSchemas": {"b": self._part(depth)}}
        return self._random.choice([{"dependentRequired": {"a": ["b"]}}, of_schema])


def test_any_mixture_of_them_takes_exactly_what_is_valid() -> None:
    texts = objects(a=[1, 2, "x", "yy", None, True], b=[1, 7, "x", True], c=[2, "yy", None])
    num_served, wrong = 0, []
    for seed in range(250):
        schema = SchemaOfThree(seed).schema()
        validator = jsonschema.Draft202012Validator(schema)
        valid = [text for text in texts if validator.is_valid(json.loads(text))]
        try:
            found = taken(schema, texts)
        except GrammarRefused as refused:
            if refused.refusal is Refusal.UNSUPPORTED:
                continue
            found = []  # nothing matches
        num_served += 1
        if found != valid:
            wrong.append((seed, {*found} ^ {*valid}))
    assert wrong == []
    assert num_served > 200
