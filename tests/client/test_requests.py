import re

import pytest

from octavo.client.requests import GenerateFields, chat_message, generate_request, request_of
from octavo.v1 import inference_pb2


def test_every_field_lands_where_the_contract_has_it() -> None:
    request = generate_request(
        messages=[("system", "s"), {"role": "user", "content": "u"}], request_id="id", model="m", temperature=0.5,
        top_p=0.9, top_k=5, min_p=0.1, seed=7, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.3,
        top_n_sigma=1.5, max_tokens=9, min_tokens=1, stop=["x", "y"], stop_token_ids=[3], ignore_eos=True,
        output="text_and_token_ids", logprobs=2, skip_special_tokens=False, priority=-1, cache_salt="salt",
    )  # fmt: skip
    expected = inference_pb2.GenerateRequest(
        request_id="id",
        model="m",
        chat=inference_pb2.Chat(
            messages=[
                inference_pb2.ChatMessage(role=inference_pb2.CHAT_ROLE_SYSTEM, content="s"),
                inference_pb2.ChatMessage(role=inference_pb2.CHAT_ROLE_USER, content="u"),
            ]
        ),
        sampling=inference_pb2.SamplingParams(
            temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, seed=7, repetition_penalty=1.1, presence_penalty=0.2,
            frequency_penalty=0.3, top_n_sigma=1.5,
        ),
        stop=inference_pb2.StopConditions(
            max_tokens=9, min_tokens=1, strings=["x", "y"], token_ids=[3], ignore_eos=True
        ),
        output=inference_pb2.OutputOptions(
            format=inference_pb2.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS, logprobs=2, skip_special_tokens=False
        ),
        priority=-1,
        cache_salt="salt",
    )  # fmt: skip
    assert request == expected


def test_what_is_left_out_stays_unset() -> None:
    request = generate_request(text="t")
    assert request == inference_pb2.GenerateRequest(text="t")
    assert not request.HasField("sampling")
    assert not request.HasField("priority")


def test_every_field_of_the_contract_can_be_said() -> None:
    messages = (inference_pb2.SamplingParams, inference_pb2.StopConditions, inference_pb2.OutputOptions)
    names = {field.name for message in messages for field in message.DESCRIPTOR.fields}
    names |= {"request_id", "model", "priority", "cache_salt", "text", "token_ids"}
    renamed = {"strings": "stop", "format": "output", "token_ids": "stop_token_ids"}
    assert {renamed.get(name, name) for name in names} <= GenerateFields.__annotations__.keys()


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({}, "exactly one of text, token_ids, messages; got none"),
        ({"text": "a", "token_ids": [1]}, "got text, token_ids"),
        ({"text": "a", "max_token": 1}, "no field max_token"),
    ],
)
def test_a_request_that_cannot_be_is_a_type_error(fields: dict[str, object], complaint: str) -> None:
    with pytest.raises(TypeError, match=complaint):
        generate_request(**fields)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"text": 5}, "text: is text, not 5"),
        ({"text": None}, "text: is text, not None"),
        ({"text": "a", "model": 5}, "model: is text, not 5"),
        ({"text": "a", "regex": ["x"]}, "regex: is text, not ['x']"),
        ({"text": "a", "stop": [b"x", 5]}, "stop: 5 is no text"),
        ({"text": "a", "choice": ["x", None]}, "choice: None is no text"),
        ({"text": "a", "stop": 5}, "stop: is a sequence, not 5"),
        ({"text": "a", "stop_token_ids": 5}, "stop_token_ids: is a sequence, not 5"),
        ({"text": "a", "allowed_token_ids": b"ab"}, "allowed_token_ids: is a sequence, not the text b'ab'"),
        ({"token_ids": b"ab"}, "token_ids: is a sequence, not the text b'ab'"),
        ({"token_ids": "ab"}, "token_ids: is a sequence, not the text 'ab'"),
        ({"token_ids": None}, "token_ids: is a sequence, not None"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": 5}]}, "messages: tool_call_id: is text, not 5"),
        ({"messages": [("user", "x")], "tools": [{"name": 5}]}, "tools: name: is text, not 5"),
        ({"messages": [("user", "x")], "tool_choice": 5}, "tool_choice: is a word or the name of a tool, not 5"),
        ({"messages": [("user", "x")], "tool_choice": {"type": "function"}}, "tool_choice: is a word or the name of a"),
        ({"messages": [("user", "x")], "tools": [{"function": 5}]}, "tools: 5 is no function of a tool: it is a"),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"function": "f"}]}]},
            "messages: 'f' is no function of a tool call: it is a",
        ),
    ],
)
def test_what_is_no_text_or_no_sequence_is_told_with_its_value(fields: dict[str, object], told: str) -> None:
    """protobuf says "bad argument type for built-in operation"."""
    with pytest.raises(TypeError) as caught:
        generate_request(**fields)
    assert str(caught.value).startswith(told)


@pytest.mark.parametrize("fields", [{}, {"max_tokens": 3}])
def test_a_prompt_in_the_place_of_a_request_is_told_where_it_goes(fields: dict[str, int]) -> None:
    """It was sent, and came back as a fault of the server."""
    with pytest.raises(TypeError, match=r"^request: is a GenerateRequest, not 'Hello'; .* as text="):
        request_of("Hello", fields)  # type: ignore[arg-type]


def test_an_unknown_role_or_output_is_named() -> None:
    with pytest.raises(ValueError, match="role 'robot' is none of system, user, assistant, tool"):
        chat_message(("robot", "x"))
    with pytest.raises(ValueError, match="messages: role None is none of"):
        generate_request(messages=[{"content": "x"}])
    with pytest.raises(ValueError, match=r"messages: role \['user'\] is none of"):
        generate_request(messages=[{"role": ["user"], "content": "x"}])
    for output in ("words", ["text"]):
        with pytest.raises(ValueError, match=f"output {re.escape(repr(output))} is none of"):
            generate_request(text="a", output=output)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"max_tokens": -1}, ValueError),
        ({"top_k": -1}, ValueError),
        ({"logprobs": 2**32}, ValueError),
        ({"stop_token_ids": [-1]}, ValueError),
        ({"allowed_token_ids": [2**32]}, ValueError),
        ({"logit_bias": {-1: 1.0}}, ValueError),
        ({"num_outputs": -1}, ValueError),
        ({"regex": "\ud83d"}, ValueError),
        ({"temperature": "hot"}, TypeError),
        ({"stop": [5]}, TypeError),
        ({"stop": "END"}, TypeError),
        ({"bad_words": "fox"}, TypeError),
        ({"choice": "yes"}, TypeError),
    ],
)
def test_a_value_that_a_field_cannot_hold_names_the_field(fields: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error, match=f"^{next(iter(fields))}: "):
        generate_request(text="a", **fields)


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ("hello", "is a sequence of messages, not 'hello'"),
        ({"role": "user", "content": "x"}, "is a sequence of messages, not {"),
        (["hello"], "'hello' is no message: write"),
        ([("user",)], r"\('user',\) is no message"),
        ([5], "5 is no message"),
        ([{"role": "user", "contents": "x"}], "a message has content; this one has role, contents"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], "content is text, not "),
        (
            [{"role": "user", "content": "x", "name": "Ann"}],
            "a message has no name; it has role, content, tool_calls, ",
        ),
    ],
)
def test_messages_that_are_none_are_named(messages: object, told: str) -> None:
    with pytest.raises(TypeError, match=f"^messages: {told}"):
        generate_request(messages=messages)


def test_fields_of_a_message_that_are_none_do_not_count() -> None:
    given = {"role": "assistant", "content": "x", "refusal": None, "audio": None}
    assert generate_request(messages=[given]) == generate_request(messages=[("assistant", "x")])


@pytest.mark.parametrize("tools", [["weather"], {"name": "weather"}])
def test_tools_that_are_none_are_named(tools: object) -> None:
    with pytest.raises(TypeError, match=r"^tools: '(weather|name)' is no tool"):
        generate_request(messages=[("user", "hi")], tools=tools)


@pytest.mark.parametrize("calls", [["weather"], {"name": "weather"}])
def test_tool_calls_that_are_none_are_named(calls: object) -> None:
    with pytest.raises(TypeError, match=r"^messages: '(weather|name)' is no tool call"):
        generate_request(messages=[{"role": "assistant", "tool_calls": calls}])


@pytest.mark.parametrize("given", [{"token_ids": [-1]}, {"text": "\ud83d"}])
def test_an_input_that_cannot_be_sent_is_named(given: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(given))}: "):
        generate_request(**given)


@pytest.mark.parametrize("function", [{"arguments": ""}, {"arguments": None}, {"arguments": {}}, {}])
def test_a_call_without_arguments_has_none(function: dict[str, object]) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "now"} | function}
    message = chat_message({"role": "assistant", "content": None, "tool_calls": [call]})
    assert [each.arguments_json for each in message.tool_calls] == ["{}"]


def test_a_message_of_the_contract_passes_as_it_is() -> None:
    message = inference_pb2.ChatMessage(role=inference_pb2.CHAT_ROLE_TOOL, content="c", tool_call_id="i")
    assert chat_message(message) is message


def test_an_input_of_no_ids_stays_an_input() -> None:
    """The server tells that it is empty, and not that there is none."""
    assert generate_request(token_ids=[]).WhichOneof("input") == "token_ids"
