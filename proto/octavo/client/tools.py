"""Converts tools and tool calls from plain Python values to the contract's messages. Pure: no I/O.

from octavo import Client, tool_result

stream = client.stream(messages=messages, tools=[weather], tool_choice="auto")
text = "".join(stream)
for call in stream.tool_calls:
    messages.append(tool_result(call, run(call.name, json.loads(call.arguments_json))))
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.client.field_values import made, naming
from octavo.v1 import inference_pb2

Tool = inference_pb2.ToolDefinition | Mapping[str, Any]
"""A ToolDefinition, {"name": …, "description": …, "parameters": {schema}}, or that under "function" as in OpenAI's
API."""

Call = inference_pb2.ToolCall | Mapping[str, Any]
"""A ToolCall, {"id": …, "name": …, "arguments": {…}}, or name and arguments under "function" as in OpenAI's API."""

_CHOICES = {
    "auto": inference_pb2.TOOL_CHOICE_AUTO,
    "none": inference_pb2.TOOL_CHOICE_NONE,
    "required": inference_pb2.TOOL_CHOICE_REQUIRED,
}


def tool_definition(tool: Tool) -> inference_pb2.ToolDefinition:
    """The tool as a ToolDefinition. Raises ValueError if it has no name, TypeError if it is not a tool."""
    if isinstance(tool, inference_pb2.ToolDefinition):
        return tool
    if not isinstance(tool, Mapping):
        raise TypeError(f"{tool!r} is no tool: a ToolDefinition or a dictionary")
    fields = tool.get("function", tool)
    if not isinstance(fields, Mapping):
        raise TypeError(f"{fields!r} is no function of a tool: it is a dictionary")
    if not fields.get("name"):
        raise ValueError("a tool has a name")
    parameters = fields.get("parameters")
    return made(
        inference_pb2.ToolDefinition(),
        name=fields["name"],
        description=fields.get("description"),
        parameters_json=None if parameters is None else _json_text(parameters),
    )


def tool_call(call: Call) -> inference_pb2.ToolCall:
    """The call as a ToolCall. Raises ValueError if it has no name, TypeError if it is not a call."""
    if isinstance(call, inference_pb2.ToolCall):
        return call
    if not isinstance(call, Mapping):
        raise TypeError(f"{call!r} is no tool call: a ToolCall or a dictionary")
    fields = call.get("function", call)
    if not isinstance(fields, Mapping):
        raise TypeError(f"{fields!r} is no function of a tool call: it is a dictionary")
    if not fields.get("name"):
        raise ValueError("a tool call has a name")
    arguments = fields.get("arguments") or {}  # some servers send no arguments as ""
    return made(inference_pb2.ToolCall(), id=call.get("id"), name=fields["name"], arguments_json=_json_text(arguments))


def set_tools(chat: inference_pb2.Chat, tools: Iterable[Tool], choice: str) -> None:
    """Set a chat's tools. choice: "auto", "none", "required", the name of a tool that must be called, or "" for the
    server's default. Raises TypeError or ValueError whose message begins with tools or tool_choice."""
    with naming("tools"):
        chat.tools.extend(map(tool_definition, tools))
    with naming("tool_choice"):
        if choice and not isinstance(choice, str):
            raise TypeError(f"is a word or the name of a tool, not {choice!r}")
        if choice in _CHOICES:
            chat.tool_choice = _CHOICES[choice]
        elif choice:
            chat.tool_choice, chat.tool_name = inference_pb2.TOOL_CHOICE_NAMED, choice


def tool_result(call: inference_pb2.ToolCall, content: str) -> inference_pb2.ChatMessage:
    """The message that gives the model the result of a call."""
    return inference_pb2.ChatMessage(role=inference_pb2.CHAT_ROLE_TOOL, content=content, tool_call_id=call.id)


def assistant_turn(text: str, calls: Iterable[inference_pb2.ToolCall]) -> inference_pb2.ChatMessage:
    """The model's text and calls, as a message of the conversation."""
    return inference_pb2.ChatMessage(role=inference_pb2.CHAT_ROLE_ASSISTANT, content=text, tool_calls=calls)


def _json_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@dataclass(slots=True)
class ToolCalls:
    """The calls of one output, assembled from their pieces. Withdrawn calls are removed."""

    _by_index: dict[int, inference_pb2.ToolCall] = field(default_factory=dict)

    def take(self, pieces: Iterable[inference_pb2.ToolCallDelta]) -> None:
        """Add the pieces of one Delta."""
        for piece in pieces:
            if piece.is_withdrawn:
                self._by_index.pop(piece.call_index, None)
                continue
            call = self._by_index.setdefault(piece.call_index, inference_pb2.ToolCall())
            call.id, call.name = call.id or piece.id, call.name or piece.name
            call.arguments_json += piece.arguments_json

    def all(self) -> list[inference_pb2.ToolCall]:
        """All calls, in order; the last one may be incomplete while the stream runs."""
        return [self._by_index[index] for index in sorted(self._by_index)]
