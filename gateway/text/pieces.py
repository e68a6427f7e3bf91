"""Where a text can be cut so that its pieces have the tokens that the whole has, and how few tokens a text can have.

Both are proven for the tokenizers that we know and left alone for every other one. These are byte-level BPE with all
256 bytes, which spells every byte, over words that one of two regular expressions finds (those of Qwen2 and GPT-2),
behind NFC or nothing. A cut is safe where

* no added token lies across it: these are found first, in the text as it is;
* what follows is a starter that never composes with what came before (Unicode Standard Annex 15, "stable" code
  points): NFC of the whole is NFC of the left and of the right;
* both regular expressions end a word there whatever else is in the text: behind what is no white space and before a
  space or tab; between a letter or a digit and what is of neither its class nor white space, or begins a line; between
  digits in Qwen2's, which takes them one by one. No alternative of either has such a pair inside, and what looks ahead
  looks at white space only, which is on neither side's end;

and where an added token begins: what is before and behind it is tokenized apart in any case.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.gateway.text.errors import UnsupportedTokenizer

# Stable letters of scripts that have been in Unicode since its early days, so that all tables agree on them.
LETTERS = (
    "A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01bf\u0391-\u03a1\u03a3-\u03a9\u03b1-\u03c9\u0410-\u044f\u05d0-\u05ea"
    "\u0621-\u063a\u0641-\u064a\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
)
DIGITS = "0-9"
SIGNS = r"!-/:-@\[-`{-~\u3001\u3002\uff01-\uff0f\uff1a-\uff20"
_CUTS = (
    rf"(?<=[{LETTERS}{DIGITS}{SIGNS}])(?=[ \t])"
    rf"|(?<=[{LETTERS}])(?=[{DIGITS}{SIGNS}\r\n])"
    rf"|(?<=[{DIGITS}])(?=[{LETTERS}{SIGNS}\r\n])"
)
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NFC_SHRINKS = 4
"""NFC leaves at least a fourth of a text's bytes: 2 of 7 of U+1FBE U+0308 U+0301, which is U+0390."""
_WINDOW = 1 << 14  # characters that are searched at a time: other threads run between


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
    """Token id -> bytes, of a byte-level BPE tokenizer: all_bytes[id], and visible_bytes[id] (empty for special
    tokens); ids without a token are empty, as `tokenizers` leaves them out.

    A byte-level vocabulary spells every byte as one printable character (GPT-2's alphabet, `bytes_to_unicode` in
    openai/gpt-2's encoder.py). The `ByteLevel` decoder of `tokenizers` maps the characters of each token back, takes
    the token's own UTF-8 where one of them is outside the alphabet, joins everything and decodes with replacement. So
    the bytes of a token do not depend on its neighbours, and a table of them is an exact detokenizer.
    """

    all_bytes: tuple[bytes, ...]
    visible_bytes: tuple[bytes, ...]

    @classmethod
    def build(cls, vocab: Mapping[str, int], special_ids: frozenset[int], *, num_ids: int) -> "ByteTable":
        """vocab: token -> id, including added tokens. num_ids: ids that the model may send."""
        rows = [b""] * max(num_ids, max(vocab.values(), default=-1) + 1)
        for token, token_id in vocab.items():
            rows[token_id] = token_bytes(token)
        visible = tuple(b"" if index in special_ids else row for index, row in enumerate(rows))
        return cls(tuple(rows), visible)

    def row(self, token_id: int) -> tuple[bytes, bool]:
        """(bytes of the token, whether it is special); (b"", False) for an id without a token."""
        if token_id >= len(self.all_bytes):
            return b"", False
        row = self.all_bytes[token_id]
        return row, bool(row) and not self.visible_bytes[token_id]


def byte_level_config(tokenizer_json: bytes) -> dict[str, Any]:
    """The parsed tokenizer.json. Raises UnsupportedTokenizer if a table of bytes would not decode exactly."""
    try:
        config: dict[str, Any] = json.loads(tokenizer_json)
        model, decoder = config["model"], config["decoder"] or {}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UnsupportedTokenizer("tokenizer.json is not readable") from error
    for name, value in (("model", model), ("decoder", decoder)):
        if not isinstance(value, dict):
            raise UnsupportedTokenizer(f"tokenizer.json: {name} is no object")
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise UnsupportedTokenizer(f"only byte-level BPE tokenizers are supported, this one is {model.get('type')!r}")
    if model.get("continuing_subword_prefix"):  # the library cuts merges by its length, and can end the process
        raise UnsupportedTokenizer("tokenizer.json: model.continuing_subword_prefix is not supported")
    parts = decoder.get("decoders") if decoder.get("type") == "Sequence" else [decoder]
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise UnsupportedTokenizer("tokenizer.json: decoder.decoders is no list of objects")
    kinds = [part.get("type") for part in parts]
    if kinds != ["ByteLevel"]:
        raise UnsupportedTokenizer(f"only the ByteLevel decoder is supported, this tokenizer has {kinds}")
    return config


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextPieces:
    """Cuts texts for one tokenizer. max_token_bytes: the most bytes of text that one token can stand for."""

    max_token_bytes: int
    _cut: "re.Pattern[str]"
    _added: "re.Pattern[str]"  # overlapping occurrences, the longest at each place
    _reach: int  # characters of the longest added token

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "TextPieces | None":
        """config: tokenizer.json. None if nothing is proven for such a tokenizer."""
        return cls._of(config, [token["content"] for token in config.get("added_tokens") or ()])

    @classmethod
    def of_plain(cls, config: Mapping[str, Any]) -> "TextPieces | None":
        """`of` for a tokenizer that treats special tokens as text."""
        return cls._of(config, [t["content"] for t in config.get("added_tokens") or () if not t.get("special")])

    @classmethod
    def _of(cls, config: Mapping[str, Any], tokens: list[str]) -> "TextPieces | None":
        words = _words(config)
        if words is None or not _spells_all_bytes(config["model"]) or not _is_plain(config):
            return None
        tokens = sorted(filter(None, tokens), key=len, reverse=True)
        either = "|".join(map(re.escape, tokens)) or "(?!)"
        num_bytes = max([*map(_num_bytes, config["model"]["vocab"]), *(len(token.encode()) for token in tokens)])
        cuts = _CUTS + (rf"|(?<=[{DIGITS}])(?=[{DIGITS}])" if words == QWEN2_WORDS else "")
        return cls(
            max_token_bytes=num_bytes * (NFC_SHRINKS if _is_nfc(config) else 1),
            _cut=re.compile(f"{cuts}|(?={either})"),
            _added=re.compile(f"(?=({either}))"),
            _reach=max(map(len, tokens), default=0),
        )

    def split(self, text: str, *, size: int) -> Iterator[str]:
        """The text in pieces. Each ends at the first safe cut after `size` characters; longer if there is none."""
        start = 0
        while len(text) - start > size:
            end = self._next_cut(text, start + size)
            yield text[start:end]
            start = end
        if start < len(text) or not text:
            yield text[start:]

    def _next_cut(self, text: str, position: int) -> int:
        while position < len(text):
            # A pattern sees what lies around its window: lookbehind and lookahead, within the window's end.
            end = min(len(text), position + _WINDOW)
            for found in self._cut.finditer(text, position, min(len(text), end + self._reach + 1)):
                if found.start() >= end:
                    break
                if not self._lies_within_token(text, found.start()):
                    return found.start()
            position = end
        return len(text)

    def _lies_within_token(self, text: str, cut: int) -> bool:
        first, last = max(0, cut - self._reach + 1), min(len(text), cut + self._reach)
        around = self._added.finditer(text, first, last)
        return any(each.start() < cut < each.end(1) for each in around)


def _words(config: Mapping[str, Any]) -> str | None:
    """The regular expression that splits words, "" for GPT-2's; None for one that is not known."""
    parts = config.get("pre_tokenizer") or {}
    steps = parts.get("pretokenizers", []) if parts.get("type") == "Sequence" else [parts]
    last = steps[-1] if steps else {}
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space", True):
        return None
    if len(steps) == 1 and last.get("use_regex", True):
        return ""
    if len(steps) != 2 or last.get("use_regex", True):
        return None
    split = steps[0]
    is_known = split.get("type") == "Split" and split.get("pattern") == {"Regex": QWEN2_WORDS}
    is_known = is_known and split.get("behavior") == "Isolated" and not split.get("invert")
    return QWEN2_WORDS if is_known else None


def _spells_all_bytes(model: Mapping[str, Any]) -> bool:
    has_affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    return not has_affixes and not model.get("dropout") and byte_alphabet().keys() <= model["vocab"].keys()


def _is_plain(config: Mapping[str, Any]) -> bool:
    """Whether the normalizer is NFC or absent, and added tokens only stand for their own text."""
    if config.get("normalizer") is not None and not _is_nfc(config):
        return False
    return not any(
        token.get("lstrip")
        or token.get("rstrip")
        or token.get("single_word")
        or (token.get("normalized", True) and config.get("normalizer") is not None)
        for token in config.get("added_tokens") or ()
    )


def _is_nfc(config: Mapping[str, Any]) -> bool:
    return config.get("normalizer") == {"type": "NFC"}


def _num_bytes(token: str) -> int:
    return len(token_bytes(token))
