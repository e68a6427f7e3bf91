"""The libraries that make masks, each behind one face: from a schema to a maker of followers.

Must not know: schemas, what is measured.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from llguidance import LLMatcher

from octavo.grammar.limits import GrammarLimits
from octavo.grammar.source import to_llguidance
from octavo.wire.messages import Grammar, GrammarKind
from octavo.worker.grammar.matcher import GrammarMatcher
from octavo.worker.grammar.vocabulary import Vocabulary, load_vocabulary

LIMITS = GrammarLimits()


class Follower(Protocol):
    """One library's matcher for one output."""

    def mask(self, bits_W: np.ndarray) -> None:
        """Fill the mask of the next token."""

    def accept(self, token: int) -> None:
        """Go on."""


@dataclass(eq=False)
class Ours:
    """llguidance, as the worker uses it."""

    matcher: GrammarMatcher

    def mask(self, bits_W: np.ndarray) -> None:
        self.matcher.fill(bits_W)

    def accept(self, token: int) -> None:
        assert self.matcher.accept(token), self.matcher.error


class Theirs:
    """xgrammar."""

    def __init__(self, compiled: Any) -> None:
        import torch
        import xgrammar  # type: ignore[import-not-found]

        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._from_numpy = torch.from_numpy

    def mask(self, bits_W: np.ndarray) -> None:
        self._matcher.fill_next_token_bitmask(self._from_numpy(bits_W.reshape(1, -1)))

    def accept(self, token: int) -> None:
        assert self._matcher.accept_token(token)


MakeFollower = Callable[[], Follower]
Compile = Callable[[dict[str, Any]], MakeFollower]


def matcher_of(schema: dict[str, Any], vocabulary: Vocabulary) -> LLMatcher:
    """llguidance's, limited as served."""
    grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, source=json.dumps(schema))
    return LLMatcher(vocabulary.tokenizer, to_llguidance(grammar, LIMITS), limits=LIMITS.for_parser())


def read_vocabulary(path: Path) -> Vocabulary:
    """Of a tokenizer with Qwen's end token."""
    content = json.loads(path.read_text())
    ids = {token["content"]: token["id"] for token in content["added_tokens"]}
    size = max([*content["model"]["vocab"].values(), *ids.values()]) + 1
    return load_vocabulary({"tokenizer.json": path.read_bytes()}, vocab_size=size, eos_token_ids=(ids["<|im_end|>"],))


def libraries(vocabulary: Vocabulary, tokenizer: Path) -> dict[str, Compile]:
    """By name: from a schema to a maker of followers."""

    def ours(schema: dict[str, Any]) -> MakeFollower:
        compiled = GrammarMatcher(matcher_of(schema, vocabulary))
        compiled.fill(np.empty(vocabulary.num_words, np.int32))
        return lambda: Ours(compiled.fork())

    found: dict[str, Compile] = {"llguidance": ours}
    if find_spec("xgrammar") is not None:
        found["xgrammar"] = _xgrammar(vocabulary, tokenizer)
    return found


def _xgrammar(vocabulary: Vocabulary, path: Path) -> Compile:
    import xgrammar
    from tokenizers import Tokenizer

    words = {token: word for word, token in Tokenizer.from_file(str(path)).get_vocab().items()}
    info = xgrammar.TokenizerInfo(
        [words.get(token, "") for token in range(vocabulary.vocab_size)],
        vocab_type=xgrammar.VocabType.BYTE_LEVEL,
        stop_token_ids=list(vocabulary.eos_token_ids),
    )
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def make(schema: dict[str, Any]) -> MakeFollower:
        compiled = compiler.compile_json_schema(json.dumps(schema))
        return lambda: Theirs(compiled)

    return make
