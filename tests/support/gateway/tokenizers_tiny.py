"""A small byte-level BPE tokenizer with ChatML tokens, trained on the fly from no files; and encoding of chats."""

import json
from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from octavo.gateway.text.chat_template import ChatInput
from octavo.gateway.text.model_text import Bounds, Encoded, ModelText, finish

QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = """{%- for message in messages %}
{%- if message.role == 'tool' and loop.first %}{{ raise_exception('a tool cannot begin') }}{% endif %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}
{%- endfor %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
_TEXTS = ["Once upon a time there was a little cat. ", "Hello world, how are you today? 你好世界 🦙🚀 "] * 50


@cache
def tiny_files() -> dict[str, bytes]:
    """The files of a TokenizerBundle; ids 0, 1, 2 are the special tokens, 3 is `<tool_call>` (added, not special)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=[*SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False)])
    config = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>", "bos_token": None}
    return {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}


def encode_chat(text: ModelText, chat: ChatInput, *, max_bytes: int) -> Encoded:
    """Encodes a chat as a gateway does, except that the template is rendered in this process."""
    marked = text.marked(chat)
    rendered = text.template_of(marked.chat).render(marked.chat, max_bytes=max_bytes)
    return finish(text.rendered_encoding(rendered, marked.mark, Bounds(max_bytes=max_bytes)))
