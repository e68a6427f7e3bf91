"""Serves the same requests alone, in a crowd, in chunks of all sizes, with cached prefixes and after preemptions: a
runner in deterministic mode must give the same bits each time."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from octavo.blockmgr.ids import PrefixCache
from octavo.worker.config import SchedulerConfig
from octavo.worker.runners.interface import Runner
from octavo.worker.runners.oracle.model import OracleModel
from tests.support.worker.scheduling import World, WorldConfig

Outcome = tuple[tuple[int, ...], tuple[object, ...]]
"""Ids, and log-probabilities if asked for, exact to the last bit."""

PROBES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "num_logprobs": 3},
    {"temperature": 0.0, "num_logprobs": 0, "num_prompt_logprobs": 2},
    {"temperature": 1.3, "num_logprobs": 1},
    {"temperature": 1.1, "top_k": 8, "top_p": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.4},
    {"temperature": 0.9, "min_p": 0.05},
    {"temperature": 1.0, "typical_p": 0.9, "logit_bias": {3: 2.0, 40: -1.0}, "bad_words": ((7, 8),), "num_logprobs": 0},
    {"temperature": 2.0, "top_n_sigma": 1.5, "top_p": 0.9},
)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits that a runner was made for, and how long requests are."""

    num_blocks: int
    block_size: int
    max_slots: int
    max_batch_tokens: int
    max_model_len: int
    vocab_size: int
    num_prompt: int = 70
    num_output: int = 12
    crowd: int = 31
    chunk_sizes: tuple[int, ...] = (1, 7, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class InvarianceConfig(WorldConfig):
    """A worker that can be made to preempt without need."""

    given: Any = None
    preempt_every_steps: int | None = None

    def scheduler(self) -> SchedulerConfig:
        """The scheduler's part, with preemptions."""
        return replace(WorldConfig.scheduler(self), preempt_every_steps=self.preempt_every_steps)

    def runner(self) -> Any:
        """The runner under test."""
        return self.given


@dataclass(kw_only=True)
class Invariance:
    """Serves the probes in every way, each with a new scheduler. num_preempted, num_hit: counts of what happened."""

    runner: Runner
    limits: Limits
    num_preempted: int = 0
    num_hit: int = 0
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))

    def __post_init__(self) -> None:
        self.prompts = [self._ids(self.limits.num_prompt) for _ in PROBES]

    def ways(self) -> Iterator[tuple[str, list[Outcome]]]:
        """Name and outcomes of every way but the first, which is `alone`."""
        yield "in a crowd", self.serve(crowd=self.limits.crowd)
        for size in self.limits.chunk_sizes:
            yield f"chunks of {size}", self.serve(crowd=3, max_chunk_tokens=size)
        yield "cached prefix", self.serve(crowd=2, repeats=2)
        yield "preempted", self.serve(crowd=self.limits.crowd // 4, preempt_every_steps=4)

    def alone(self) -> list[Outcome]:
        """The outcomes of probes served one at a time."""
        return [self.serve(only=index)[0] for index in range(len(PROBES))]

    def serve(
        self,
        *,
        only: int | None = None,
        crowd: int = 0,
        repeats: int = 1,
        max_chunk_tokens: int | None = None,
        preempt_every_steps: int | None = None,
    ) -> list[Outcome]:
        """The probes' outcomes in the last repetition; those of the crowd are ignored."""
        here = World(self._config(max_chunk_tokens, preempt_every_steps))
        chosen = range(len(PROBES)) if only is None else [only]
        found: list[Outcome] = []
        for turn in range(repeats):
            for other in range(crowd):
                here.add(
                    1000 * (turn + 1) + other, self._ids(int(self.rng.integers(1, self.limits.num_prompt))),
                    max_tokens=int(self.rng.integers(1, 2 * self.limits.num_output)), temperature=0.7, ignore_eos=True,
                )  # fmt: skip
            keys = [
                here.add(
                    100 * turn + index, self.prompts[index], seed=index, max_tokens=self.limits.num_output,
                    ignore_eos=True, **PROBES[index],
                )
                for index in chosen
            ]  # fmt: skip
            here.run()
            streams = [here.streams[key] for key in keys]
            assert all(stream.finished and not stream.finished.error for stream in streams)
            found = [
                (tuple(stream.tokens), tuple(map(repr, stream.logprobs + stream.prompt_logprobs))) for stream in streams
            ]
        here.check_quiet()
        self.num_preempted += here.scheduler.counters.num_preemptions
        self.num_hit += here.blocks.num_hit_tokens
        return found

    def _ids(self, length: int) -> list[int]:
        return self.rng.integers(0, self.limits.vocab_size, length).tolist()

    def _config(self, max_chunk_tokens: int | None, preempt_every_steps: int | None) -> InvarianceConfig:
        limits = self.limits
        return InvarianceConfig(
            given=self.runner,
            preempt_every_steps=preempt_every_steps,
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            max_num_seqs=limits.max_slots,
            max_batch_tokens=limits.max_batch_tokens,
            max_chunk_tokens=max_chunk_tokens,
            max_model_len=limits.max_model_len,
            max_in_flight=self.runner.max_in_flight,
            prefix_cache=PrefixCache.ON,
            model=OracleModel(vocab_size=limits.vocab_size, eos_token_ids=()),
        )


def check(runner: Runner, limits: Limits) -> Invariance:
    """Serve in all ways. Raises AssertionError naming the first way whose outcomes differ."""
    here = Invariance(runner=runner, limits=limits)
    wanted = here.alone()
    assert all(len(tokens) == limits.num_output for tokens, _ in wanted)
    assert len(wanted[0][1]) == limits.num_output
    assert len(wanted[1][1]) == limits.num_output + limits.num_prompt - 1
    for way, outcomes in here.ways():
        for index, (outcome, expected) in enumerate(zip(outcomes, wanted, strict=True)):
            if outcome != expected:
                pytest.fail(f"{way}: request {index} ({PROBES[index]}) got\n{outcome}\ninstead of\n{expected}")
    assert here.num_preempted > 0
    assert here.num_hit > 0
    return here
