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
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLExecutor

from bench.figures import percentile
from bench.machine import this_machine
from bench.worker.grammar_cases import CASES
from bench.worker.grammar_libraries import Compile, Follower, MakeFollower, libraries, matcher_of, read_vocabulary
from octavo.worker.grammar.vocabulary import Vocabulary


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
    """Milliseconds of a step: 64 outputs at random places of their texts, one thread."""
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
    """What llguidance's own threads bring for 64 rows."""
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
