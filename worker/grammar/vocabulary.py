"""A model's tokens as grammars see them: bytes, control tokens apart, and which tokens end an output.

Made of the tokenizer files that the worker gives to its gateways, so text means the same on both sides. Control tokens
are never part of a text, whatever a grammar says.

llguidance tokenizes what a grammar forces, and ends the grammar with an error where those tokens are not the forced
bytes. So its tokenizer spells every text exactly: without normalizer (NFC would compose what was forced decomposed),
truncation and padding, and with control tokens by other names, since a forced text may well contain a name of theirs.
"""

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from llguidance import LLTokenizer

from octavo.grammar.errors import GrammarRefused, Refusal, one_line
from octavo.grammar.tool_calls import CALL_TAGS, CallTags

TOKENIZER_FILE = "tokenizer.json"
_PRIVATE_USE = "\ue000"  # no text has it by chance


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Vocabulary:
    """vocab_size: ids that may be sampled. call_tags: tokens around a tool call, if there are such."""

    tokenizer: LLTokenizer
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    call_tags: CallTags | None = None

    @property
    def num_words(self) -> int:
        """int32 words in a mask."""
        return -(-self.vocab_size // 32)

    def bits(self, token_ids: tuple[int, ...]) -> np.ndarray:
        """int32 [W]: a mask with these tokens set."""
        bits_W = np.zeros(self.num_words, np.uint32)
        for token in token_ids:
            if 0 <= token < self.vocab_size:
                bits_W[token >> 5] |= np.uint32(1 << (token & 31))
        return bits_W.view(np.int32)


def load_vocabulary(files: dict[str, bytes], *, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Vocabulary:
    """Takes most of a second for 150,000 tokens. Raises GrammarRefused if the tokenizer is not supported."""
    if not eos_token_ids:
        raise GrammarRefused(Refusal.TOKENIZER, "needs a model with an end token")
    try:
        content = msgspec.json.decode(files[TOKENIZER_FILE])
        call_tags = _call_tags(content)
        _keep_bytes(content)
        _rename_control_tokens(content)
        text = msgspec.json.encode(content).decode()
        tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_token_ids))
    except (KeyError, TypeError, AttributeError, ValueError) as error:  # msgspec's are ValueErrors
        raise GrammarRefused(
            Refusal.TOKENIZER, f"this model's tokenizer is not supported: {one_line(str(error))}"
        ) from None
    return Vocabulary(tokenizer=tokenizer, vocab_size=vocab_size, eos_token_ids=eos_token_ids, call_tags=call_tags)


def _call_tags(tokenizer: dict[str, Any]) -> CallTags | None:
    ids = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}
    opening, closing = (ids.get(tag) for tag in CALL_TAGS)
    return None if opening is None or closing is None else (opening, closing)


def _keep_bytes(tokenizer: dict[str, Any]) -> None:
    """Make the tokens of any text spell exactly that text."""
    normalizers = tokenizer.get("normalizer") or {}
    parts = normalizers.get("normalizers", [normalizers])
    # Vocabularies of SentencePiece write a space with a sign of their own: that replacement is part of their spelling.
    kept = [part for part in parts if part.get("type") == "Replace" and part.get("pattern") == {"String": " "}]
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": kept} if kept else None
    tokenizer["truncation"] = tokenizer["padding"] = None
    for token in tokenizer.get("added_tokens") or ():
        token["lstrip"] = token["rstrip"] = False


def _rename_control_tokens(tokenizer: dict[str, Any]) -> None:
    """llguidance takes added tokens for control tokens that are special or stand in angle brackets."""
    words = tokenizer["model"]["vocab"]
    for token in tokenizer.get("added_tokens") or ():
        name = token["content"]
        if token["special"] or (name.startswith("<") and name.endswith(">")):
            token["content"] = f"<{_PRIVATE_USE}{token['id']}>"
            if words.get(name) == token["id"]:
                words[token["content"]] = words.pop(name)
