"""Bodies of requests without a service: what they become, and that refusals have the names that callers used."""

import json
import math
from collections.abc import Sequence
from random import Random
from typing import Any

import grpc
import pytest

from octavo.client.errors import InvalidRequest as InvalidRequestOfClient
from octavo.client.errors import OctavoError
from octavo.client.requests import generate_request
from octavo.gateway.errors import InvalidRequest
from octavo.gateway.front.calls import refusing
from octavo.gateway.front.errors import ApiError, api_error, param_of
from octavo.gateway.front.fields import MAX_OUTPUTS, MAX_PROMPTS, ChatBody, CompletionBody, EmbeddingBody, parse
from octavo.gateway.validation import limits
from octavo.gateway.validation.generate import check_generate
from octavo.v1 import inference_pb2 as pb

USER = {"role": "user", "content": "hi"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
PART = {"type": "text", "text": "a"}
FORM = {"type": "json_schema"}
ODD = (None, 0, 1, -1, 2**31, 2**32, 2**64, -(10**30), 10**400, 0.5, math.nan, math.inf, 1e300, "", "a", "x" * 300)
ODD += ("\ud800", True, False, [], [1], [""], ["a"], [None], [[]], {}, {"a": 1}, {"5": 1.5}, {"-1": 1}, {"type": "x"})
# More than one word for a thing, or values that are often right.
LIKELY: dict[str, Sequence[Any]] = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "top_n_sigma"), (0.5, 1)),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "n", "seed", "top_k", "top_logprobs", "best_of"), (1, 3)),
    **dict.fromkeys(("stream", "logprobs", "echo", "ignore_eos", "parallel_tool_calls", "store"), (True, False)),
    **dict.fromkeys(("regex", "guided_regex"), ("a+",)),
    **dict.fromkeys(("ebnf", "grammar", "guided_grammar"), ('root ::= "a"',)),
    **{name: (["a", "b"],) for name in ("choice", "guided_choice", "stop", "bad_words")},
    **{name: ([5, 6],) for name in ("stop_token_ids", "allowed_token_ids", "prompt")},
    "guided_json": ({"type": "integer"}, '{"type": "integer"}', "{"),
    "response_format": ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {}}}),
    "messages": ([USER], [USER, {"role": "assistant", "tool_calls": [CALL]}], [{"role": "x"}], [USER | {"x": 1}]),
    "tools": ([TOOL], [TOOL | {"x": 1}], [{"type": "function", "function": {"name": "f", "description": 5}}]),
    "tool_choice": ("auto", "required", {"type": "function", "function": {"name": "f"}}),
    "stream_options": ({"include_usage": True},),
    "truncate_prompt_tokens": (2,),
    "min_tokens": (1,),
    "x": (1,),
}


def requests_of(path: str, body: bytes) -> list[pb.GenerateRequest]:
    """Checked. Raises ApiError, with the names that callers are told."""
    parsed: ChatBody | CompletionBody = parse(ChatBody if path == "chat" else CompletionBody, body)
    given = parsed.model_fields_set
    fields = parsed.fields()
    with refusing(given):
        made = [generate_request(**each) for each in (fields if isinstance(fields, list) else [fields])]
    for request in made:
        try:
            check_generate(request)
        except InvalidRequest as error:
            param = param_of(error.violations[0].field, given)
            raise ApiError(400, str(error), param=param) from None
    return made


def refused(path: str, **body: Any) -> str | None:
    with pytest.raises(ApiError) as caught:
        requests_of(path, json.dumps(body).encode())
    assert caught.value.status == 400
    assert caught.value.message
    return caught.value.param


@pytest.mark.parametrize("path", ["chat", "completions"])
def test_whatever_a_body_has_its_refusal_names_a_field_of_it(path: str) -> None:
    random, num_made, unnamed = Random(7), 0, list[tuple[ApiError, dict[str, Any]]]()
    for _ in range(4000):
        body: dict[str, Any] = {"messages": [USER]} if path == "chat" else {"prompt": "hi"}
        for name in random.sample([*LIKELY], random.choice((0, 1, 1, 2, 4))):
            body[name] = random.choice(ODD if random.random() < 0.3 else LIKELY[name])
        try:
            num_made += len(requests_of(path, json.dumps(body).encode()))
        except ApiError as error:
            if (error.param or "").partition("[")[0].partition(".")[0] not in body:
                unnamed.append((error, body))
    assert not unnamed
    assert num_made > 400


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "the body is not JSON in UTF-8"),
        (b"\xff{}", "the body is not JSON in UTF-8"),
        ("{}".encode("utf-16"), "the body is not JSON in UTF-8"),
        (b'{"prompt": "\xed\xa0\x80"}', "the body is not JSON in UTF-8"),
        (b"[" * 100_000, "the body is not JSON in UTF-8"),
        (b'{"n": ' + b"9" * 5000 + b"}", "the body is not JSON in UTF-8"),
        (b"[]", "the body must be a JSON object"),
        (b'{"\\ud800": 1}', "\\ud800: has half a surrogate pair, which no text can have"),
        (b'{"prompt": ["a", "\\uDFFF"]}', "prompt: has half a surrogate pair, which no text can have"),
    ],
)
def test_what_is_no_json_object_is_told(body: bytes, said: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse(CompletionBody, body)
    assert str(caught.value) == said
    assert caught.value.body()["error"]["message"].encode()


def test_a_whole_surrogate_pair_is_text() -> None:
    assert parse(CompletionBody, b'{"prompt": "\\ud83d\\ude00"}').prompt == "\N{GRINNING FACE}"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        *(
            ({name: True}, name)
            for name in ("max_tokens", "min_tokens", "n", "seed", "best_of", "logprobs", "priority")
        ),
        *(({name: False}, name) for name in ("truncate_prompt_tokens", "temperature", "top_k")),
        *(({name: [5, True]}, f"{name}[1]") for name in ("stop_token_ids", "allowed_token_ids")),
        ({"logit_bias": {"5": True}}, "logit_bias"),
        ({"prompt": [5, True]}, "prompt"),
        ({"prompt": [[5], [False]]}, "prompt"),
    ],
)
def test_true_is_no_number(body: dict[str, Any], param: str) -> None:
    told = "must be a text, a list of ids" if param == "prompt" else "input should be a valid"
    with pytest.raises(ApiError, match=told) as caught:
        parse(CompletionBody, json.dumps({"prompt": "x"} | body).encode())
    assert caught.value.param == param


@pytest.mark.parametrize("key", ["5_0", " 5", "05", "+5", "-1", "five", "", "99999999999"])
def test_a_bias_is_of_an_id_written_in_one_way(key: str) -> None:
    with pytest.raises(ApiError, match="keys should be token ids, as text") as caught:
        parse(CompletionBody, json.dumps({"prompt": "x", "logit_bias": {"5": 1.0, key: 2.0}}).encode())
    assert caught.value.param == "logit_bias"


_PROMPT = "must be a text, a list of ids, or a list of either"


@pytest.mark.parametrize(
    ("kind", "given", "told"),
    [
        *((CompletionBody, {"prompt": each}, f"prompt: {_PROMPT}") for each in (5, [1.5], [-1], ["a", [1]], {"a": 1})),
        (EmbeddingBody, {"input": {"text": "a"}}, f"input: {_PROMPT}"),
        (EmbeddingBody, {}, "input: field required"),
        (CompletionBody, {"stop": [None]}, "stop: must be a text or a list of texts"),
        (
            ChatBody,
            {"messages": [USER], "tool_choice": 5},
            "tool_choice: must be auto, none, required, or an object that names a function",
        ),
    ],
)
def test_a_field_of_several_forms_is_told_all_of_them(
    kind: type[ChatBody | CompletionBody | EmbeddingBody], given: dict[str, Any], told: str
) -> None:
    with pytest.raises(ApiError) as caught:
        parse(kind, json.dumps(given).encode())
    assert caught.value.message == told


def test_a_schema_that_is_no_object_is_told_as_such() -> None:
    asked = FORM | {"json_schema": {"name": "x", "schema": True}}
    with pytest.raises(ApiError, match=r"^response_format: .*json_schema\.schema is no object$"):
        requests_of("chat", json.dumps({"messages": [USER], "response_format": asked}).encode())


@pytest.mark.parametrize("value", [1, 0, "true", "no", 1.0])
def test_what_is_yes_or_no_is_told_by_true_and_false_alone(value: object) -> None:
    names = {
        CompletionBody: ("stream", "echo", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens"),
        ChatBody: ("stream", "logprobs", "parallel_tool_calls"),
    }
    for kind, flags in names.items():
        for name in flags:
            body = {"messages": [USER]} if kind is ChatBody else {"prompt": "x"}
            with pytest.raises(ApiError, match="input should be a valid boolean") as caught:
                parse(kind, json.dumps(body | {name: value}).encode())
            assert caught.value.param == name
    usage = {"prompt": "x", "stream": True, "stream_options": {"include_usage": value}}
    with pytest.raises(ApiError, match="stream_options: input should be a valid boolean"):
        parse(CompletionBody, json.dumps(usage).encode())


def test_no_token_that_may_come_is_no_request() -> None:
    assert refused("completions", prompt="hi", allowed_token_ids=[]) == "allowed_token_ids"


def test_true_is_no_number_of_chats_and_embeddings_either() -> None:
    chat, embedding = {"messages": [USER]}, {"input": "x"}
    for kind, body, name in (
        (ChatBody, chat, "max_completion_tokens"),
        (ChatBody, chat, "top_logprobs"),
        (EmbeddingBody, embedding, "dimensions"),
    ):
        with pytest.raises(ApiError, match=f"{name}: input should be a valid integer"):
            parse(kind, json.dumps(body | {name: True}).encode())
    assert parse(ChatBody, json.dumps(chat | {"max_tokens": 3.0}).encode()).max_tokens == 3


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [USER | {"reasoning_content": "because"}]}, "messages[0].reasoning_content"),
        ({"messages": [USER | {"content": [PART | {"x": 1}]}]}, "messages[0].content[0].x"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": "f"}]}]}, "messages[0].tool_calls[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": [CALL | {"x": 1}]}]}, "messages[0].tool_calls[0].x"),
        ({"tools": [TOOL | {"x": 1}]}, "tools[0].x"),
        ({"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}, "tools[0].function.x"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}, "tools[0].function.parameters"),
        ({"tools": [TOOL], "tool_choice": {"function": {"name": "auto"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"function": "f"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "custom", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"function": {"name": "f"}, "mode": "auto"}}, "tool_choice.mode"),
        ({"tools": [TOOL], "tool_choice": {"function": {"name": "f", "x": 1}}}, "tool_choice.function.x"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": {"type": "text", "text": "a"}}]}, "messages[0].content"),
        ({"response_format": {"type": "json_object", "schema": {"type": "object"}}}, "response_format.schema"),
        ({"response_format": FORM | {"json_schema": {"schema": {}, "x": 1}}}, "response_format.json_schema.x"),
        ({"guided_json": {}, "response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_json": "{}", "regex": "a"}, "guided_json"),
        ({"regex": "a", "guided_regex": "b"}, "guided_regex"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"temperature": 10**400}, "temperature"),
        ({"seed": 2**64}, "seed"),
    ],
)
def test_fields_that_would_change_nothing_are_refused(body: dict[str, Any], param: str) -> None:
    assert refused("chat", **({"messages": [USER]} | body)) == param


def test_elements_are_named_as_the_service_names_them() -> None:
    assert refused("chat", messages=[USER, 5]) == "messages[1]"
    assert refused("chat", messages=[USER], modalities=["text", "audio"]) == "modalities[1]"
    assert refused("chat", messages=[USER], choice=["a", None]) == "choice[1]"


def test_what_clients_send_back_of_an_answer_is_taken() -> None:
    """The fields that the message of an answer has, unset ones included."""
    answered = {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "audio": None, "name": "bob"}
    turns = [USER, answered, {"role": "assistant", "content": None, "tool_calls": [CALL | {"index": 0}]}]
    (request,) = requests_of("chat", json.dumps({"messages": turns, "tools": [TOOL]}).encode())
    assert [each.content for each in request.chat.messages] == ["hi", "x", ""]
    assert request.chat.messages[2].tool_calls[0] == pb.ToolCall(id="c", name="f", arguments_json="{}")
    assert request.chat.tools[0] == pb.ToolDefinition(name="f", parameters_json='{"type": "object"}')


def test_a_developer_is_the_system() -> None:
    turns = [{"role": "developer", "content": "Be brief."}, USER]
    (request,) = requests_of("chat", json.dumps({"messages": turns}).encode())
    assert [each.role for each in request.chat.messages] == [pb.CHAT_ROLE_SYSTEM, pb.CHAT_ROLE_USER]


def test_null_is_unset_within_objects_too() -> None:
    options = {"include_usage": None, "include_obfuscation": None}
    unset = {"messages": [USER], "stream": True, "stream_options": {}, "tools": [TOOL]}
    unset["tool_choice"] = {"function": {"name": "f"}}
    nulls = unset | {"stream_options": options, "tool_choice": {"type": None, "function": {"name": "f"}}}
    assert requests_of("chat", json.dumps(nulls).encode()) == requests_of("chat", json.dumps(unset).encode())


def test_of_two_limits_both_hold() -> None:
    for one, other in ((5, 9), (9, 5)):
        body = {"messages": [USER], "max_tokens": one, "max_completion_tokens": other}
        (request,) = requests_of("chat", json.dumps(body).encode())
        assert request.stop.max_tokens == 5


def test_there_are_so_many_prompts() -> None:
    assert len(requests_of("completions", json.dumps({"prompt": ["a"] * MAX_PROMPTS}).encode())) == MAX_PROMPTS
    assert refused("completions", prompt=["a"] * (MAX_PROMPTS + 1)) == "prompt"


def test_outputs_that_no_service_makes_are_no_reason_to_take_memory() -> None:
    """A place for each was made before the service refused them: minutes without an answer to anybody."""
    assert MAX_OUTPUTS == limits.MAX_OUTPUTS
    for n in (MAX_OUTPUTS + 1, 2**32 - 1, 0, -1):
        assert refused("completions", prompt="hi", n=n) == "n"
        with pytest.raises(ApiError, match=rf"n: must be in \[1, 128\], not {n}"):
            parse(ChatBody, json.dumps({"messages": [USER], "n": n}).encode()).fields()


@pytest.mark.parametrize(
    ("field", "given", "param"),
    [
        ("stop.max_tokens", {"max_tokens"}, "max_tokens"),
        ("stop.max_tokens", {"max_completion_tokens"}, "max_completion_tokens"),
        ("stop.strings[2]", {"stop"}, "stop[2]"),
        ("output.logprobs", {"logprobs"}, "logprobs"),
        ("output.logprobs", {"logprobs", "top_logprobs"}, "top_logprobs"),
        ("constraint.json_schema", {"guided_json"}, "guided_json"),
        ("constraint.choice.options[1]", {"guided_choice"}, "guided_choice[1]"),
        ("constraint", {"grammar"}, "grammar"),
        ("token_ids.ids[3]", {"prompt"}, "prompt[3]"),
        ("inputs[1].token_ids.ids[3]", {"input"}, "input[1][3]"),
        ("chat.tools[0].parameters_json", {"tools"}, "tools[0].function.parameters"),
        ("chat.messages[1].tool_calls[0].arguments_json", {"messages"}, "messages[1].tool_calls[0].function.arguments"),
        ("sampling.logit_bias[5]", {"logit_bias"}, "logit_bias[5]"),
    ],
)
def test_fields_have_the_names_that_the_caller_used(field: str, given: set[str], param: str) -> None:
    assert param_of(field, given) == param


def test_a_message_that_is_too_large_for_grpc_is_not_to_be_tried_again() -> None:
    said = "SERVER: Received message larger than max (5 vs. 4)"
    told = api_error(InvalidRequestOfClient(said, code=grpc.StatusCode.RESOURCE_EXHAUSTED))
    assert (told.status, told.message) == (413, "the request has too many bytes")


@pytest.mark.parametrize(
    ("said", "reason", "given", "param", "told"),
    [
        ("num_outputs: 9 are too many", "EXCEEDS_CAPACITY", {"n", "prompt"}, "n", "n: 9 are too many"),
        ("9 outputs are too many", "EXCEEDS_CAPACITY", {"n", "prompt"}, "n", "9 outputs are too many"),
        ("9 tokens are too many", "EXCEEDS_CAPACITY", {"n", "messages"}, "messages", "9 tokens are too many"),
        ("inputs[3]: too long", "EXCEEDS_CAPACITY", {"input"}, "input[3]", "input[3]: too long"),
        (
            "constraint: nothing can match",
            "CONSTRAINT",
            {"guided_regex"},
            "guided_regex",
            "guided_regex: nothing can match",
        ),
        ("no such model", "MODEL_NOT_FOUND", {"model"}, "model", "model: no such model"),
        ("later", "QUEUE_FULL", {"prompt"}, None, "later"),
    ],
)
def test_errors_without_violations_name_what_they_are_about(
    said: str, reason: str, given: set[str], param: str | None, told: str
) -> None:
    error = OctavoError(said, code=grpc.StatusCode.INVALID_ARGUMENT, reason=reason)
    found = api_error(error, given)
    assert (found.param, found.message) == (param, told)
