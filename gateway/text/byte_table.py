"""Token id -> bytes, for byte-level BPE tokenizers.

A byte-level vocabulary spells every byte as one printable character (GPT-2's alphabet, `bytes_to_unicode` in
openai/gpt-2's encoder.py). The `ByteLevel` decoder of `tokenizers` maps the characters of each token back, takes the
token's own UTF-8 where one of them is outside the alphabet, joins everything and decodes with replacement. So the
bytes of a token do not depend on its neighbours, and a table of them is an exact detokenizer.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.text.errors import UnsupportedTokenizer


def byte_alphabet() -> dict[str, int]:
    """Character -> the byte that it stands for."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_ALPHABET = byte_alphabet()


def token_bytes(token: str) -> bytes:
    """The bytes that a token decodes to."""
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode()


@dataclass(frozen=True, slots=True, eq=False)
class ByteTable:
    """all_bytes[id] and visible_bytes[id] (empty for special tokens); ids without a token are empty, as `tokenizers`
    leaves them out."""

    all_bytes: tuple[bytes, ...]
    visible_bytes: tuple[bytes, ...]

    @classmethod
    def build(cls, vocab: Mapping[str, int], special_ids: frozenset[int], *, num_ids: int) -> "ByteTable":
        """vocab: token -> id, added tokens included. num_ids: ids that the model may send."""
        rows = [b""] * max(num_ids, max(vocab.values(), default=-1) + 1)
        for token, token_id in vocab.items():
            rows[token_id] = token_bytes(token)
        visible = tuple(b"" if index in special_ids else row for index, row in enumerate(rows))
        return cls(tuple(rows), visible)


def byte_level_config(tokenizer_json: bytes) -> dict[str, Any]:
    """What it says. Raises UnsupportedTokenizer where a table of bytes would not decode exactly."""
    try:
        config: dict[str, Any] = json.loads(tokenizer_json)
        model, decoder = config["model"], config["decoder"] or {}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UnsupportedTokenizer("tokenizer.json is not readable") from error
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise UnsupportedTokenizer(f"only byte-level BPE tokenizers are supported, this one is {model.get('type')!r}")
    parts = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    kinds = [part.get("type") for part in parts]
    if kinds != ["ByteLevel"]:
        raise UnsupportedTokenizer(f"only the ByteLevel decoder is supported, this tokenizer has {kinds}")
    return config
