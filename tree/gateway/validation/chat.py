"""A validated Chat in the form that templates expect."""

import json
from typing import Any

from octavo.v1 import inference_pb2 as pb

from gateway.text.chat_template import ChatInput

_ROLES = {
    pb.CHAT_ROLE_SYSTEM: "system",
    pb.CHAT_ROLE_USER: "user",
    pb.CHAT_ROLE_ASSISTANT: "assistant",
    pb.CHAT_ROLE_TOOL: "tool",
}


def chat_input(chat: pb.Chat) -> ChatInput:
    """Messages and tools as OpenAI's API has them; checked before (`generate`)."""
    return ChatInput(
        messages=[_message(message) for message in chat.messages],
        tools=[_tool(tool) for tool in chat.tools] if may_call_tools(chat) else None,
        add_generation_prompt=chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True,
    )


def may_call_tools(chat: pb.Chat) -> bool:
    """Whether the model is told of tools."""
    return bool(chat.tools) and chat.tool_choice != pb.TOOL_CHOICE_NONE


def _message(message: pb.ChatMessage) -> dict[str, Any]:
    entry: dict[str, Any] = {"role": _ROLES[message.role], "content": message.content}
    if message.tool_calls:
        entry["tool_calls"] = [_call(call) for call in message.tool_calls]
    if message.tool_call_id:
        entry["tool_call_id"] = message.tool_call_id
    return entry


def _call(call: pb.ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.loads(call.arguments_json)}
    return ({"id": call.id} if call.id else {}) | {"type": "function", "function": function}


def _tool(tool: pb.ToolDefinition) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters_json:
        function["parameters"] = json.loads(tool.parameters_json)
    return {"type": "function", "function": function}
