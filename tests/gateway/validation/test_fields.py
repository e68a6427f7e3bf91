"""Every field of every request, by its descriptor: none can be forgotten."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.gateway.errors import InvalidRequest
from octavo.gateway.servicers.model import supported_paths
from octavo.gateway.validation.fields import TABLE, check
from octavo.gateway.validation.generate import check_complete, check_embed, check_generate, check_tokenize
from octavo.v1 import admin_pb2, common_pb2, inference_pb2, load_pb2, model_pb2
from octavo.v1 import inference_pb2 as pb

MODULES = (admin_pb2, inference_pb2, load_pb2, model_pb2)
REQUESTS = [
    method.input_type for module in MODULES for s in module.DESCRIPTOR.services_by_name.values() for method in s.methods
]
CHECKS = {
    "octavo.v1.GenerateRequest": check_generate,
    "octavo.v1.CompleteRequest": check_complete,
    "octavo.v1.TokenizeRequest": check_tokenize,
    "octavo.v1.EmbedRequest": check_embed,
}


def messages_in(message: Descriptor) -> Iterator[Descriptor]:
    yield message
    for field in message.fields:
        if field.message_type is not None and not is_map(field):
            yield from messages_in(field.message_type)


def is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def good() -> pb.GenerateRequest:
    """Every field set (chat is the input), all in range."""
    call = pb.ToolCall(id="c1", name="f", arguments_json='{"x": 1}')
    return pb.GenerateRequest(
        request_id="r1",
        model="tiny",
        chat=pb.Chat(
            messages=[
                pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="hi"),
                pb.ChatMessage(role=pb.CHAT_ROLE_ASSISTANT, tool_calls=[call]),
                pb.ChatMessage(role=pb.CHAT_ROLE_TOOL, content="42", tool_call_id="c1"),
            ],
            tools=[pb.ToolDefinition(name="f", description="d", parameters_json='{"type": "object"}')],
            add_generation_prompt=True,
        ),
        sampling=pb.SamplingParams(
            temperature=0.5, top_p=0.5, top_k=5, min_p=0.5, seed=5, repetition_penalty=1.5,
            presence_penalty=0.5, frequency_penalty=0.5, typical_p=0.5, logit_bias={7: 1.5}, allowed_token_ids=[1, 2],
            bad_words=["w"], top_n_sigma=0.5,
        ),
        stop=pb.StopConditions(
            max_tokens=5, min_tokens=2, strings=["x"], token_ids=[3], ignore_eos=True, include_stop=True
        ),
        output=pb.OutputOptions(
            format=pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS, logprobs=2, skip_special_tokens=False, prompt_logprobs=3,
            echo=True, return_prompt=True,
        ),
        num_outputs=2,
        truncate_prompt_tokens=9,
        priority=5,
        cache_salt="s",
        constraint=pb.Constraint(choice=pb.Choice(options=["yes", "no"])),
    )  # fmt: skip


def fields_of(check_it: Any, message: Message) -> tuple[str, ...]:
    with pytest.raises(InvalidRequest) as caught:
        check_it(message)
    return tuple(violation.field for violation in caught.value.violations)


def test_the_table_has_a_row_for_every_field_and_no_other() -> None:
    expected = {m.full_name: {field.name for field in m.fields} for top in REQUESTS for m in messages_in(top)}
    assert {name: set(rules.fields) for name, rules in TABLE.items()} == expected


def test_a_request_with_every_field_is_good() -> None:
    check_generate(good())
    check_complete(pb.CompleteRequest(generate=good()))
    for request in (pb.GenerateRequest(text="x"), pb.GenerateRequest(token_ids=common_pb2.TokenIds(ids=[1]))):
        check_generate(request)


# path -> (how to break it, values that are wrong, values at the border that are right)
NAN, INF = math.nan, math.inf
BORDERS: dict[str, tuple[list[Any], list[Any]]] = {
    "request_id": (["a b", "é", "x" * 129, "\n", "\x7f"], ["x" * 128, "!", "~"]),
    "model": (["m" * 257], ["m" * 256]),
    "priority": ([-101, 101], [-100, 100]),
    "cache_salt": (["s" * 129, "é" * 65], ["é" * 64]),
    "sampling.temperature": ([-0.001, 100.1, NAN, INF, -INF], [0, 100]),
    "sampling.top_p": ([0, -0.1, 1.0001, NAN, INF], [1e-30, 1]),
    "sampling.top_k": ([], [0, 2**32 - 1]),
    "sampling.min_p": ([-0.001, 1.001, NAN], [0, 1]),
    "sampling.seed": ([], [0, 2**64 - 1]),
    "sampling.repetition_penalty": ([0, -1, 1e-38, 1e-6, 100.1, NAN], [2e-6, 0.01, 100]),
    "sampling.presence_penalty": ([-10.1, 10.1, NAN], [-10, 10]),
    "sampling.frequency_penalty": ([-10.1, 10.1, NAN], [-10, 10]),
    "sampling.top_n_sigma": ([-0.001, 100.1, NAN, INF], [0, 1.5, 100]),
    "sampling.typical_p": ([0, -0.1, 1.0001, NAN, INF], [1e-30, 1]),
    "num_outputs": ([0, 129, 2**32 - 1], [1, 128]),
    "truncate_prompt_tokens": ([0], [1, 2**32 - 1]),
    "output.prompt_logprobs": ([21, 2**32 - 1], [0, 20]),
    "output.echo": ([], [True, False]),
    "output.return_prompt": ([], [True, False]),
    "stop.include_stop": ([], [True, False]),
    "stop.max_tokens": ([0], [2, 2**32 - 1]),
    "stop.min_tokens": ([6], [0, 5]),
    "stop.ignore_eos": ([], [True, False]),
    "output.format": ([4, -1], [0, 1, 3]),
    "output.logprobs": ([21, 2**32 - 1], [0, 20]),
    "output.skip_special_tokens": ([], [True, False]),
    "output.parse_tool_calls": ([], [True, False]),
    "constraint.json_schema": ([""], ["{}"]),
    "constraint.json_object": ([False], [True]),
    "constraint.regex": (["", "x" * 4097], ["x" * 4096]),
    "constraint.ebnf": ([""], ['root ::= "x"']),
    "timeout_s": ([0, -1, 86_400.1, NAN, INF], [1e-3, 86_400]),
    "return_partial_on_deadline": ([], [True, False]),
    "format_as_annotation": ([], [True, False]),
    "chat.add_generation_prompt": ([], [True, False]),
    "chat.tool_choice": ([5, -1], [0, 1, 2]),
    "chat.tool_name": (["f"], [""]),
}


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


ELEMENTS: dict[str, tuple[list[Any], list[Any]]] = {
    "sampling.logit_bias[7]": ([-100.1, 100.1, NAN, INF, -INF], [-100, 0, 100]),
    "sampling.bad_words[0]": (["", "x" * 257, "é" * 129], ["é" * 128]),
    "stop.strings[0]": (["", "x" * 257, "é" * 129], ["é" * 128]),
    "constraint.choice.options[0]": (["", "x" * 4097], ["é" * 2048]),
    "chat.messages[0].role": ([0, 5, -1], [1, 2]),
    "chat.messages[0].content": ([], ["", "x" * 100_000]),
    "chat.messages[2].tool_call_id": (["x" * 257], ["", "x"]),
    "chat.messages[1].tool_calls[0].id": (["x" * 257], ["", "x"]),
    "chat.messages[1].tool_calls[0].name": (["", "x" * 257], ["x"]),
    "chat.messages[1].tool_calls[0].arguments_json": (
        ["", "x", "[]", "1", '{"x": NaN}', '{"x": "\\ud800"}', "[" * 100_000, nested(121), nested(5_000)],
        ["{}", '{"é": [1]}', nested(120)],
    ),
    "chat.tools[0].name": (["", "x" * 257], ["x"]),
    "chat.tools[0].description": ([], ["", "x"]),
    "chat.tools[0].parameters_json": (["x", "[]", "null", "{", nested(121)], ["", "{}", nested(120)]),
}


def set_path(message: Any, path: str, value: Any) -> None:
    *parents, last = path.replace("]", "").replace("[", ".").split(".")
    for name in parents:
        message = message[int(name)] if name.isdigit() else getattr(message, name)
    if last.isdigit():
        message[int(last)] = value
    else:
        setattr(message, last, value)


@pytest.mark.parametrize("path", [*BORDERS, *ELEMENTS])
def test_a_value_out_of_range_is_refused_by_its_path_and_the_border_is_not(path: str) -> None:
    wrong, right = (BORDERS | ELEMENTS)[path]
    for value in right:
        request = good()
        set_path(request, path, value)
        check_generate(request)
    for value in wrong:
        request = good()
        set_path(request, path, value)
        assert path in fields_of(check_generate, request), value
        assert f"generate.{path}" in fields_of(check_complete, pb.CompleteRequest(generate=request))


def test_every_field_of_generate_is_in_the_tables_above_or_refers_to_the_model() -> None:
    import re

    tested = {re.sub(r"\[\d+\]", "", path) for path in [*BORDERS, *ELEMENTS]}
    of_the_model = {"text", "token_ids.ids", "stop.token_ids", "sampling.allowed_token_ids"}
    assert set(supported_paths(pb.GenerateRequest.DESCRIPTOR)) == tested | of_the_model


@pytest.mark.parametrize("top", REQUESTS, ids=lambda d: d.name)
def test_unknown_fields_are_named_at_every_depth(top: Descriptor) -> None:
    from google.protobuf.message_factory import GetMessageClass

    def with_unknown(message: Descriptor) -> Iterator[tuple[Message, str]]:
        yield GetMessageClass(message).FromString(b"\xf8\x7f\x01"), "#2047"  # field 2047, varint 1
        for field in message.fields:
            if field.message_type is None or is_map(field):
                continue
            for inner, path in with_unknown(field.message_type):
                outer = GetMessageClass(message)()
                if field.is_repeated:
                    getattr(outer, field.name).append(inner)
                    yield outer, f"{field.name}[0].{path}"
                else:
                    getattr(outer, field.name).CopyFrom(inner)
                    yield outer, f"{field.name}.{path}"

    cases = list(with_unknown(top))
    assert len(cases) == len(list(messages_in(top)))
    for message, path in cases:
        assert path in fields_of(CHECKS.get(top.full_name, check), message)


def test_exactly_one_input_is_required() -> None:
    assert fields_of(check_generate, pb.GenerateRequest()) == ("input",)
    assert fields_of(check_tokenize, pb.TokenizeRequest()) == ("input",)
    assert fields_of(check_complete, pb.CompleteRequest()) == ("generate",)
    assert fields_of(check_generate, pb.GenerateRequest(text="")) == ("text",)
    assert fields_of(check_generate, pb.GenerateRequest(token_ids=common_pb2.TokenIds())) == ("token_ids.ids",)
    assert fields_of(check_generate, pb.GenerateRequest(chat=pb.Chat())) == ("chat.messages",)


def test_lists_have_limits() -> None:
    def stop(**fields: Any) -> pb.GenerateRequest:
        return pb.GenerateRequest(text="x", stop=pb.StopConditions(**fields))

    check_generate(stop(strings=["x"] * 64, token_ids=[1] * 64))
    assert fields_of(check_generate, stop(strings=["x"] * 65)) == ("stop.strings",)
    assert fields_of(check_generate, stop(token_ids=[1] * 65)) == ("stop.token_ids",)
    many = pb.Chat(messages=[pb.ChatMessage(role=pb.CHAT_ROLE_USER)] * 10_001)
    assert fields_of(check_generate, pb.GenerateRequest(chat=many)) == ("chat.messages",)
    bad = pb.Chat(messages=[pb.ChatMessage()] * 1000)
    assert len(fields_of(check_generate, pb.GenerateRequest(chat=bad))) == 16


def test_fields_that_contradict_each_other_are_named() -> None:
    request = pb.GenerateRequest(text="x", stop=pb.StopConditions(max_tokens=2, min_tokens=3))
    assert fields_of(check_generate, request) == ("stop.min_tokens",)
    request = pb.GenerateRequest(
        text="x",
        stop=pb.StopConditions(strings=["x"]),
        output=pb.OutputOptions(format=pb.OUTPUT_FORMAT_TOKEN_IDS, skip_special_tokens=True),
    )
    assert fields_of(check_generate, request) == ("stop.strings", "output.skip_special_tokens")
    call = pb.ToolCall(name="f", arguments_json="{}")
    user = pb.ChatMessage(role=pb.CHAT_ROLE_USER, tool_calls=[call], tool_call_id="x")
    chat = pb.Chat(messages=[user])
    expected = ("chat.messages[0].tool_calls", "chat.messages[0].tool_call_id")
    assert fields_of(check_generate, pb.GenerateRequest(chat=chat)) == expected
    assert fields_of(check_tokenize, pb.TokenizeRequest(chat=chat)) == expected
    embed = pb.EmbedRequest(inputs=[pb.EmbedInput(text="x"), pb.EmbedInput(chat=chat)])
    assert fields_of(check_embed, embed) == tuple(f"inputs[1].{path}" for path in expected)


def test_a_forced_choice_needs_its_tools() -> None:
    def wrong(**fields: Any) -> tuple[str, ...]:
        chat = pb.Chat(messages=[pb.ChatMessage(role=pb.CHAT_ROLE_USER)], **fields)
        return fields_of(check_tokenize, pb.TokenizeRequest(chat=chat))

    f = pb.ToolDefinition(name="f")
    assert wrong(tool_name="f", tools=[f]) == ("chat.tool_name",)
    assert wrong(tool_choice=pb.TOOL_CHOICE_REQUIRED) == ("chat.tool_choice",)
    assert wrong(tool_choice=pb.TOOL_CHOICE_REQUIRED, tools=[f, f]) == ("chat.tools[1].name",)
    assert wrong(tool_choice=pb.TOOL_CHOICE_NAMED, tools=[f]) == ("chat.tool_name",)
    assert wrong(tool_choice=pb.TOOL_CHOICE_NAMED, tool_name="g", tools=[f]) == ("chat.tool_name",)


def test_an_embed_request_is_checked_by_path() -> None:
    def request(**fields: Any) -> pb.EmbedRequest:
        return pb.EmbedRequest(**{"inputs": [pb.EmbedInput(text="x")], **fields})

    check_embed(request(inputs=[pb.EmbedInput(text="x")] * 256, pooling=pb.POOLING_MEAN, normalize=False))
    check_embed(request(priority=-100, timeout_s=86_400, truncate_prompt_tokens=1, cache_salt="s" * 128))
    assert fields_of(check_embed, request(inputs=[])) == ("inputs",)
    assert fields_of(check_embed, request(inputs=[pb.EmbedInput(text="x")] * 257)) == ("inputs",)
    inputs = [pb.EmbedInput(text="x"), pb.EmbedInput(), pb.EmbedInput(token_ids=common_pb2.TokenIds())]
    assert fields_of(check_embed, request(inputs=inputs)) == ("inputs[1].input", "inputs[2].token_ids.ids")
    wrong = {"pooling": 3, "truncate_prompt_tokens": 0, "priority": 101, "timeout_s": 0, "cache_salt": "s" * 129}
    assert fields_of(check_embed, request(**wrong)) == (
        "pooling", "truncate_prompt_tokens", "priority", "cache_salt", "timeout_s",
    )  # fmt: skip


def test_the_grace_of_a_drain_is_checked() -> None:
    for grace_s in (0, 86_400):
        check(admin_pb2.DrainRequest(grace_s=grace_s))
    for grace_s in (-1, NAN, INF):
        assert fields_of(check, admin_pb2.DrainRequest(grace_s=grace_s)) == ("grace_s",)
    assert fields_of(check, admin_pb2.AbortRequest()) == ("request_id",)


@settings(max_examples=300)
@given(data=st.binary(max_size=200))
def test_any_bytes_that_parse_are_good_or_refused_and_never_crash(data: bytes) -> None:
    for kind, check_it in ((pb.GenerateRequest, check_generate), (pb.CompleteRequest, check_complete)):
        try:
            message = kind.FromString(data)
        except Exception:
            continue
        found = ()
        try:
            check_it(message)
        except InvalidRequest as error:
            found = error.violations
        assert all(violation.field and violation.description for violation in found)


def leaf_values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    kinds: dict[int, st.SearchStrategy[Any]] = {
        FieldDescriptor.CPPTYPE_STRING: st.text(max_size=300),
        FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32),
        FieldDescriptor.CPPTYPE_DOUBLE: st.floats(),
        FieldDescriptor.CPPTYPE_UINT32: st.integers(0, 2**32 - 1),
        FieldDescriptor.CPPTYPE_UINT64: st.integers(0, 2**64 - 1),
        FieldDescriptor.CPPTYPE_INT32: st.integers(-(2**31), 2**31 - 1),
        FieldDescriptor.CPPTYPE_ENUM: st.integers(-3, 9),
        FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    }
    return kinds[field.cpp_type]


@st.composite
def any_message(draw: st.DrawFn, kind: Any) -> Any:
    message = kind()
    for field in kind.DESCRIPTOR.fields:
        if is_map(field) or draw(st.booleans()):
            continue
        if field.message_type is not None:
            inner = type(getattr(message, field.name)) if not field.is_repeated else None
            if inner is not None:
                getattr(message, field.name).CopyFrom(draw(any_message(inner)))
        elif field.is_repeated:
            getattr(message, field.name).extend(draw(st.lists(leaf_values(field), max_size=3)))
        else:
            setattr(message, field.name, draw(leaf_values(field)))
    return message


@settings(max_examples=300)
@given(request=any_message(pb.GenerateRequest))
def test_whatever_passes_has_only_finite_numbers_in_range(request: pb.GenerateRequest) -> None:
    try:
        check_generate(request)
    except InvalidRequest:
        return
    params = request.sampling
    assert 0 <= params.temperature <= 100
    assert not params.HasField("top_p") or 0 < params.top_p <= 1
    assert request.WhichOneof("input") is not None


def test_where_nothing_is_chosen_the_choices_are_named() -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_tokenize(pb.TokenizeRequest())
    assert "input: one of text, chat must be set" in str(refused.value)
