"""A pattern of a JSON schema takes the texts that it matches: brackets mean what they do in ECMA-262 and Python."""

import json
import re
import warnings
from functools import cache
from typing import Any

import pytest
from llguidance import LLMatcher

from octavo.grammar.check import check_grammar
from octavo.grammar.errors import GrammarRefused
from octavo.grammar.limits import GrammarLimits
from octavo.grammar.source import to_llguidance
from octavo.wire.messages import Grammar, GrammarKind
from octavo.worker.grammar.vocabulary import Vocabulary
from tests.support.grammar.models import oracle_speaker

LIMITS = GrammarLimits()
# Every character of ASCII that can be written (docs/structured-output.md), and some beyond.
CHARACTERS = [*"\b\t\n\f\r", *map(chr, range(0x20, 0x7F)), "é", "→", "😀"]
TEXTS = [*CHARACTERS, "", "a]", "[b]", "ab", 'a"', "a\\", "\\\\"]


@cache
def vocabulary() -> Vocabulary:
    return oracle_speaker(259).vocabulary()


def taken(schema: dict[str, Any], values: list[Any]) -> list[Any]:
    """Those of the values that are complete outputs."""
    grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, source=json.dumps(schema))
    check_grammar(grammar, LIMITS)
    start = LLMatcher(vocabulary().tokenizer, to_llguidance(grammar, LIMITS), limits=LIMITS.for_parser())

    def takes(value: Any) -> bool:
        matcher = start.deep_copy()
        ids = vocabulary().tokenizer.tokenize_bytes(json.dumps(value, ensure_ascii=False).encode())
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return [value for value in values if takes(value)]


def matched(pattern: str) -> list[str]:
    with warnings.catch_warnings(action="ignore"):  # of sets that a later Python may have
        return [text for text in TEXTS if re.search(pattern.replace("$", r"\Z"), text, re.ASCII)]


@pytest.mark.parametrize(
    "inside",
    [
        r"^\\", '^"', r'^"\\', r'^<>:"/\\|?*', "^A-z", "^!-~", r"^\[-`", r"^\x20-\x7e", r"^\w", r"^\s\w", r'\D"',
        r"^\D", r"\x00-\x1f", r"^\x00-\x1f", r"^\x00-\x1f\x7f", "\x00-\x1f", "^\x00", r"^\x00", r"^\n", r'^"\n',
        r"\x00-!", r"\x41-\x43", r"\u0041-\u0043", "[a", "^[a", "[:alpha:", "a&&b", "^&&", "a~~b", "+--", "^+--", "--a",
        "^--a", "a-b--c", "^a-b--c", "]a", "^]a", "]-a", "^]-a", r"\]-a", r"^\]-a", "a-", "-a", "^-", r"a\-c", ".",
        "^.^", "/", r"!-/:-@\[-`{-~", r"\d-", "a-z&&[^b",
    ],
)  # fmt: skip
def test_brackets_hold_the_characters_that_pythons_hold(inside: str) -> None:
    pattern = f"^[{inside}]$"
    assert taken({"pattern": pattern}, TEXTS) == matched(pattern)


@pytest.mark.parametrize(
    "pattern", [r"^\x41$", r"^\u0041?$", r"^\u00e9$", r'^[^"]*$', r"^(?:[^\\]|ab)+$", r"^\S$", r"^\W$", r"[^\\]$"]
)
def test_a_pattern_takes_what_pythons_takes(pattern: str) -> None:
    assert taken({"pattern": pattern}, TEXTS) == matched(pattern)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"^\P{P}$", ["a", "+", "é"]),
        (r"^[\P{P}]$", ["a", "+", "é"]),
        (r"^[^\P{P}]$", ['"', "\\", "!"]),
        (r"^\p{P}$", ['"', "\\", "!"]),
        (r"^\PL$", ['"', "\\", "!", "+"]),
        (r"^[\x{41}-\u{7a}]$", ["a", "\\"]),
    ],
)
def test_properties_of_unicode_hold_their_characters(pattern: str, expected: list[str]) -> None:
    assert taken({"pattern": pattern}, ["a", '"', "\\", "!", "+", "é"]) == expected


def test_names_and_opposites_hold_their_characters() -> None:
    keys = ['"', "\\", "a"]
    objects = [{key: 1} for key in keys]
    closed = {"type": "object", "additionalProperties": False, "patternProperties": {r'^[^"\\]$': {"const": 1}}}
    assert taken(closed, objects) == [{"a": 1}]
    assert taken({"type": "object", "propertyNames": {"pattern": r'^[^"\\]$'}}, objects) == [{"a": 1}]
    assert taken({"not": {"const": "\\"}}, [*keys, "\\\\"]) == ['"', "a", "\\\\"]


@pytest.mark.parametrize(
    "pattern", [r"\x01", r"\u001f", r"[\x0b]", r"\x7F", r"\u{1}", r"\x{007f}", r"\v", "\x02", r"a|\a"]
)
def test_control_characters_by_themselves_are_refused(pattern: str) -> None:
    with pytest.raises(GrammarRefused, match="pattern: matches a control character"):
        taken({"pattern": pattern}, [])
