"""What of JSON schema is enforced, and what is refused by which name."""

import json
from typing import Any

import pytest

from octavo.grammar.check import check_grammar
from octavo.grammar.errors import GrammarRefused, Refusal
from octavo.grammar.json_schema import Place, rewrite, schema_text
from octavo.grammar.limits import GrammarLimits
from octavo.wire.messages import Grammar, GrammarKind

LIMITS = GrammarLimits()


def refusal_of(schema: Any, limits: GrammarLimits = LIMITS) -> tuple[Refusal, str]:
    """Reason and path."""
    text = schema if isinstance(schema, str) else json.dumps(schema)
    with pytest.raises(GrammarRefused) as caught:
        check_grammar(Grammar(kind=GrammarKind.JSON_SCHEMA, source=text), limits)
    return caught.value.refusal, caught.value.path


KEYWORDS = "contains minContains maxContains uniqueItems unevaluatedItems x-guidance $dynamicRef $recursiveRef"


@pytest.mark.parametrize("keyword", KEYWORDS.split())
def test_a_keyword_that_is_not_enforced_is_refused_wherever_it_stands(keyword: str) -> None:
    bad = {keyword: True}
    places = {
        "": bad,
        "properties.a.": {"properties": {"a": bad}},
        "$defs.x.": {"$defs": {"x": bad}},
        "items.": {"items": bad},
        "anyOf[1].": {"anyOf": [{}, bad]},
        "prefixItems[0].additionalProperties.": {"prefixItems": [{"additionalProperties": bad}]},
    }
    for path, schema in places.items():
        assert refusal_of(schema) == (Refusal.UNSUPPORTED, path + keyword)


def test_names_of_properties_and_values_are_no_keywords() -> None:
    good = {
        "properties": {"not": {"enum": [{"if": 1}], "default": {"not": 1}, "x-note": {"not": 2}}},
        "uniqueItems": False,
    }
    check_grammar(Grammar(kind=GrammarKind.JSON_SCHEMA, source=json.dumps(good)), LIMITS)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ("{", (Refusal.SYNTAX, "")),
        ("[1]", (Refusal.SYNTAX, "")),
        ('{"minimum": NaN}', (Refusal.SYNTAX, "")),
        ({"properties": [1]}, (Refusal.SYNTAX, "properties")),
        ({"anyOf": {}}, (Refusal.SYNTAX, "anyOf")),
        ({"items": 3}, (Refusal.SYNTAX, "items")),
        ({"type": "strin"}, (Refusal.SYNTAX, "type")),
        ({"not": {"type": 5}}, (Refusal.SYNTAX, "not.type")),
        ({"oneOf": [{"type": "null"}, {"type": [["null"]]}]}, (Refusal.SYNTAX, "oneOf[1].type")),
        ({"items": {"$ref": "#", "unevaluatedProperties": False}, "enum": None}, (Refusal.SYNTAX, "enum")),
        ({"$ref": "#/nowhere"}, (Refusal.SYNTAX, "$ref")),
        ({"anyOf": [{"$ref": "#"}, {"$ref": "#/$defs/a"}], "$defs": {}}, (Refusal.SYNTAX, "anyOf[1].$ref")),
        ({"$ref": "other.json"}, (Refusal.UNSUPPORTED, "$ref")),
        ({"properties": {"a": {"format": "iri"}}}, (Refusal.UNSUPPORTED, "properties.a.format")),
        ({"minProperties": 1}, (Refusal.UNSUPPORTED, "minProperties")),
        ('{"items": {"minProperties": 2.0}}', (Refusal.UNSUPPORTED, "items.minProperties")),
        ({"minProperties": 2, "required": ["a", "a"]}, (Refusal.UNSUPPORTED, "minProperties")),
        ({"properties": {"a": {}}, "maxProperties": 1}, (Refusal.UNSUPPORTED, "maxProperties")),
        ({"maxProperties": 1, "allOf": [{"properties": {"a": {}}}]}, (Refusal.UNSUPPORTED, "")),
        ({"patternProperties": {"^a": {}, "b$": {"type": "null"}}}, (Refusal.UNSUPPORTED, "")),
        ({"properties": {"a": {"$id": "b", "$ref": "#/$defs/c"}}}, (Refusal.UNSUPPORTED, "properties.a.$id")),
        ({"pattern": "(?=x)"}, (Refusal.UNSUPPORTED, "pattern")),
        ({"pattern": 5}, (Refusal.SYNTAX, "pattern")),
        ({"items": {"anyOf": [{"pattern": "a"}, {"pattern": "["}]}}, (Refusal.SYNTAX, "items.anyOf[1].pattern")),
        (
            {"properties": {"pattern": {"propertyNames": {"pattern": "("}}}},
            (Refusal.SYNTAX, "properties.pattern.propertyNames.pattern"),
        ),
        ({"patternProperties": {"a": {}, "\\p{Foo}": {}}}, (Refusal.SYNTAX, "patternProperties.\\p{Foo}")),
        ({"items": {"pattern": "a\\"}}, (Refusal.SYNTAX, "items.pattern")),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, (Refusal.UNSUPPORTED, "oneOf")),
        (False, (Refusal.UNSATISFIABLE, "")),
        ({"type": "string", "minLength": 3, "maxLength": 2}, (Refusal.UNSATISFIABLE, "")),
        ({"allOf": [{"type": "string", "pattern": f"x{index}"} for index in range(9)]}, (Refusal.LIMIT, "")),
        ("[" * 50_000, (Refusal.LIMIT, "")),
        (" " * 70_000, (Refusal.LIMIT, "")),
    ],
)
def test_what_is_wrong_with_a_schema_is_told_by_kind_and_place(schema: Any, expected: tuple[Refusal, str]) -> None:
    assert refusal_of(schema) == expected


@pytest.mark.parametrize("number", ["9" * 5_000, "1e99999999999999999999", "1e-99999999999999999999"])
def test_a_number_that_cannot_be_read_is_told_without_pythons_words(number: str) -> None:
    with pytest.raises(GrammarRefused, match=r"^is not valid JSON: a number in it is too long or too large$"):
        schema_text(f'{{"maximum": {number}}}', LIMITS)


@pytest.mark.parametrize("name", ["int32", "iri", "phone", "ISO 8601"])
def test_formats_that_are_not_known_may_be_annotations(name: str) -> None:
    schema = {"properties": {"a": {"type": "string", "format": name}, "b": {"format": "date", "minLength": 3}}}
    asked = Grammar(kind=GrammarKind.JSON_SCHEMA, source=json.dumps(schema), format_as_annotation=True)
    check_grammar(asked, LIMITS)
    assert refusal_of(schema) == (Refusal.UNSUPPORTED, "properties.a.format")
    rewritten = rewrite(schema, LIMITS, Place(), format_as_annotation=True)
    assert isinstance(rewritten, dict)
    assert rewritten["properties"]["a"] == {"type": "string"}
    assert "pattern" in rewritten["properties"]["b"]  # known ones are enforced all the same
    tools = json.dumps({"tools": [{"name": "f", "parameters": schema}]})
    check_grammar(Grammar(kind=GrammarKind.TOOL_CALLS, source=tools, format_as_annotation=True), LIMITS)
    with pytest.raises(GrammarRefused, match=r"tools\[0\]\.parameters\.properties\.a\.format"):
        check_grammar(Grammar(kind=GrammarKind.TOOL_CALLS, source=tools), LIMITS)


@pytest.mark.parametrize("value", [3, None, ["date"]])
def test_a_format_that_is_no_name_is_refused_all_the_same(value: Any) -> None:
    with pytest.raises(GrammarRefused, match="format"):
        rewrite({"format": value}, LIMITS, Place(), format_as_annotation=True)


def test_properties_are_counted_where_the_named_ones_show_how_many_there_are() -> None:
    named = {name: {} for name in "abc"}
    closed = {"properties": named, "additionalProperties": False}
    good = [
        closed | {"minProperties": 1, "maxProperties": 3},
        closed | {"maxProperties": 1},
        closed | {"required": ["a", "b"], "minProperties": 3},
        {"properties": named, "required": ["a", "b"], "minProperties": 2},
        {"properties": named, "required": [*named], "maxProperties": 4},
    ]
    for schema in good:
        check_grammar(Grammar(kind=GrammarKind.JSON_SCHEMA, source=json.dumps(schema)), LIMITS)
    assert refusal_of(closed | {"minProperties": 2}) == (Refusal.UNSUPPORTED, "minProperties")
    assert refusal_of(closed | {"maxProperties": 2}) == (Refusal.UNSUPPORTED, "maxProperties")
    assert refusal_of(closed | {"patternProperties": {"^x": {}}, "maxProperties": 3})[1] == "maxProperties"


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth - 1):
        schema = {"type": "array", "items": schema}
    return schema


def test_schemas_may_be_nested_as_deep_as_the_limit() -> None:
    limits = GrammarLimits(max_depth=5)
    check_grammar(Grammar(kind=GrammarKind.JSON_SCHEMA, source=json.dumps(nested(5))), limits)
    assert refusal_of(nested(6), limits)[0] is Refusal.LIMIT


def test_references_follow_a_schema_that_is_put_into_another() -> None:
    schema = {"$schema": "s", "$id": "i", "$ref": "#/$defs/a", "$defs": {"a": {"items": {"$ref": "#"}}}}
    moved = {"$ref": "#/p/$defs/a", "$defs": {"a": {"items": {"$ref": "#/p"}}}}
    assert rewrite(schema, LIMITS, Place(root="#/p")) == moved
