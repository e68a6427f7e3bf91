"""Converts a Grammar message to llguidance's notation."""

import json

from llguidance import LLMatcher, regex_to_lark

from octavo.grammar.errors import GrammarRefused, Refusal
from octavo.grammar.gbnf import gbnf_to_lark
from octavo.grammar.json_schema import WHITE_SPACE, schema_text
from octavo.grammar.lark import ends_in_escape, quoted
from octavo.grammar.limits import GrammarLimits
from octavo.grammar.tool_calls import CallTags, tool_calls_to_lark
from octavo.wire.messages import Grammar, GrammarKind


def choice_to_lark(source: str, limits: GrammarLimits) -> str:
    """source: a JSON array of strings; the output is one of them. Raises GrammarRefused."""
    try:
        options = json.loads(source)
    except ValueError as error:
        raise GrammarRefused(Refusal.SYNTAX, f"is not valid JSON: {error}") from None
    if not isinstance(options, list) or not options or not all(isinstance(option, str) for option in options):
        raise GrammarRefused(Refusal.SYNTAX, "must be a list of texts, at least one")
    if len(options) > limits.max_choices:
        raise GrammarRefused(Refusal.LIMIT, f"has {len(options)} options, at most {limits.max_choices} are allowed")
    for index, option in enumerate(options):
        num_bytes = len(option.encode())
        if not 1 <= num_bytes <= limits.max_choice_bytes:
            raise GrammarRefused(
                Refusal.LIMIT, f"has {num_bytes} bytes, 1 to {limits.max_choice_bytes} are allowed", path=f"[{index}]"
            )
    return "start: CHOICE\nCHOICE: " + "\n  | ".join(quoted(option) for option in dict.fromkeys(options)) + "\n"


def to_llguidance(grammar: Grammar, limits: GrammarLimits, call_tags: CallTags | None = None) -> str:
    """The grammar for `llguidance.LLMatcher`. call_tags: the model's, if it has them. Raises GrammarRefused."""
    try:
        return _to_llguidance(grammar, limits, call_tags)
    except RecursionError:  # chains of references, repetitions of repetitions
        raise GrammarRefused(Refusal.LIMIT, "is nested too deeply") from None


def _to_llguidance(grammar: Grammar, limits: GrammarLimits, call_tags: CallTags | None) -> str:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            text = schema_text(grammar.source, limits, format_as_annotation=grammar.format_as_annotation)
            return LLMatcher.grammar_from_json_schema(text)
        case GrammarKind.JSON_OBJECT:
            return LLMatcher.grammar_from_json_schema(json.dumps({"type": "object", "x-guidance": WHITE_SPACE}))
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_lark(_regex_to_lark(grammar.source, limits))
        case GrammarKind.EBNF:
            return LLMatcher.grammar_from_lark(gbnf_to_lark(grammar.source, limits))
        case GrammarKind.CHOICE:
            return LLMatcher.grammar_from_lark(choice_to_lark(grammar.source, limits))
        case GrammarKind.TOOL_CALLS:
            return LLMatcher.grammar_from_lark(tool_calls_to_lark(grammar, limits, call_tags))


def _regex_to_lark(source: str, limits: GrammarLimits) -> str:
    r"""\d, \w and \s match ASCII only: Unicode tables differ between libraries."""
    num_bytes = len(source.encode())
    if not 1 <= num_bytes <= limits.max_regex_bytes:
        raise GrammarRefused(Refusal.LIMIT, f"has {num_bytes} bytes, 1 to {limits.max_regex_bytes} are allowed")
    if ends_in_escape(source):
        raise GrammarRefused(Refusal.SYNTAX, "ends with a backslash that escapes nothing")
    return f"start: /{regex_to_lark(source, use_ascii='dws')}/\n"
