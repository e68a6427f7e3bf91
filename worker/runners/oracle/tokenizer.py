"""A tokenizer for the oracle runner if there is no checkpoint: bytes, ChatML markers, and words for the other ids.

Made of plain JSON, so that tests of the whole service can use text without a model, a download or a library.
"""

import json

from octavo.worker.loading.model_card import Described

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_TOKEN_ID = SPECIAL_TOKENS.index("<|im_end|>")
MIN_VOCAB_SIZE = len(SPECIAL_TOKENS) + 256

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def describe_oracle(*, vocab_size: int, max_model_len: int) -> Described:
    """A model of ``vocab_size`` ids. Below MIN_VOCAB_SIZE, its tokenizer has more ids than the model can generate."""
    return Described(
        files=oracle_tokenizer_files(vocab_size),
        architecture="Oracle",
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=(END_TOKEN_ID,),
        default_sampling={},
    )


def oracle_tokenizer_files(vocab_size: int) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json: special tokens, then the 256 bytes, then the words " w0", " w1" …"""
    pieces = [*SPECIAL_TOKENS, *byte_characters()]
    pieces += [f"Ġw{index}" for index in range(max(0, vocab_size - len(pieces)))]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_special(index, token) for index, token in enumerate(SPECIAL_TOKENS)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {piece: index for index, piece in enumerate(pieces)},
            "merges": [],
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 1 << 20,
    }
    return {"tokenizer.json": json.dumps(tokenizer).encode(), "tokenizer_config.json": json.dumps(config).encode()}


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2's ``bytes_to_unicode``)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    stand_ins = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(stand_ins)) for byte in range(256)]


def _special(index: int, token: str) -> dict[str, object]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": index, "content": token, **flags, "special": True}
