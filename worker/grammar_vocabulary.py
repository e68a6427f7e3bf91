"""A model's tokens as grammars see them: bytes, control tokens apart, and which tokens end an output.

Made of the tokenizer files that the worker gives to its gateways, so text means the same on both sides. Control tokens
are never part of a text, whatever a grammar says.
"""

from dataclasses import dataclass

import numpy as np
from llguidance import LLTokenizer

from grammar.errors import GrammarRefused, Refusal, one_line

TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Vocabulary:
    """vocab_size: ids that may be sampled."""

    tokenizer: LLTokenizer
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    @property
    def num_words(self) -> int:
        """int32 words of a mask."""
        return -(-self.vocab_size // 32)

    def bits(self, token_ids: tuple[int, ...]) -> np.ndarray:
        """int32 [W]: the mask in which these tokens are set."""
        bits_W = np.zeros(self.num_words, np.uint32)
        for token in token_ids:
            if 0 <= token < self.vocab_size:
                bits_W[token >> 5] |= np.uint32(1 << (token & 31))
        return bits_W.view(np.int32)


def load_vocabulary(files: dict[str, bytes], *, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Vocabulary:
    """Takes most of a second for 150,000 tokens. Raises GrammarRefused where the tokenizer is not supported."""
    if not eos_token_ids:
        raise GrammarRefused(Refusal.TOKENIZER, "needs a model with an end token")
    try:
        text = files[TOKENIZER_FILE].decode()
        tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_token_ids))
    except (KeyError, ValueError) as error:
        raise GrammarRefused(
            Refusal.TOKENIZER, f"this model's tokenizer is not supported: {one_line(str(error))}"
        ) from None
    return Vocabulary(tokenizer=tokenizer, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
