"""Chats with tools over a real channel: what the model is told, and calls as events."""

import asyncio
import json
from typing import Any

import pytest

from octavo.gateway.text.model_text import ModelText
from octavo.v1 import inference_pb2 as pb
from octavo.wire.messages import WireFinishReason
from tests.support.gateway.fake_pool import FakePool, FakeRun
from tests.support.gateway.rpc_errors import refused
from tests.support.gateway.tokenizers_tiny import encode_chat, tiny_files

TOOLS = [pb.ToolDefinition(name="weather", description="d", parameters_json='{"type": "object"}')]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def chat(**fields: Any) -> pb.GenerateRequest:
    messages = [pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="hi")]
    output = fields.pop("output", None)
    return pb.GenerateRequest(chat=pb.Chat(messages=messages, tools=TOOLS, **fields), output=output)


def saying(text: str, model_text: ModelText, *, reason: WireFinishReason = WireFinishReason.STOP) -> FakePool:
    """A worker that says this token by token, and an end token where it stops."""
    ids = model_text.encode(text, max_bytes=1 << 20).ids_T.tolist()

    async def speak(run: FakeRun) -> None:
        for token_id in ids:
            run.tokens([token_id])
            await asyncio.sleep(0.005)
        if reason is WireFinishReason.STOP:
            run.tokens([0])
        run.finish(reason, stop_token_id=0 if reason is WireFinishReason.STOP else None)

    tasks: list[asyncio.Task[None]] = []
    return FakePool(on_run=lambda run: tasks.append(asyncio.create_task(speak(run))))


async def events_of(served: Any, request: pb.GenerateRequest) -> tuple[list[pb.Delta], pb.Finished]:
    events = [event async for event in served.inference.Generate(request)]
    return [event.delta for event in events[1:-1]], events[-1].finished


async def test_a_call_is_streamed_as_it_comes_and_its_text_is_not_text(serve: Any, tiny_text: ModelText) -> None:
    async with serve(saying(f"Hello {CALL} world", tiny_text)) as served:
        deltas, finished = await events_of(served, chat())
    assert "".join(delta.text for delta in deltas) == "Hello  world"
    pieces = [call for delta in deltas for call in delta.tool_calls]
    assert len(pieces) > 1
    assert (pieces[0].name, pieces[0].id[:5], len(pieces[0].id)) == ("weather", "call_", 29)
    assert {(piece.call_index, piece.name, piece.id) for piece in pieces[1:]} == {(0, "", "")}
    assert "".join(piece.arguments_json for piece in pieces) == '{"city": "Paris"}'
    assert finished.reason == pb.FINISH_REASON_TOOL_CALLS


async def test_the_unary_form_gives_whole_calls(serve: Any, tiny_text: ModelText) -> None:
    async with serve(saying(f"{CALL}\n{CALL}", tiny_text)) as served:
        response = await served.inference.Complete(pb.CompleteRequest(generate=chat()))
    assert response.text == ""
    assert [(call.name, call.arguments_json) for call in response.tool_calls] == [("weather", '{"city": "Paris"}')] * 2
    assert len({call.id for call in response.tool_calls}) == 2
    assert response.finished.reason == pb.FINISH_REASON_TOOL_CALLS


@pytest.mark.parametrize(
    "request_fields",
    [
        {"output": pb.OutputOptions(parse_tool_calls=False)},
        {"tool_choice": pb.TOOL_CHOICE_NONE},
    ],
    ids=["not parsed", "no tools"],
)
async def test_calls_stay_text_where_nothing_is_to_be_parsed(
    serve: Any, tiny_text: ModelText, request_fields: dict[str, Any]
) -> None:
    async with serve(saying(CALL, tiny_text)) as served:
        response = await served.inference.Complete(pb.CompleteRequest(generate=chat(**request_fields)))
    assert (response.text, len(response.tool_calls)) == (CALL, 0)
    assert response.finished.reason == pb.FINISH_REASON_STOP


async def test_a_call_that_is_cut_off_is_withdrawn_and_is_text(serve: Any, tiny_text: ModelText) -> None:
    broken = CALL[:60]
    pool = saying(f"{CALL}{broken}", tiny_text, reason=WireFinishReason.LENGTH)
    async with serve(pool) as served:
        deltas, finished = await events_of(served, chat())
        response = await served.inference.Complete(pb.CompleteRequest(generate=chat()))
    assert "".join(delta.text for delta in deltas) == broken
    assert [call.call_index for delta in deltas for call in delta.tool_calls if call.is_withdrawn] == [1]
    assert finished.reason == pb.FINISH_REASON_LENGTH
    assert (response.text, len(response.tool_calls)) == (broken, 1)


async def test_a_stop_string_ends_a_call_as_its_closing_tag_would(serve: Any, tiny_text: ModelText) -> None:
    request = chat()
    request.stop.strings.append("</tool_call>")
    async with serve(saying(f"{CALL} more", tiny_text)) as served:
        response = await served.inference.Complete(pb.CompleteRequest(generate=request))
    assert (response.text, len(response.tool_calls)) == ("", 1)
    assert response.finished.reason == pb.FINISH_REASON_TOOL_CALLS
    assert response.finished.stop.text == "</tool_call>"


async def test_the_template_gets_tools_only_where_they_may_be_called(serve: Any) -> None:
    async with serve() as served:
        told = await served.inference.Tokenize(pb.TokenizeRequest(chat=chat().chat))
        untold = await served.inference.Tokenize(pb.TokenizeRequest(chat=chat(tool_choice=pb.TOOL_CHOICE_NONE).chat))
    assert "weather" in told.text
    assert "weather" not in untold.text


async def test_ids_without_text_cannot_be_parsed(serve: Any) -> None:
    output = pb.OutputOptions(format=pb.OUTPUT_FORMAT_TOKEN_IDS, parse_tool_calls=True)
    async with serve() as served:
        refusal = await refused(served.inference.Generate(chat(output=output)))
    assert refusal.fields == ("output.parse_tool_calls",)


def test_tags_that_are_special_tokens_are_seen_all_the_same() -> None:
    files = tiny_files()
    tokenizer = json.loads(files["tokenizer.json"])
    for token in tokenizer["added_tokens"]:
        token["special"] = True
    text = ModelText(files | {"tokenizer.json": json.dumps(tokenizer).encode()}, num_ids=600)
    (tag,) = text.encode("<tool_call>", max_bytes=100).ids_T.tolist()
    assert (text.table.visible_bytes[tag], text.bytes_with_call_tags[tag]) == (b"", b"<tool_call>")
    plain = ModelText(files, num_ids=600)
    assert plain.bytes_with_call_tags is plain.table.visible_bytes


def test_qwens_own_tags_are_one_token_each(qwen_text: ModelText) -> None:
    ids = qwen_text.encode("<tool_call></tool_call>", max_bytes=100).ids_T.tolist()
    assert ids == [151_657, 151_658]
    assert [qwen_text.bytes_with_call_tags[token_id] for token_id in ids] == [b"<tool_call>", b"</tool_call>"]


def test_qwens_own_template_writes_what_is_parsed(qwen_text: ModelText) -> None:
    from octavo.gateway.text.chat_template import ChatInput
    from tests.gateway.text.whole_calls import parse_whole

    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "So:", "tool_calls": [call, call]}]
    text = encode_chat(qwen_text, ChatInput(messages=messages, add_generation_prompt=False), max_bytes=1 << 20).text
    plain, calls = parse_whole(text)
    assert calls == [("weather", '{"city": "Paris"}')] * 2
    assert plain.endswith("<|im_start|>assistant\nSo:\n<|im_end|>\n")
