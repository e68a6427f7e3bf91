"""Mask time per token under real vocabularies, by llguidance and, where it is installed, xgrammar.

    python -m bench.worker.grammar --tokenizer path/to/tokenizer.json [--repeats 5]

Texts that fit their schemas are followed token by token, as an engine does: fill the mask, then accept the token. All
on one thread but for the row that says otherwise. Prints the table of RESULTS.md, writes nothing.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from llguidance import LLExecutor, LLMatcher

from bench.figures import percentile
from bench.machine import this_machine
from octavo.grammar.limits import GrammarLimits
from octavo.grammar.source import to_llguidance
from octavo.wire.messages import Grammar, GrammarKind
from octavo.worker.grammar.matcher import GrammarMatcher
from octavo.worker.grammar.vocabulary import Vocabulary, load_vocabulary

CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "flat object": (
        {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
         "required": ["name", "age"], "additionalProperties": False},
        {"name": "Bob Löwe lives in the 北京 quarter of a long name", "age": 42},
    ),
    "nested": (
        {"type": "object", "additionalProperties": False, "required": ["order", "lines"], "properties": {
            "order": {"type": "object", "additionalProperties": False, "required": ["id", "date", "status"],
                      "properties": {"id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{6}$"},
                                     "date": {"type": "string", "format": "date"},
                                     "status": {"enum": ["new", "paid", "shipped"]}}},
            "lines": {"type": "array", "minItems": 1, "maxItems": 9, "items": {"$ref": "#/$defs/line"}}},
         "$defs": {"line": {"type": "object", "additionalProperties": False, "required": ["sku", "count"],
                            "properties": {"sku": {"type": "string", "maxLength": 40},
                                           "count": {"type": "integer", "minimum": 1, "maximum": 99},
                                           "note": {"anyOf": [{"type": "string"}, {"type": "null"}]}}}}},
        {"order": {"id": "AB-123456", "date": "2024-02-29", "status": "paid"},
         "lines": [{"sku": "table, oak, two metres", "count": 1, "note": "deliver on a Tuesday"},
                   {"sku": "chair", "count": 6, "note": None}]},
    ),
    "free text": (
        {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"],
         "additionalProperties": False},
        {"answer": "Once upon a time there was a little fox who lived by the sea, and every day it went out. " * 4},
    ),
}  # fmt: skip
LIMITS = GrammarLimits()


class Follower(Protocol):
    """One library's matcher for one output."""

    def mask(self, bits_W: np.ndarray) -> None:
        """Fill the mask of the next token."""

    def accept(self, token: int) -> None:
        """Advance by this token."""


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
    """llguidance's matcher, with the limits used in serving."""
    grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, source=json.dumps(schema))
    return LLMatcher(vocabulary.tokenizer, to_llguidance(grammar, LIMITS), limits=LIMITS.for_parser())


def read_vocabulary(path: Path) -> Vocabulary:
    """The vocabulary of a tokenizer with Qwen's end token."""
    content = json.loads(path.read_text())
    ids = {token["content"]: token["id"] for token in content["added_tokens"]}
    size = max([*content["model"]["vocab"].values(), *ids.values()]) + 1
    return load_vocabulary({"tokenizer.json": path.read_bytes()}, vocab_size=size, eos_token_ids=(ids["<|im_end|>"],))


def libraries(vocabulary: Vocabulary, tokenizer: Path) -> dict[str, Compile]:
    """By name: a function from a schema to a maker of followers."""

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


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, default=Path("model/embedded/folio-chat/tokenizer.json"))
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    vocabulary = read_vocabulary(given.tokenizer)
    print(this_machine().line())
    print(f"{given.tokenizer.name}: {vocabulary.vocab_size} tokens\n")
    print("| library | case | compile ms | mask µs mean | p99 | accept µs | masks of 64 rows ms |")
    print("|---|---|---|---|---|---|---|")
    for name, (schema, value) in CASES.items():
        ids = vocabulary.tokenizer.tokenize_str(json.dumps(value, ensure_ascii=False))
        for library, compile_it in libraries(vocabulary, given.tokenizer).items():
            print(row(library, name, compile_it, schema, ids, vocabulary, given.repeats))
    parallel(vocabulary)


def row(
    library: str,
    case: str,
    compile_it: Compile,
    schema: dict[str, Any],
    ids: list[int],
    vocabulary: Vocabulary,
    repeats: int,
) -> str:
    """One line of the table."""
    started = time.perf_counter()
    make = compile_it(schema)
    compile_ms = (time.perf_counter() - started) * 1e3
    bits_W = np.empty(vocabulary.num_words, np.int32)
    mask_us: list[float] = []
    accept_us: list[float] = []
    for _ in range(repeats):
        follower = make()
        for token in ids:
            mask_us.append(timed_us(lambda f=follower: f.mask(bits_W)))  # type: ignore[misc]
            accept_us.append(timed_us(lambda f=follower, t=token: f.accept(t)))  # type: ignore[misc]
    batch_ms = batch_of_64(make, ids, vocabulary)
    p99 = percentile(mask_us, 99)
    return (
        f"| {library} | {case} | {compile_ms:.1f} | {statistics.mean(mask_us):.0f} | {p99:.0f} "
        f"| {statistics.mean(accept_us):.1f} | {batch_ms:.2f} |"
    )


def batch_of_64(make: MakeFollower, ids: list[int], vocabulary: Vocabulary) -> float:
    """Milliseconds of a step with 64 outputs at random places in their texts, on one thread."""
    rng = random.Random(0)
    followers = [make() for _ in range(64)]
    for follower in followers:
        for token in ids[: rng.randrange(len(ids) - 1)]:
            follower.accept(token)
    bits_NW = np.empty((64, vocabulary.num_words), np.int32)
    return min(_fill_all(followers, bits_NW) for _ in range(5)) / 1e3


def _fill_all(followers: list[Follower], bits_NW: np.ndarray) -> float:
    def fill() -> None:
        for bits_W, follower in zip(bits_NW, followers, strict=True):
            follower.mask(bits_W)

    return timed_us(fill)


def parallel(vocabulary: Vocabulary) -> None:
    """Print what llguidance's own threads gain for 64 rows."""
    schema, value = CASES["nested"]
    ids = vocabulary.tokenizer.tokenize_str(json.dumps(value, ensure_ascii=False))
    first = matcher_of(schema, vocabulary)
    rng = random.Random(0)
    matchers = []
    for _ in range(64):
        matcher = first.deep_copy()
        matcher.consume_tokens(ids[: rng.randrange(len(ids) - 1)])
        matchers.append(matcher)
    bits_NW = np.empty((64, vocabulary.num_words), np.int32)
    executor = LLExecutor()
    pairs = [(matcher, n) for n, matcher in enumerate(matchers)]
    best = min(
        timed_us(lambda: executor.unsafe_compute_mask_ptr(pairs, bits_NW.ctypes.data, bits_NW.shape[1] * 4, 64))
        for _ in range(5)
    )
    print(f"\nllguidance, nested, 64 rows on its own threads: {best / 1e3:.2f} ms")


def timed_us(work: Callable[[], object]) -> float:
    """Microseconds of one call."""
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e6


if __name__ == "__main__":
    main()
