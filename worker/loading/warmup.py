"""Steps that run before the first request, so that libraries compile and cache their kernels, and pages of the weights
are touched.

Run on an idle runner whose pool is empty: no request will read the blocks that are written.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from octavo.model.attention.host_blocks import HostBlocks
from octavo.wire.messages import SamplingParams
from octavo.worker.runners.interface import Runner
from octavo.worker.scheduler.plan import Chunk, NewRequest, Slot, StepPlan

OnProgress = Callable[[int, int], None]
"""Called with (steps done, steps in all)."""

_GREEDY = SamplingParams(temperature=0.0)
_RANDOM = SamplingParams(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05, seed=1)


class WarmConfig(Protocol):
    """A runner's configuration, as far as warm-up reads it."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def max_slots(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


class WarmRunner(Runner, Protocol):
    """A runner that has such a configuration, and measures copies between the tiers, if there are two. max_chunks: in
    one step; None for any number."""

    @property
    def config(self) -> WarmConfig: ...
    @property
    def host_blocks(self) -> HostBlocks | None: ...
    @property
    def max_copies_in(self) -> int: ...
    @property
    def max_chunks(self) -> int | None: ...
    def measure_copies(self) -> float: ...


def warm_up(runner: WarmRunner, *, max_batch_tokens: int, on_progress: OnProgress = lambda done, total: None) -> int:
    """Run every warm-up step; returns how many. Raises RunnerError as a real step would: a worst-case step that does
    not fit should fail here."""
    plans = list(warm_up_plans(runner.config, max_batch_tokens=max_batch_tokens))
    for done, plan in enumerate(plans):
        on_progress(done, len(plans))
        runner.launch(plan)
        runner.collect()
    on_progress(len(plans), len(plans))
    return len(plans)


def warm_up_plans(config: WarmConfig, *, max_batch_tokens: int) -> Iterator[StepPlan]:
    """Prefills of 16, 64, … tokens up to the largest possible, then decodes of 1, 4, … rows up to the most possible."""
    longest = min(max_batch_tokens, config.max_model_len - 1, config.num_blocks * config.block_size)
    widest = min(config.max_slots, config.num_blocks, max_batch_tokens)
    for num_tokens in _sizes(16, longest):
        yield _prefill_plan(config, num_tokens)
    for num_rows in _sizes(1, widest):
        yield _decode_plan(num_rows)


def _sizes(first: int, last: int) -> list[int]:
    """first, 4 · first, 16 · first and so on below last, then last."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 4
    return [*sizes, last]


def _prefill_plan(config: WarmConfig, num_tokens: int) -> StepPlan:
    """One request in slot 0, in the first blocks of the pool."""
    blocks = np.arange(-(-num_tokens // config.block_size), dtype=np.int32)
    updates_U3 = np.stack([np.zeros_like(blocks), blocks, blocks], axis=1)
    ids_T = np.arange(num_tokens, dtype=np.int32) % config.vocab_size
    new = NewRequest(
        slot=Slot(0), request_id="warm-up", token_ids_T=ids_T, num_prompt_tokens=num_tokens, sampling=_RANDOM
    )
    chunk = Chunk(slot=Slot(0), start=0, num_tokens=num_tokens, is_last=True)
    return StepPlan(step=0, new_requests=(new,), block_updates_U3=updates_U3, prefill=(chunk,))


def _decode_plan(num_rows: int) -> StepPlan:
    """Requests of one token, each in a block of its own; the first is sampled, the others are greedy."""
    slots_S = np.arange(num_rows, dtype=np.int32)
    one_T = np.ones(1, np.int32)
    new_requests = tuple(
        NewRequest(
            slot=Slot(slot),
            request_id="warm-up",
            token_ids_T=one_T,
            num_prompt_tokens=1,
            sampling=_GREEDY if slot else _RANDOM,
        )
        for slot in range(num_rows)
    )
    updates_U3 = np.stack([slots_S, np.zeros_like(slots_S), slots_S], axis=1)
    return StepPlan(
        step=0,
        new_requests=new_requests,
        block_updates_U3=updates_U3,
        decode_slots_S=slots_S,
        decode_positions_S=np.zeros_like(slots_S),
    )
