"""Numbers and texts of JSON schemas come out as they are, or are refused by their path: consts, enums, bounds."""

import json
from decimal import Decimal
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from octavo.grammar.check import check_grammar
from octavo.grammar.errors import GrammarRefused, Refusal
from octavo.grammar.json_literals import encode
from octavo.grammar.json_schema import read_json
from octavo.grammar.limits import GrammarLimits
from octavo.grammar.source import to_llguidance
from octavo.wire.messages import Grammar, GrammarKind
from octavo.worker.grammar.matcher import GrammarMatcher
from octavo.worker.grammar.vocabulary import Vocabulary
from tests.support.grammar.models import oracle_speaker

LIMITS = GrammarLimits()


@cache
def vocabulary() -> Vocabulary:
    return oracle_speaker(259).vocabulary()


def matcher_of(schema: str) -> GrammarMatcher:
    """Raises GrammarRefused."""
    grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, source=schema)
    check_grammar(grammar, LIMITS)
    return GrammarMatcher(LLMatcher(vocabulary().tokenizer, to_llguidance(grammar, LIMITS), limits=LIMITS.for_parser()))


def takes(schema: str, text: str) -> bool:
    matcher, ids = matcher_of(schema).matcher, vocabulary().tokenizer.tokenize_bytes(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def refusal_of(schema: str) -> tuple[Refusal, str]:
    with pytest.raises(GrammarRefused) as caught:
        matcher_of(schema)
    return caught.value.refusal, caught.value.path


def outcome(schema: str) -> GrammarMatcher | GrammarRefused:
    try:
        return matcher_of(schema)
    except GrammarRefused as refused:
        return refused


def written(matcher: GrammarMatcher, seed: int) -> str:
    """An output of a model that chooses by chance: white space is taken where nothing else is left."""
    rng, output = np.random.default_rng(seed), list[int]()
    bits_W = np.empty(vocabulary().num_words, np.int32)
    while not matcher.is_complete:
        assert matcher.fill(bits_W), matcher.error
        allowed = np.flatnonzero(np.unpackbits(bits_W.view(np.uint8), bitorder="little"))
        dense = [token for token in allowed if token not in white_space()] or allowed
        token = int(rng.choice(dense))
        assert matcher.accept(token)
        if matcher.ended_by_token:
            break
        output.append(token)
        assert len(output) < 20_000
    return bytes(vocabulary().tokenizer.decode_bytes(output)).decode()


@cache
def white_space() -> frozenset[int]:
    return frozenset(token for text in (b" ", b"\n", b"\t") for token in vocabulary().tokenizer.tokenize_bytes(text))


def exact(text: str) -> Any:
    """A JSON value that equals another one only where their numbers are the same to the last digit."""
    return canonical(json.loads(text, parse_float=Decimal))


def canonical(value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return value, "constant"
    if isinstance(value, int | Decimal):
        return Decimal(value), "number"
    if isinstance(value, list):
        return [canonical(item) for item in value]
    return {key: canonical(item) for key, item in value.items()} if isinstance(value, dict) else value


INTEGERS = st.one_of(
    st.integers(-1000, 1000),
    st.integers(-(2**70), 2**70),
    st.builds(lambda base, off: base + off, st.sampled_from([2**53, -(2**53), 2**63, -(2**63), 2**64, 10**18]),
              st.integers(-3, 3)),
    st.builds(lambda digit, power: digit << power, st.integers(-9, 9), st.integers(0, 70)),
).map(str)  # fmt: skip
DECIMALS = st.builds(
    lambda sign, digits, point, exponent: f"{sign}{digits}{point}{exponent}",
    st.sampled_from(["", "-"]),
    st.integers(0, 10**18).map(str),
    st.one_of(st.just(""), st.integers(0, 10**9).map(lambda digits: f".{digits}")),
    st.one_of(
        st.just(""), st.builds(lambda letter, power: f"{letter}{power}", st.sampled_from("eE"), st.integers(-330, 330))
    ),
)
FLOATS = st.floats(allow_nan=False, allow_infinity=False).map(repr)
NUMBERS = st.one_of(INTEGERS, DECIMALS, FLOATS)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.text(
    'ab\x00\x01\n\t\x1f\x7f"\\/é', max_size=4
)
VALUES = st.recursive(
    st.one_of(NUMBERS, st.sampled_from(["null", "true", "false"]), TEXTS.map(json.dumps)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: f"[{','.join(items)}]"),
        st.dictionaries(TEXTS, inner, max_size=3).map(
            lambda items: "{" + ",".join(f"{json.dumps(key)}: {value}" for key, value in items.items()) + "}"
        ),
    ),
    max_leaves=5,
)  # fmt: skip


@settings(max_examples=400)
@given(
    st.lists(VALUES, min_size=1, max_size=4),
    st.integers(0, 2**31),
    st.sampled_from(["enum", "const", "property", "item"]),
)
def test_what_comes_out_is_one_of_the_values_to_the_last_digit(options: list[str], seed: int, place: str) -> None:
    enum = f'{{"enum": [{",".join(options)}]}}'
    schema = {
        "enum": enum,
        "const": f'{{"const": {options[0]}}}',
        "property": f'{{"type":"object","properties":{{"p":{enum}}},"required":["p"],"additionalProperties":false}}',
        "item": f'{{"type":"array","items":{enum},"minItems":1,"maxItems":1}}',
    }[place]
    matcher = outcome(schema)
    if isinstance(matcher, GrammarRefused):
        start = {"enum": "enum[", "const": "const", "property": "properties.p.enum[", "item": "items.enum["}[place]
        assert matcher.path.startswith(start), matcher
        assert "cannot be written exactly" in matcher.description or "control character" in matcher.description
        return
    got = exact(written(matcher, seed))
    got = got["p"] if place == "property" else got[0] if place == "item" else got
    assert got in [exact(option) for option in options[: 1 if place == "const" else None]]


@pytest.mark.parametrize(
    "number",
    ["9007199254740993", "1234567890123456789", "-1234567890123456789", "9223372036854775807", "-9223372036854775808",
     "9223372036854775808", "18446744073709551615", "1e19", "1e400", "-1e400", "1e-400", "12345678901234567890123",
     "0.12345678901234567890", "1e999999999", "-1e-999999999"],
)  # fmt: skip
@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ('{"const": N}', "const"),
        ('{"enum": [1, "a", N]}', "enum[2]"),
        ('{"const": {"a": [[N]]}}', "const.a[0][0]"),
        ('{"items": {"properties": {"x": {"enum": [[1, {"y": N}]]}}}}', "items.properties.x.enum[0][1].y"),
    ],
)
def test_a_number_that_cannot_be_exact_is_refused_by_its_path(schema: str, path: str, number: str) -> None:
    assert refusal_of(schema.replace("N", number)) == (Refusal.UNSUPPORTED, path)


@pytest.mark.parametrize(
    "number",
    ["9007199254740992", "-1152921504606846976", "1000000000000000000", "0.1", "-2.5e-7", "5e-324", "1e-300",
     "1.63471103632506050", "5.0", "3E2", "-0.0", "123456.789"],
)  # fmt: skip
def test_other_numbers_come_out_exactly(number: str) -> None:
    assert exact(written(matcher_of(f'{{"const": [{number}]}}'), 0)) == [(Decimal(number), "number")]


EDGES = st.one_of(
    st.sampled_from(["0", "1", "-1", "0.5", "-0.5", "2.5", "10", "99", "-100", "1e-9", "0.25"]),
    st.integers(-300, 300).map(lambda number: repr(number / 8)),
    st.integers(-300, 300).map(lambda number: repr(number / 100)),
    st.floats(-3, 3).map(repr),
    INTEGERS,
)
STEPS = ("0", "1", "-1", "0.5", "-0.5", "0.1", "-0.1", "1e-12", "-1e-12", "1e-20", "-1e-20", "7", "1024")
HOLDS = {
    "minimum": lambda number, edge: number >= edge,
    "exclusiveMinimum": lambda number, edge: number > edge,
    "maximum": lambda number, edge: number <= edge,
    "exclusiveMaximum": lambda number, edge: number < edge,
}


@settings(max_examples=250)
@given(
    st.dictionaries(st.sampled_from([*HOLDS]), EDGES, min_size=1, max_size=3),
    st.sampled_from(['"integer"', '"number"']),
    st.booleans(),
)
def test_no_number_outside_of_its_bounds_is_taken(ends: dict[str, str], kind: str, is_divided: bool) -> None:
    """is_divided: each bound in a schema of its own."""
    parts = [f'"{key}": {edge}' for key, edge in ends.items()]
    schema = f'{{"type": {kind}, {", ".join(parts)}}}'
    if is_divided:
        schema = f'{{"type": {kind}, "allOf": [{", ".join(f"{{{part}}}" for part in parts)}]}}'
    matcher = outcome(schema)
    if isinstance(matcher, GrammarRefused):
        is_empty = matcher.refusal is Refusal.UNSATISFIABLE
        assert is_empty or (matcher.refusal is Refusal.UNSUPPORTED and matcher.path.rpartition(".")[2] in ends), matcher
        return
    around = {format(Decimal(edge) + Decimal(step), "f") for edge in ends.values() for step in STEPS}
    for text in (
        around | {f"-{text}" for text in around if text[0] != "-"} | {text.removesuffix(".0") for text in around}
    ):
        number, ids = Decimal(text), vocabulary().tokenizer.tokenize_bytes(text.encode())
        each = matcher.matcher.deep_copy()
        if each.try_consume_tokens(ids) == len(ids) and each.is_accepting():
            assert all(HOLDS[key](number, Decimal(edge)) for key, edge in ends.items()), (schema, text)


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        ('"exclusiveMinimum": 0, "maximum": 0.5', ["0.1", "0.5", "0.000001"], ["0", "0.0", "-0", "0.51"]),
        ('"minimum": -0.5, "exclusiveMaximum": 0', ["-0.1", "-0.5"], ["0", "-0", "-0.0", "-0.51"]),
        ('"exclusiveMinimum": 2, "exclusiveMaximum": 2.5', ["2.1", "2.49"], ["2", "2.0", "2.5"]),
        ('"maximum": 9223372036854775807, "type": "integer"', ["9223372036854775807", "-5"], ["9223372036854775808"]),
        ('"minimum": -9223372036854775808, "type": "integer"', ["-9223372036854774784", "5"], ["-9223372036854775809"]),
        ('"minimum": 0, "maximum": 18446744073709551615, "type": "integer"', ["0", "9223372036854775807"], ["-1"]),
        ('"maximum": 1.7976931348623157e308', ["1", "9200000000000000000", "-3"], []),
        ('"exclusiveMinimum": 9007199254740990, "type": "integer"', ["9007199254740991"], ["9007199254740990"]),
        ('"exclusiveMinimum": true, "minimum": 3', ["3.1", "4"], ["3", "3.0"]),
        ('"multipleOf": 0.01', ["1.25", "-3", "0.1"], ["1.255"]),
        ('"multipleOf": 86400, "type": "integer"', ["86400", "0", "172800"], ["86401", "1"]),
        ('"multipleOf": 50000000, "type": "integer"', ["50000000", "-150000000"], ["5000000", "50000001"]),
    ],
)  # fmt: skip
def test_numbers_are_taken_up_to_their_bounds(schema: str, inside: list[str], outside: list[str]) -> None:
    schema = f'{{"type": "number", {schema}}}' if '"type"' not in schema else f"{{{schema}}}"
    assert [text for text in [*inside, *outside] if takes(schema, text)] == inside


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ('{"type": "integer", "minimum": 9007199254740993}', "minimum"),
        ('{"items": {"type": "integer", "maximum": -9007199254740993}}', "items.maximum"),
        ('{"type": "integer", "exclusiveMaximum": 9007199254740992.5}', "exclusiveMaximum"),
        ('{"type": "number", "exclusiveMinimum": 9007199254740994}', "exclusiveMinimum"),
        ('{"type": "integer", "minimum": 18446744073709551615}', "minimum"),
        ('{"minimum": 1e400}', "minimum"),
        ('{"minimum": 1e1000000000000}', "minimum"),
        ('{"exclusiveMaximum": -1e1000000000000}', "exclusiveMaximum"),
        ('{"minimum": 0.12345678901234567890}', "minimum"),
        ('{"minimum": "3"}', "minimum"),
        ('{"multipleOf": 0}', "multipleOf"),
        ('{"multipleOf": -1}', "multipleOf"),
        ('{"multipleOf": 4294967295}', "multipleOf"),
        ('{"multipleOf": 0.07}', "multipleOf"),
        ('{"type": "integer", "multipleOf": 604800}', "multipleOf"),
        ('{"multipleOf": 997, "anyOf": [{"multipleOf": 211}]}', "anyOf[0].multipleOf"),
        ('{"multipleOf": 9007199254740993}', "multipleOf"),
        ('{"allOf": [{"multipleOf": 65521}, {"multipleOf": 65537}]}', "allOf[1].multipleOf"),
        ('{"minLength": -1}', "minLength"),
        ('{"items": {"maxItems": 1.5}}', "items.maxItems"),
        ('{"maxLength": 1e10}', "maxLength"),
    ],
)
def test_a_bound_that_cannot_be_held_is_refused_by_its_path(schema: str, path: str) -> None:
    assert refusal_of(schema)[1] == path


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        (r'{"const": "a\u0001b"}', "const"),
        (r'{"enum": ["x\n", "\u0000"]}', "enum[1]"),
        (r'{"properties": {"p": {"const": ["\u007f"]}}}', "properties.p.const[0]"),
        (r'{"const": "\ud800"}', "const"),
        (r'{"enum": [{"\udc00x": 1}]}', "enum[0]"),
        (r'{"properties": {"\ud800": {}}}', "properties"),
        (r'{"required": ["a", "\ud800"]}', "required[1]"),
        (r'{"pattern": "^a\\x01$"}', "pattern"),
        (r'{"pattern": "^a[\\x0b]$"}', "pattern"),
        (r'{"pattern": "(a|\u0002)"}', "pattern"),
        (r'{"patternProperties": {"^\\u0001": true}}', "patternProperties.^\\u0001"),
    ],
)  # fmt: skip
def test_a_text_that_cannot_be_written_is_refused_by_its_path(schema: str, path: str) -> None:
    assert refusal_of(schema) == (Refusal.UNSUPPORTED, path)


def test_control_characters_that_have_a_short_escape_come_out() -> None:
    assert json.loads(written(matcher_of(r'{"const": "\b\f\n\r\t\"\\/"}'), 0)) == '\b\f\n\r\t"\\/'
    assert takes(r'{"pattern": "^a[\\x00-\\x1f]b$"}', r'"a\nb"')
    assert takes(r'{"pattern": "^[^\\x00-\\x1f\\x7f]+$"}', '"é"')


@pytest.mark.parametrize("name", ["a\x01", "\x7f", '\x00\n"\\'])
def test_names_of_properties_are_escaped(name: str) -> None:
    schema = {"type": "object", "properties": {name: {"const": 1}}, "required": [name], "additionalProperties": False}
    assert json.loads(written(matcher_of(json.dumps(schema)), 0)) == {name: 1}
    required = {"type": "object", "required": [name], "additionalProperties": {"const": 1}, "maxProperties": 1}
    assert json.loads(written(matcher_of(json.dumps(required)), 0)) == {name: 1}
    assert json.loads(written(matcher_of(json.dumps({"const": {name: {name: []}}})), 0)) == {name: {name: []}}


def test_encoded_numbers_are_read_back_as_they_were() -> None:
    value = read_json('{"a": [0.1, 1.6347110363250605, 12345678901234567, 2.5e-8]}', LIMITS)
    assert json.loads(encode(value)) == {"a": [0.1, 1.6347110363250605, 12345678901234567, 2.5e-8]}
