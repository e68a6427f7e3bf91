"""Checks that a grammar can be served, before it goes to a worker."""

import json

import msgspec
from llguidance import LLMatcher

from octavo.grammar.errors import GrammarRefused, Refusal, one_line
from octavo.grammar.json_fault import placed
from octavo.grammar.json_schema import read_json
from octavo.grammar.limits import GrammarLimits
from octavo.grammar.source import to_llguidance
from octavo.grammar.tool_calls import parameters_of
from octavo.wire.messages import Grammar, GrammarKind

_LIMIT_WORDS = (
    "too large",
    "too big",
    "too many",
    "too complex",
    "too deeply",
    "limit exceeded",
    "exceed the maximum",
    "fuel",
    "recursion limit",
    "unable to",
)
_UNSUPPORTED_WORDS = (
    "not supported",
    "only supported",
    "not disjoint",
    "unimplemented",
    "unknown format",
    "not present in a registry",
    "lookaround",
)


def check_grammar(grammar: Grammar, limits: GrammarLimits) -> None:
    """Raises GrammarRefused. Takes milliseconds, seconds at most, and releases the GIL meanwhile."""
    refusal = _refusal_of(grammar, limits)
    if refusal is None:
        return
    if grammar.kind is GrammarKind.TOOL_CALLS:
        _check_each_tool(grammar, limits)
    if grammar.kind is GrammarKind.JSON_SCHEMA and refusal.refusal in (Refusal.SYNTAX, Refusal.UNSUPPORTED):
        refusal = placed(refusal, read_json(grammar.source, limits), lambda pattern: _of_pattern(pattern, limits))
    raise refusal


def _refusal_of(grammar: Grammar, limits: GrammarLimits) -> GrammarRefused | None:
    """The library's, if it refuses the grammar. Raises GrammarRefused for what is refused before it is asked."""
    is_error, messages = LLMatcher.validate_grammar_with_warnings(
        to_llguidance(grammar, limits), limits=limits.for_parser()
    )
    return refused(messages[0]) if is_error else None


def _of_pattern(pattern: str, limits: GrammarLimits) -> GrammarRefused | None:
    schema = json.dumps({"type": "string", "pattern": pattern}, ensure_ascii=False)
    return _refusal_of(Grammar(kind=GrammarKind.JSON_SCHEMA, source=schema), limits)


def _check_each_tool(grammar: Grammar, limits: GrammarLimits) -> None:
    """Raises GrammarRefused, with the tool's path, if the parameters of one tool are at fault. For all tools together,
    the library would name lines of a grammar that the caller never saw."""
    for index, schema in enumerate(parameters_of(grammar.source, limits)):
        if schema is None:
            continue
        try:
            check_grammar(msgspec.structs.replace(grammar, kind=GrammarKind.JSON_SCHEMA, source=schema), limits)
        except GrammarRefused as error:
            place = f"tools[{index}].parameters{'.' if error.path else ''}{error.path}"
            raise GrammarRefused(error.refusal, error.description, path=place) from None


def refused(message: str) -> GrammarRefused:
    """The refusal for the library's error message."""
    message = next((line for line in message.splitlines() if line.startswith("error: ")), message)
    message = message.removeprefix("error: ").partition("\n<")[0]
    lower = message.lower()
    if any(words in lower for words in _LIMIT_WORDS):
        return GrammarRefused(Refusal.LIMIT, f"is too complex: {one_line(message)}")
    if any(words in lower for words in _UNSUPPORTED_WORDS):
        return GrammarRefused(Refusal.UNSUPPORTED, one_line(message))
    if "noextension" in lower:  # a state of the library, not a message
        return GrammarRefused(Refusal.UNSATISFIABLE, "nothing can match: its rules never lead to a text")
    if "unsatisfiable" in lower or "is empty" in lower:
        return GrammarRefused(Refusal.UNSATISFIABLE, f"nothing can match: {one_line(message)}")
    return GrammarRefused(Refusal.SYNTAX, one_line(message))
