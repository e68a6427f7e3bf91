"""Tokenizing and chat templates, against published vectors and against transformers."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from octavo.gateway.text.chat_template import ChatInput, ChatTemplate
from octavo.gateway.text.errors import PromptTooLong, TemplateError
from octavo.gateway.text.model_text import Bounds, ModelText, finish
from tests.support.gateway.tokenizers_tiny import TEMPLATE, encode_chat, tiny_files

LIMIT = 1 << 20
SPECIAL = ["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<|vision_start|>", "<|box_end|>"]
WORDS = [
    "Hello",
    " world",
    "\n",
    "\n\n",
    "你好",
    "🦙",
    " ",
    "def f():\n  ",
    "1234",
    "'s",
    "<|",
    "|>",
    "<tool_call>",
    "é",
    "e\u0301",
]


@pytest.mark.parametrize("name", ["llama_cpp_qwen2_tokenizer_vectors", "transformers_qwen2_tokenizer_vectors"])
def test_every_published_vector(qwen_text: ModelText, shared: Path, name: str) -> None:
    vectors = json.loads((shared / "data" / "refs" / f"{name}.json").read_text())
    assert len(vectors) in (45, 3)
    assert {v["text"]: qwen_text.encode(v["text"], max_bytes=LIMIT).ids_T.tolist() for v in vectors} == {
        v["text"]: v["ids"] for v in vectors
    }


def test_plain_text_recognises_special_tokens(qwen_text: ModelText) -> None:
    assert qwen_text.encode("<|im_start|>user", max_bytes=LIMIT).ids_T.tolist() == [151644, 872]


@pytest.mark.parametrize(
    "config",
    [
        b"[" * 100_000,
        b'{"chat_template": [{"name": ["default"], "template": "x"}, {"name": {}, "template": "y"}]}',
    ],
)
def test_settings_that_name_no_template_leave_the_tokenizer(config: bytes) -> None:
    text = ModelText(tiny_files() | {"tokenizer_config.json": config}, num_ids=320)
    with pytest.raises(TemplateError, match="has no chat template"):
        text.template_of(ChatInput(messages=[]))


def random_chat(rng: random.Random, words: list[str]) -> ChatInput:
    def text() -> str:
        return "".join(rng.choice(words) for _ in range(rng.randint(0, 8)))

    messages: list[dict[str, Any]] = []
    for _ in range(rng.randint(1, 6)):
        role = rng.choice(["system", "user", "assistant", "tool"])
        message: dict[str, Any] = {"role": role, "content": text()}
        if role == "assistant" and rng.random() < 0.5:
            call = {"name": "f", "arguments": {"x": text(), "y": [1, {"z": text()}]}}
            message["tool_calls"] = [{"type": "function", "function": call}]
        messages.append(message)
    parameters = {"type": "object", "properties": {"x": {"description": text()}}}
    tool = {"type": "function", "function": {"name": "f", "description": text(), "parameters": parameters}}
    return ChatInput(
        messages=messages, tools=[tool] if rng.random() < 0.3 else None, add_generation_prompt=rng.random() < 0.5
    )


def transformers_prompt(chat: ChatInput, qwen_files: dict[str, bytes]) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    template = json.loads(qwen_files["tokenizer_config.json"])["chat_template"]
    rendered, _ = render_jinja_template(
        conversations=[chat.messages],
        tools=chat.tools,
        chat_template=template,
        add_generation_prompt=chat.add_generation_prompt,
    )
    return str(rendered[0])


def test_ordinary_chats_are_tokenized_as_their_rendered_text_is(
    qwen_text: ModelText, qwen_tokenizer: Tokenizer, qwen_files: dict[str, bytes]
) -> None:
    rng = random.Random(0)
    for _ in range(300):
        chat = random_chat(rng, WORDS)
        encoded = encode_chat(qwen_text, chat, max_bytes=LIMIT)
        assert encoded.text == transformers_prompt(chat, qwen_files)
        assert encoded.ids_T.tolist() == qwen_tokenizer.encode(encoded.text, add_special_tokens=False).ids


def test_the_careful_way_gives_the_same_ids_where_there_is_nothing_to_be_careful_about(
    qwen_text: ModelText, qwen_tokenizer: Tokenizer, qwen_files: dict[str, bytes]
) -> None:
    rng = random.Random(1)
    for _ in range(300):
        rendered = transformers_prompt(random_chat(rng, WORDS), qwen_files)
        careful = finish(qwen_text.rendered_encoding(rendered, "\U000f0000", Bounds(max_bytes=LIMIT)))
        assert careful.ids_T.tolist() == qwen_tokenizer.encode(rendered, add_special_tokens=False).ids
        assert careful.text == rendered


def test_no_message_can_write_a_control_token(
    qwen_text: ModelText, qwen_tokenizer: Tokenizer, qwen_files: dict[str, bytes]
) -> None:
    """Special ids come from the template alone, the text is what the template renders, and nothing is lost."""
    rng, num_hostile = random.Random(2), 0
    special_ids = {token_id for token_id, t in qwen_tokenizer.get_added_tokens_decoder().items() if t.special}
    for _ in range(300):
        state = rng.getstate()
        hostile = random_chat(rng, WORDS + SPECIAL)
        rng.setstate(state)
        harmless = random_chat(rng, WORDS + ["x"] * len(SPECIAL))
        encoded = encode_chat(qwen_text, hostile, max_bytes=LIMIT)
        expected = encode_chat(qwen_text, harmless, max_bytes=LIMIT).ids_T.tolist()
        got = encoded.ids_T.tolist()
        assert [i for i in got if i in special_ids] == [i for i in expected if i in special_ids]
        assert encoded.text == transformers_prompt(hostile, qwen_files)
        assert qwen_tokenizer.decode(got, skip_special_tokens=False) == qwen_tokenizer.normalizer.normalize_str(
            encoded.text
        )
        num_hostile += any(token in str(hostile) for token in SPECIAL)
    assert num_hostile > 200


def test_keys_of_tool_arguments_cannot_write_control_tokens_either(qwen_text: ModelText) -> None:
    call = {"function": {"name": "f", "arguments": {"<|im_end|>": {"<|im_start|>": "x"}}}}
    chat = ChatInput(messages=[{"role": "assistant", "content": "", "tool_calls": [call]}])
    encoded = encode_chat(qwen_text, chat, max_bytes=LIMIT)
    assert encoded.ids_T.tolist().count(151645) == 2  # the system turn's and this turn's
    assert '"<|im_end|>"' in encoded.text


def test_what_is_nested_too_deeply_to_be_looked_into_is_the_callers_fault(tiny_text: ModelText) -> None:
    """As deep as the check of its JSON lets in."""
    for depth in (400, 900):
        schema = json.loads('{"<|im_end|>": ' * depth + "1" + "}" * depth)
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        chat = ChatInput(messages=[{"role": "user", "content": "hi"}], tools=tools)
        if depth == 400:
            assert tiny_text.marked(chat).mark
        else:
            with pytest.raises(TemplateError, match="nested too deeply"):
                tiny_text.marked(chat)


def test_private_use_characters_of_the_caller_are_kept(qwen_text: ModelText) -> None:
    text = "\U000f0000<|im_end|>\U000f0001 \\udb80\\udc02 \\\\udb80\\udc03\\udb80\\udc04"
    encoded = encode_chat(qwen_text, ChatInput(messages=[{"role": "user", "content": text}]), max_bytes=LIMIT)
    assert text in encoded.text
    assert qwen_text.decode_all(encoded.ids_T.tolist()) == encoded.text


def test_many_ids_are_decoded_as_few_are_and_all_their_bytes_are_counted(tiny_text: ModelText) -> None:
    piece_T = tiny_text.encode("Hé, you. ", max_bytes=100).ids_T
    many_T = np.tile(piece_T, 10_000)
    assert len(many_T) > 1 << 16
    assert tiny_text.decode_all(many_T) == tiny_text.decode_all(many_T.tolist()) == "Hé, you. " * 10_000
    assert tiny_text.decode_visible(many_T, max_bytes=100_000) == "Hé, you. " * 10_000
    with pytest.raises(PromptTooLong, match="100000 bytes, the limit is 99999"):
        tiny_text.decode_all(many_T, max_bytes=99_999)


def test_limits_count_bytes_of_what_is_tokenized(tiny_text: ModelText) -> None:
    assert len(tiny_text.encode("é" * 10, max_bytes=20).ids_T) > 0
    with pytest.raises(PromptTooLong, match="21 bytes, the limit is 20"):
        tiny_text.encode("é" * 10 + "a", max_bytes=20)
    with pytest.raises(PromptTooLong):
        encode_chat(tiny_text, ChatInput(messages=[{"role": "user", "content": "a"}]), max_bytes=20)


def test_templates_that_fail_name_what_they_refuse(tiny_text: ModelText) -> None:
    with pytest.raises(TemplateError, match="a tool cannot begin"):
        encode_chat(tiny_text, ChatInput(messages=[{"role": "tool", "content": "x"}]), max_bytes=LIMIT)
    with pytest.raises(TemplateError, match="no valid Unicode"):
        encode_chat(tiny_text, ChatInput(messages=[{"role": "user", "content": "\ud800"}]), max_bytes=LIMIT)
    for source in ("{{ messages[0].content.missing.attribute }}", "{{ 1 / 0 }}", "{{ messages.append(1) }}", "{% bad"):
        with pytest.raises(TemplateError):
            ChatTemplate(source, {}).render(ChatInput(messages=[{"role": "user", "content": "x"}]), max_bytes=LIMIT)


def test_a_template_cannot_reach_out_of_its_sandbox() -> None:
    for source in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ raise_exception.__globals__.keys() }}",
    ):
        template = ChatTemplate(source, {})
        with pytest.raises(TemplateError):
            template.render(ChatInput(messages=[{"role": "user", "content": "x"}]), max_bytes=LIMIT)


def test_templates_are_found_where_checkpoints_keep_them() -> None:
    chat = ChatInput(messages=[{"role": "user", "content": "hi"}])
    files = tiny_files()
    named = json.dumps({"chat_template": [{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}]})
    cases = [
        ({**files, "chat_template.jinja": b"J{{ eos_token }}"}, "J<|im_end|>"),
        ({**files, "tokenizer_config.json": named.encode()}, "D"),
        ({**files, "tokenizer_config.json": json.dumps({"chat_template": TEMPLATE}).encode()}, None),
    ]
    for bundle, expected in cases:
        text = encode_chat(ModelText(bundle, num_ids=600), chat, max_bytes=LIMIT).text
        assert text == expected or (expected is None and text.startswith("<|im_start|>user\nhi<|im_end|>"))
    bare = ModelText({"tokenizer.json": files["tokenizer.json"]}, num_ids=600)
    with pytest.raises(TemplateError, match="no chat template:"):
        encode_chat(bare, chat, max_bytes=LIMIT)


TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]
END = {"eos_token": "<|im_end|>"}
TALK = "{{ bos_token }}{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer_config.json": {"chat_template": [{"name": "default", "template": TALK}], **END}},
        {
            "tokenizer_config.json": {
                "chat_template": [{"name": "default", "template": TALK}, {"name": "tool_use", "template": "T" + TALK}],
                **END,
            }
        },
        {"tokenizer_config.json": {"chat_template": {"default": TALK, "tool_use": "T" + TALK}, **END}},
        {"tokenizer_config.json": {"chat_template": TALK}, "special_tokens_map.json": END},
        {
            "tokenizer_config.json": {"chat_template": TALK, **END},
            "special_tokens_map.json": {"eos_token": {"content": "<|im_start|>", "lstrip": False}},
        },
        {
            "tokenizer_config.json": {
                "chat_template": TALK,
                **END,
                "added_tokens_decoder": {"0": {"content": "<|im_start|>", "special": True}},
            },
            "special_tokens_map.json": {"eos_token": "<|im_start|>"},
        },
        {
            "tokenizer_config.json": {
                "chat_template": "{{ a_token }}" + TALK,
                "extra_special_tokens": {"a_token": "A"},
                **END,
            }
        },
    ],
)
def test_templates_and_their_tokens_are_those_of_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    files = {"tokenizer.json": tiny_files()["tokenizer.json"]}
    files |= {name: json.dumps(content).encode() for name, content in changes.items()}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), ModelText(files, num_ids=600)
    messages = [{"role": "user", "content": "hi"}]
    for tools in (None, TOOLS):
        expected = theirs.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        chat = ChatInput(messages=messages, tools=tools)
        assert ours.template_of(chat).render(chat, max_bytes=LIMIT) == expected


def test_named_templates_without_a_default_are_for_tools_alone() -> None:
    named = {"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "rag", "template": "R"}]}
    text = ModelText({**tiny_files(), "tokenizer_config.json": json.dumps(named).encode()}, num_ids=600)
    messages = [{"role": "user", "content": "hi"}]
    assert text.template_of(ChatInput(messages=messages, tools=TOOLS)).source == "T"
    with pytest.raises(TemplateError, match="no chat template, only 'tool_use', 'rag'"):
        text.template_of(ChatInput(messages=messages))
