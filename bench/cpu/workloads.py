"""Requests to the sides compared on a CPU (prompts and output lengths), and figures from the seconds that they took.

Must not know: the sides.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

Clock = Callable[[], float]
"""Seconds, of which only differences matter: wall time, or this process's processor time if others use the machine."""

CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}

LARGEST_ID = 10_000  # prompts are random ids below it


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ask:
    """One request: random prompt ids (int32), and exactly how many tokens to generate."""

    prompt_ids_T: np.ndarray
    num_output: int


class Side(Protocol):
    """Something that answers requests greedily."""

    name: str

    def serve(self, asks: Sequence[Ask]) -> float:
        """Answer all requests, concurrently as far as the side can; seconds until the last token."""


def ask(rng: np.random.Generator, *, num_prompt: int, num_output: int) -> Ask:
    """A fresh random prompt."""
    prompt_ids_T = rng.integers(10, LARGEST_ID, num_prompt, dtype=np.int32)
    return Ask(prompt_ids_T=prompt_ids_T, num_output=num_output)


def mixed(rng: np.random.Generator, *, count: int, shortest: int, longest: int) -> list[Ask]:
    """Prompts and outputs of uniformly random lengths."""
    lengths = rng.integers(shortest, longest + 1, (count, 2))
    return [ask(rng, num_prompt=int(prompt), num_output=int(output)) for prompt, output in lengths]


def decode_ms(side: Side, rng: np.random.Generator, *, num_prompt: int, num_output: int) -> float:
    """Milliseconds per token at batch 1, from the time that num_output tokens take after the first one."""
    many_s = side.serve([ask(rng, num_prompt=num_prompt, num_output=num_output + 1)])
    one_s = side.serve([ask(rng, num_prompt=num_prompt, num_output=1)])
    return 1e3 * (many_s - one_s) / num_output


def prefill_ms(side: Side, rng: np.random.Generator, *, num_prompt: int) -> float:
    """Milliseconds to the first token of a single prompt."""
    return 1e3 * side.serve([ask(rng, num_prompt=num_prompt, num_output=1)])


def output_rate(side: Side, asks: Sequence[Ask]) -> float:
    """Output tokens per second of all requests together, not counting tokens that were not requested."""
    return sum(each.num_output for each in asks) / side.serve(asks)
