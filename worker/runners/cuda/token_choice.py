"""What follows a step until its tokens are chosen: the sampling parameters of its rows, the masks of its grammars.

Must not know: how the step before it was launched, who waits for the tokens.

Legend: B rows of the step as it was run · S sampled rows of the plan · N some of them · W words of a mask.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from octavo.model.gpu.sampling_columns import Stage
from octavo.model.kernels.sampling.logprobs import MAX_TOP
from octavo.model.sampling.row_by_row import EachRowSampler
from octavo.model.sampling.sampler import Sampler
from octavo.worker.config import Deterministic
from octavo.worker.runners.cuda.graph_runner import CudaRunnerConfig, StepPrograms
from octavo.worker.runners.cuda.sampling import RowSampling, SpecialRows
from octavo.worker.runners.cuda.staging import MaskUpload, RowChanges
from octavo.worker.runners.interface import StepMasks
from octavo.worker.runners.outputs import sampling_params, slot_logprobs
from octavo.worker.scheduler.plan import NewRequest, SlotLogprobs, StepPlan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunStep:
    """A step that was run. rows_B: int32 on the device. first_end: where the rows of ended chunks begin in it.

    slots_S: ``plan.sampled_slots``. stages: what they need.
    """

    plan: StepPlan
    rows_B: torch.Tensor
    first_end: int
    slots_S: np.ndarray
    stages: Stage

    @property
    def awaits_masks(self) -> bool:
        """Whether a row has a grammar."""
        return Stage.GRAMMAR in self.stages

    def columns(self, index_N: np.ndarray) -> np.ndarray:
        """Where rows of ``plan.sampled_slots`` are in the step."""
        num_decodes = len(self.plan.decode_slots_S)
        return np.where(index_N < num_decodes, index_N, index_N - num_decodes + self.first_end)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chosen:
    """index_N: rows of ``plan.sampled_slots`` whose log-probabilities come with the tokens, from column_N of the step,
    count_N likely tokens each. num_answers: rows of the step to bring home for them. logprobs: those known already."""

    index_N: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    column_N: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    count_N: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    num_answers: int = 0
    logprobs: dict[int, SlotLogprobs] = field(default_factory=dict)


_NOTHING = Chosen()


class Choosing:
    """One per runner."""

    def __init__(self, programs: StepPrograms, config: CudaRunnerConfig, device: torch.device) -> None:
        self._programs, self._config, self._device = programs, config, device
        self._rows = RowSampling(programs.sampling, max_slots=config.max_slots)
        self._masks = MaskUpload(
            max_rows=config.max_slots, vocab_size=config.vocab_size, num_buffers=config.max_in_flight, device=device
        )
        self.special = SpecialRows(
            max_slots=config.max_slots,
            max_model_len=config.max_model_len,
            vocab_size=config.vocab_size,
            device=device,
            sampler=EachRowSampler if config.deterministic is Deterministic.ON else Sampler,
        )

    def join(self, join: NewRequest, changes: RowChanges) -> None:
        """A request enters a slot."""
        params = sampling_params(join.sampling, self._config.eos_token_ids)
        columns = self._rows.join(join, params)
        if columns is None:
            columns = self._rows.leave(join)
            self.special.join(join, params)
        else:
            self.special.leave(join)
        changes.join(join, columns)

    def warm_up(self) -> None:
        """Run every kernel once, for a row that needs none."""
        scratch_B = torch.full((1,), self._config.max_slots, dtype=torch.int32, device=self._device)
        everything = np.full((1, -(-self._config.vocab_size // 32)), -1, np.int32)
        masks = self._masks.send(np.zeros(1, np.int32), everything)
        self._programs.run_sampling(scratch_B, ~Stage.NONE, masks)

    def started(self, plan: StepPlan, rows_B: torch.Tensor, *, first_end: int) -> RunStep:
        """The step, with what its rows need."""
        slots_S = plan.sampled_slots
        stages = self._rows.stages(slots_S)
        return RunStep(plan=plan, rows_B=rows_B, first_end=first_end, slots_S=slots_S, stages=stages)

    def run(self, step: RunStep, masks: StepMasks | None) -> Chosen:
        """Enqueue every kernel that the step's rows need. Waits for the device where a row is special, only."""
        if not step.stages:
            return _NOTHING
        slots_S, stages = step.slots_S, step.stages & ~Stage.SPECIAL
        if stages:
            sent = None if masks is None else self._masks.send(step.columns(masks.index_N), masks.bits_NW)
            self._programs.run_sampling(step.rows_B, stages, sent)
        logprobs = self._choose_special(step) if Stage.SPECIAL in step.stages else {}
        if Stage.LOGPROBS not in stages:
            return Chosen(logprobs=logprobs)
        index_N, count_N = self._rows.with_logprobs(slots_S)
        column_N, num_answers = step.columns(index_N), len(step.rows_B)
        return Chosen(index_N=index_N, column_N=column_N, count_N=count_N, num_answers=num_answers, logprobs=logprobs)

    def _choose_special(self, run: RunStep) -> dict[int, SlotLogprobs]:
        """Tokens of rows that only the whole sampler can serve, and their log-probabilities."""
        step, state, index_N = self._programs.step, self._programs.state, self._rows.special(run.slots_S)
        slots_N, column = run.slots_S[index_N], torch.from_numpy(run.columns(index_N)).to(self._device)
        sampled = self.special.sample(step.logits_BV[column].float(), slots_N, _lengths(run.plan)[index_N])
        tokens_N = sampled.tokens_S.to(torch.int32)
        step.token_B[column] = tokens_N
        state.last_token_R[torch.from_numpy(slots_N).to(self._device)] = tokens_N
        if sampled.is_exhausted_S is not None:
            step.is_finite_B[column] |= sampled.is_exhausted_S.to(torch.int8) << 1
        if sampled.logprobs is None:
            return {}
        return {int(index_N[index]): logprobs for index, logprobs in slot_logprobs(sampled.logprobs).items()}


def read_logprobs(chosen: Chosen, answer_BX: np.ndarray) -> dict[int, SlotLogprobs]:
    """By index into ``plan.sampled_slots``. answer_BX: int32, as model/kernels/sampling/logprobs.py has it."""
    if not len(chosen.index_N):
        return chosen.logprobs
    words_NX = answer_BX[chosen.column_N]
    values_NX = words_NX.view(np.float32)
    rows = zip(
        chosen.index_N.tolist(),
        chosen.count_N.tolist(),
        values_NX[:, 0].tolist(),
        words_NX[:, 1 : 1 + MAX_TOP].tolist(),
        values_NX[:, 1 + MAX_TOP :].tolist(),
        strict=True,
    )
    found = {
        index: SlotLogprobs(logprob=chosen_one, top_ids=tuple(ids[:count]), top_logprobs=tuple(top[:count]))
        for index, count, chosen_one, ids, top in rows
    }
    return chosen.logprobs | found


def _lengths(plan: StepPlan) -> np.ndarray:
    """int64: tokens that each sampled row holds, the one to be sampled not counted."""
    ends = [c.start + c.num_tokens for c in plan.prefill if c.is_last for _ in (c.slot, *c.forks)]
    return np.concatenate([plan.decode_positions_S.astype(np.int64) + 1, np.asarray(ends, np.int64)])
