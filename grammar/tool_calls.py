"""Tool calls in the format of Hermes, which Qwen2.5 was trained to write.

    <tool_call>
    {"name": "weather", "arguments": {"city": "Oslo"}}
    </tool_call>

The source is JSON: ``{"tools": [{"name": …, "parameters": schema or null}, …], "max_calls": n or null}``. An output has
at least one call, and at most max_calls.
"""

from typing import Any

from octavo.grammar.errors import GrammarRefused, Refusal
from octavo.grammar.json_literals import Json, check_text, encode
from octavo.grammar.json_schema import WHITE_SPACE, Place, read_json, rewrite
from octavo.grammar.lark import quoted
from octavo.grammar.limits import GrammarLimits
from octavo.wire.messages import Grammar

CALL_TAGS = ("<tool_call>", "</tool_call>")
OPENING, CLOSING = f"{CALL_TAGS[0]}\n", f"\n{CALL_TAGS[1]}"
CallTags = tuple[int, int]
"""The ids of the tokens for CALL_TAGS, in models that have them."""
_ARGUMENTS = "#/properties/arguments"


def tool_calls_to_lark(grammar: Grammar, limits: GrammarLimits, call_tags: CallTags | None = None) -> str:
    """The grammar of tool calls in Lark. call_tags: None: tags are written as text. Raises GrammarRefused with paths
    that begin with the tool: ``tools[2].parameters.properties…``."""
    tools, max_calls = _read(grammar.source, limits)
    schemas = [_call_schema(tool, index, grammar, limits) for index, tool in enumerate(tools)]
    calls = [f"call_{index}: %json {encode(schema)}" for index, schema in enumerate(schemas)]
    names = " | ".join(f"call_{index}" for index in range(len(tools)))
    more = "" if max_calls == 1 else ' ("\\n" call)*' if max_calls is None else f' ("\\n" call){{0,{max_calls - 1}}}'
    opening, closing = quoted(OPENING), quoted(CLOSING)
    if call_tags is not None:
        opening, closing = f'<[{call_tags[0]}]> "\\n"', f'"\\n" <[{call_tags[1]}]>'
    return "\n".join(
        [f"start: call{more}", f"call: {opening} ({names}) {closing}", *calls, ""],
    )


def parameters_of(source: str, limits: GrammarLimits) -> list[str | None]:
    """The schema of each tool's arguments, as JSON text; None if it has none. Raises GrammarRefused."""
    tools, _ = _read(source, limits)
    schemas = [tool.get("parameters") for tool in tools]
    return [None if schema is None else encode(schema) for schema in schemas]


def _read(source: str, limits: GrammarLimits) -> tuple[list[Json], int | None]:
    if len(source.encode()) > limits.max_source_bytes:
        raise GrammarRefused(Refusal.LIMIT, f"has more than {limits.max_source_bytes} bytes")
    try:
        content = read_json(source, limits)
        tools, max_calls = content["tools"], content.get("max_calls")
        names = [str(tool["name"]) for tool in tools]
    except (KeyError, TypeError, AttributeError):
        raise GrammarRefused(Refusal.SYNTAX, "is not a list of tools") from None
    if not names or (max_calls is not None and (not isinstance(max_calls, int) or max_calls < 1)):
        raise GrammarRefused(Refusal.SYNTAX, "needs at least one tool and one call")
    return tools, max_calls


def _call_schema(tool: Json, index: int, grammar: Grammar, limits: GrammarLimits) -> Json:
    check_text(tool["name"], f"tools[{index}].name")
    parameters: Any = tool.get("parameters")
    if parameters is None:
        parameters = {"type": "object"}
    place = Place(root=_ARGUMENTS, path=f"tools[{index}].parameters")
    arguments = rewrite(parameters, limits, place, format_as_annotation=grammar.format_as_annotation)
    if isinstance(arguments, dict):  # arguments are an object, even if the schema also allows other values
        types = arguments.get("type", "object")
        if "object" not in ([types] if isinstance(types, str) else types):
            raise GrammarRefused(Refusal.UNSATISFIABLE, "allows no object", path=f"{place.path}.type")
        arguments = arguments | {"type": "object"}
    return {
        "type": "object",
        "properties": {"name": {"const": tool["name"]}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
        "x-guidance": WHITE_SPACE,
    }
