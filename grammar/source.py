"""From a Grammar message to llguidance's notation."""

import json

from llguidance import LLMatcher, regex_to_lark

from grammar.choice import choice_to_lark
from grammar.errors import GrammarRefused, Refusal
from grammar.gbnf import gbnf_to_lark
from grammar.json_schema import WHITE_SPACE, schema_text
from grammar.limits import GrammarLimits
from grammar.tool_calls import CallTags, tool_calls_to_lark
from wire.messages import Grammar, GrammarKind


def to_llguidance(grammar: Grammar, limits: GrammarLimits, call_tags: CallTags | None = None) -> str:
    """A grammar for `llguidance.LLMatcher`. call_tags: the model's own. Raises GrammarRefused."""
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
    r"""\d, \w and \s mean ASCII: tables of other characters differ from one library to the next."""
    num_bytes = len(source.encode())
    if not 1 <= num_bytes <= limits.max_regex_bytes:
        raise GrammarRefused(Refusal.LIMIT, f"has {num_bytes} bytes, 1 to {limits.max_regex_bytes} are allowed")
    return f"start: /{regex_to_lark(source, use_ascii='dws')}/\n"
