"""What callers send to a service: how much, with random prompts and lengths of answers.

Must not know: how it is sent, what is answered.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo.cli.bench.datasets import Lengths, read_asks

NUM_IDS = 6_000
"""Ids of prompts are below this: every served tokenizer has as many."""
Bounds = tuple[int, int]
"""Inclusive bounds of a uniform draw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The ids that a caller adds, and exactly how many tokens it asks for."""

    ids: tuple[int, ...]
    num_output: int


Conversation = tuple[Turn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much of each kind. processes: number of callers' processes."""

    nano: int = 256
    nano_tokens: Bounds = (100, 1024)
    seeds: tuple[int, ...] = (3, 4, 5)
    conversations: int = 64
    turns: int = 6
    common_tokens: int = 1000
    turn_tokens: Bounds = (50, 150)
    traced: int = 1000
    longest_prompt: int = 30_000
    longest_answer: int = 2_000
    burst: int = 1024
    burst_tokens: Bounds = (64, 128)
    bursts: int = 5
    one_tokens: Bounds = (128, 256)
    ones: int = 10
    processes: int = 8


QUICK = Sizes(
    nano=6, nano_tokens=(8, 24), seeds=(3, 4), conversations=3, turns=3, common_tokens=48, turn_tokens=(4, 8),
    traced=8, longest_prompt=64, longest_answer=8, burst=12, burst_tokens=(8, 8), bursts=2, one_tokens=(8, 8), ones=2,
    processes=2,
)  # fmt: skip


def nano(sizes: Sizes, seed: int) -> list[Conversation]:
    """Single turns with prompts and answers of nano bench's lengths."""
    dice = random.Random(seed)
    return [(_turn(dice, sizes.nano_tokens),) for _ in range(sizes.nano)]


def conversations(sizes: Sizes, seed: int) -> list[Conversation]:
    """Conversations of several turns that all begin with the same ids."""
    dice = random.Random(seed)
    common = _ids(dice, sizes.common_tokens)

    def one() -> Conversation:
        first, *others = (_turn(dice, sizes.turn_tokens) for _ in range(sizes.turns))
        return (Turn(ids=common + first.ids, num_output=first.num_output), *others)

    return [one() for _ in range(sizes.conversations)]


def burst(sizes: Sizes, seed: int) -> list[Conversation]:
    """Short requests, all of the same lengths."""
    dice, (num_prompt, num_output) = random.Random(seed), sizes.burst_tokens
    return of_lengths([(num_prompt, num_output)] * sizes.burst, dice)


def one(sizes: Sizes, seed: int) -> list[Conversation]:
    """A single request."""
    return of_lengths([sizes.one_tokens], random.Random(seed))


def trace_lengths(sizes: Sizes, path: Path | None) -> list[tuple[int, int]]:
    """(prompt, answer) lengths from the first entries of a trace file, or drawn: 2,000 and 28 tokens on average with
    long tails, like those of a code assistant. Raises CliError."""
    dice = random.Random(1)
    if path is None:
        lengths = [(dice.lognormvariate(7.3, 0.8), dice.lognormvariate(2.73, 1.1)) for _ in range(sizes.traced)]
    else:
        unsaid = Lengths(num_prompt=512, num_output=64)
        asks = read_asks(path, sizes.traced, unsaid, vocab_size=NUM_IDS, seed=1, count_tokens=len)
        lengths = [(len(ask.prompt.get("token_ids", ())), ask.num_output) for ask in asks]
    longest = (sizes.longest_prompt, sizes.longest_answer)
    return [(max(1, min(int(a), longest[0])), max(1, min(int(b), longest[1]))) for a, b in lengths]


def of_lengths(lengths: Sequence[tuple[int, int]], dice: random.Random) -> list[Conversation]:
    """Conversations of one turn each, with random ids."""
    return [(Turn(ids=_ids(dice, num_prompt), num_output=num_output),) for num_prompt, num_output in lengths]


def _turn(dice: random.Random, bounds: Bounds) -> Turn:
    return Turn(ids=_ids(dice, dice.randint(*bounds)), num_output=dice.randint(*bounds))


def _ids(dice: random.Random, count: int) -> tuple[int, ...]:
    return tuple(dice.choices(range(NUM_IDS), k=count))
