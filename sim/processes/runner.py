"""The oracle runner with a duration for every step, requests that end the process, and a look at every plan.

Knows no block manager and no scheduler, only what plans say.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from octavo.worker.runners.interface import RunnerError
from octavo.worker.runners.oracle.faults import OracleFaults
from octavo.worker.runners.oracle.model import OracleModel
from octavo.worker.runners.oracle.runner import OracleRunner
from octavo.worker.scheduler.plan import NewRequest, StepPlan, StepResult
from sim.edges.fault_points import fault_point
from sim.journal import Journal
from sim.processes.group import SimGroup
from sim.scenario import SimConfig

VOCAB_SIZE = 400
POISON_TOKEN = VOCAB_SIZE - 1  # a prompt with it ends the process
NAN_TOKEN = VOCAB_SIZE - 2  # a prompt with it turns NaN
NAN_OUTPUT_INDEX = 2
SLOWNESS = 10.0
FOR_EVER_S = 1e9


class ProcessDied(BaseException):
    """The simulated process ends here; a BaseException, so that no handler of the product catches it."""


class SimClock:
    """A worker's monotonic clock. It is ahead of the loop's while the worker computes, because a step is executed at
    once."""

    def __init__(self, loop: Any) -> None:
        self._loop = loop
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return float(self._loop.time() + self.ahead_s)


def oracle_model(config: SimConfig) -> OracleModel:
    """Token 2 is the end token (`worker.runners.oracle.tokenizer`)."""
    return OracleModel(vocab_size=VOCAB_SIZE, eos_token_ids=(2,), eos_every=config.eos_every)


class RankRunner(OracleRunner):
    """The oracle with the scenario's blocks, for each rank of a worker. errors: by step."""

    host_blocks, max_copies_in, max_chunks, measure_copies = None, 0, None, None  # what groups ask a model's runner

    def __init__(self, config: SimConfig, errors: Mapping[int, RunnerError]) -> None:
        self.config = config
        super().__init__(
            oracle_model(config),
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            max_slots=config.max_num_seqs,
            max_blocks_per_slot=-(-config.max_model_len // config.block_size),
            max_in_flight=config.max_in_flight,
            num_host_blocks=config.num_host_blocks,
            faults=OracleFaults(nan_token_id=NAN_TOKEN, nan_output_index=NAN_OUTPUT_INDEX, collect_errors=errors),
        )


class SimRunner(RankRunner):
    """The runner of rank 0, which is the worker. ``slow_until_s``, ``next_error`` and ``hangs`` are set by Chaos.
    group: the other ranks, if any."""

    def __init__(self, config: SimConfig, rng: Any, clock: SimClock, journal: Journal, name: str) -> None:
        self._errors: dict[int, RunnerError] = {}
        super().__init__(config, self._errors)
        others = [RankRunner(config, self._errors) for _ in range(1, config.num_ranks)]
        self.group = SimGroup(others, journal, name) if others else None
        self.slow_until_s = 0.0
        self.next_error: RunnerError | None = None
        self.hangs = False
        self.on_plan: Callable[[StepPlan], None] = lambda plan: None
        self._rng = rng
        self._clock = clock
        self._journal = journal
        self._durations: deque[float] = deque()

    def launch(self, plan: StepPlan) -> None:
        self._look_at(plan)
        self.on_plan(plan)
        super().launch(plan)
        fault_point("engine.launched")
        if len(plan.copies_out_C2) or len(plan.copies_in_C2):
            fault_point("engine.copying")
        if self.next_error is not None:
            self._errors[plan.step], self.next_error = self.next_error, None
        self._durations.append(self._duration_s(plan))

    @property
    def leaving(self) -> list[int]:
        """Device blocks that launched plans have yet to copy out."""
        return [block for plan in self._launched for block in plan.copies_out_C2[:, 0].tolist()]

    def collect(self) -> StepResult:
        self._clock.ahead_s += self._durations.popleft()
        if self.group is None:
            return super().collect()
        if self.group.is_broken:
            self._launched.popleft()
            raise RunnerError("the other end of a sum is gone")
        try:
            result = super().collect()
        except RunnerError:
            self.group.finish(None)
            raise
        self.group.finish(result)
        return result

    def poison(self, block_ids: np.ndarray) -> None:
        super().poison(block_ids)
        if self.group is not None:
            self.group.poison(block_ids)

    def _duration_s(self, plan: StepPlan) -> float:
        if self.hangs or (self.group is not None and self.group.stands_still):
            self.hangs = False
            return FOR_EVER_S
        config, num_decodes = self.config, len(plan.decode_slots_S)
        steady_s = config.step_base_s + config.step_seq_s * num_decodes
        steady_s += config.step_prefill_s * (plan.num_tokens - num_decodes)
        steady_s += config.copy_s * max(len(plan.copies_out_C2), len(plan.copies_in_C2))
        slowness = SLOWNESS if self._clock() < self.slow_until_s else 1.0
        return float(steady_s * slowness * self._rng.uniform(1 - config.jitter, 1 + config.jitter))

    def _new_row(self, join: NewRequest) -> Any:
        if POISON_TOKEN in join.token_ids_T[: join.num_prompt_tokens].tolist():
            self._journal.faults["poison"] += 1
            raise ProcessDied("a request killed it")
        return super()._new_row(join)

    def _look_at(self, plan: StepPlan) -> None:
        journal, num_tokens = self._journal, plan.num_tokens
        slots = [*plan.decode_slots_S.tolist(), *(chunk.slot for chunk in plan.prefill)]
        journal.counts["steps"] += 1
        journal.note(f"step {plan.step} {num_tokens} {slots}")
        has_other_work = bool(plan.new_requests) or len(plan.copies_in_C2) > 0
        is_of_use = num_tokens > 0 or has_other_work
        journal.check(is_of_use, "a step of nothing")
        journal.check(num_tokens <= self.config.max_batch_tokens, lambda: f"a step of {num_tokens} tokens")
        journal.check(len(set(slots)) == len(slots) <= self.config.max_num_seqs, lambda: f"a step of slots {slots}")
