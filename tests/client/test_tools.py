"""Tools in requests and calls in streams, of both clients."""

import pytest

from octavo import AsyncClient, Client, assistant_turn, tool_result
from octavo.client.requests import generate_request
from octavo.client.tools import tool_call, tool_definition
from octavo.v1 import inference_pb2 as pb
from tests.support.gateway.scripted_server import Script

SCHEMA = {"type": "object", "properties": {"stadt": {"type": "string", "description": "größer"}}}
PIECES = (
    pb.ToolCallDelta(call_index=0, id="c0", name="f", arguments_json='{"a"'),
    pb.ToolCallDelta(call_index=0, arguments_json=": 1}"),
    pb.ToolCallDelta(call_index=1, id="c1", name="g", arguments_json="{"),
    pb.ToolCallDelta(call_index=1, is_withdrawn=True),
    pb.ToolCallDelta(call_index=2, id="c2", name="g", arguments_json="{}"),
)
CALLS = [pb.ToolCall(id="c0", name="f", arguments_json='{"a": 1}'), pb.ToolCall(id="c2", name="g", arguments_json="{}")]


def test_tools_are_taken_in_the_fields_usual_forms() -> None:
    expected = pb.ToolDefinition(
        name="f",
        description="d",
        parameters_json='{"type": "object", "properties": {"stadt": {"type": "string", "description": "größer"}}}',
    )
    plain = {"name": "f", "description": "d", "parameters": SCHEMA}
    assert tool_definition(plain) == tool_definition({"type": "function", "function": plain}) == expected
    assert tool_definition(expected) is expected
    assert tool_definition({"name": "g"}) == pb.ToolDefinition(name="g")
    with pytest.raises(ValueError, match="has a name"):
        tool_definition({"description": "d"})


def test_calls_are_taken_in_the_fields_usual_forms() -> None:
    expected = pb.ToolCall(id="c", name="f", arguments_json='{"x": 1}')
    assert tool_call({"id": "c", "name": "f", "arguments": {"x": 1}}) == expected
    openai = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    assert tool_call(openai) == expected
    with pytest.raises(ValueError, match="has a name"):
        tool_call({"id": "c"})


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("", pb.Chat()),
        ("auto", pb.Chat(tool_choice=pb.TOOL_CHOICE_AUTO)),
        ("none", pb.Chat(tool_choice=pb.TOOL_CHOICE_NONE)),
        ("required", pb.Chat(tool_choice=pb.TOOL_CHOICE_REQUIRED)),
        ("f", pb.Chat(tool_choice=pb.TOOL_CHOICE_NAMED, tool_name="f")),
    ],
)
def test_a_choice_is_a_word_or_the_name_of_a_tool(choice: str, expected: pb.Chat) -> None:
    request = generate_request(messages=[("user", "u")], tools=[{"name": "f"}], tool_choice=choice)
    expected.messages.add(role=pb.CHAT_ROLE_USER, content="u")
    expected.tools.add(name="f")
    assert request.chat == expected


def test_tools_belong_to_messages() -> None:
    with pytest.raises(TypeError, match=r"^tools: goes with messages$"):
        generate_request(text="t", tools=[{"name": "f"}], tool_choice="auto")
    with pytest.raises(TypeError, match=r"^tool_choice: goes with messages$"):
        generate_request(token_ids=[1], tool_choice="f")


def test_a_conversation_goes_on_after_calls() -> None:
    messages = [
        ("user", "u"),
        assistant_turn("So:", CALLS[:1]),
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "name": "f", "arguments": {}}]},
        tool_result(CALLS[0], "42"),
        {"role": "tool", "content": "43", "tool_call_id": "c"},
    ]
    sent = generate_request(messages=messages).chat.messages
    assert list(sent[1].tool_calls) == CALLS[:1]
    assert sent[2].tool_calls[0] == pb.ToolCall(id="c", name="f", arguments_json="{}")
    assert (sent[3].role, sent[3].content, sent[3].tool_call_id) == (pb.CHAT_ROLE_TOOL, "42", "c0")
    assert (sent[4].content, sent[4].tool_call_id) == ("43", "c")


def test_calls_are_put_together_and_what_is_withdrawn_is_gone(script: Script, target: str) -> None:
    script.tool_calls = PIECES
    with Client(target) as client:
        stream = client.stream(messages=[("user", "u")], tools=[{"name": "f"}])
        deltas = stream.deltas()
        for _ in range(4):
            next(deltas)
        assert [(call.name, call.arguments_json) for call in stream.tool_calls] == [("f", '{"a"')]
        assert "".join(delta.text for delta in deltas) == ""
        assert stream.tool_calls == CALLS


async def test_the_same_for_asyncio(script: Script, target: str) -> None:
    script.tool_calls = PIECES
    async with AsyncClient(target) as client:
        stream = client.stream(messages=[("user", "u")], tools=[{"name": "f"}])
        assert "".join([text async for text in stream]) == "Hello, wörld"
        assert stream.tool_calls == CALLS
