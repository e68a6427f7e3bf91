"""How a step's tokens are chosen for rows with more than a temperature: other sampling parameters, and masks.

The last kernel of a step chooses a token for every row by its temperature alone. Rows that ask for more get another
token from the same logits; all other rows of the batch stay untouched. This happens on the device
(model/gpu/sampling_state.py) without waiting, unless a row needs more than there is room for
(model/gpu/sampling_columns.py): such rows go through the whole sampler (model/sampling/sampler.py), and the host
waits for their tokens, because a row's history must hold them before the next step. Must not know: how the step was
launched, who waits for the tokens.

Legend: R slots · B rows of the step as it was run · S sampled rows of the plan · N some of them · V vocabulary ·
W words of a mask.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch

from octavo.model.gpu.sampling_columns import RowPlan, Stage, plan_row
from octavo.model.gpu.sampling_state import SamplingState
from octavo.model.gpu.state import SAMPLING_COLUMNS
from octavo.model.kernels.sampling.logprobs import MAX_TOP
from octavo.model.sampling.logits_processors import TokenHistory
from octavo.model.sampling.masks import TokenMasks
from octavo.model.sampling.params import Feature, features_of
from octavo.model.sampling.row_by_row import EachRowSampler
from octavo.model.sampling.sampler import Sampled, Sampler
from octavo.wire.messages import SamplingParams
from octavo.worker.config import Deterministic
from octavo.worker.runners.cuda.graph_runner import CudaRunnerConfig, GraphRunner
from octavo.worker.runners.cuda.staging import MaskBuffer, StagedRows
from octavo.worker.runners.outputs import sampler_params, slot_logprobs
from octavo.worker.scheduler.plan import NewRequest, SlotLogprobs, StepMasks, StepPlan

_NO_SAMPLING: Mapping[str, float] = dict.fromkeys(SAMPLING_COLUMNS, 0)


class RowSampling:
    """The host's copy of the device's sampling rows; stale for free slots."""

    def __init__(self, state: SamplingState, *, max_slots: int) -> None:
        self._state = state
        self._stage_R = np.zeros(max_slots, np.uint8)
        self._num_logprobs_R = np.zeros(max_slots, np.int64)
        self._planned: tuple[SamplingParams, RowPlan | None] | None = None

    def join(self, new: NewRequest, params: SamplingParams) -> Mapping[str, float] | None:
        """The row's columns of the state; larger parameters are already on their way. None if only the whole sampler
        can serve it: call `leave` then."""
        plan = self._plan(params)
        if plan is None:
            return None
        self._stage_R[new.slot] = plan.stages
        self._num_logprobs_R[new.slot] = params.num_logprobs or 0
        self._state.put_tables(new.slot, params, plan, new.token_ids_T, new.num_prompt_tokens)
        return plan.columns

    def _plan(self, params: SamplingParams) -> RowPlan | None:
        """Requests mostly ask for what the one before did, but for the seed and the length: that plan is kept."""
        planned_for = msgspec.structs.replace(params, seed=0, max_tokens=0)
        if self._planned is None or self._planned[0] != planned_for:
            features = features_of(params) | (Feature.NONE if params.grammar is None else Feature.GRAMMAR)
            self._planned = planned_for, plan_row(params, features, vocab_size=self._state.vocab_size)
        return self._planned[1]

    def leave(self, new: NewRequest) -> Mapping[str, float]:
        """The columns of a row that the whole sampler serves: nothing is needed here but its grammar's mask."""
        self._stage_R[new.slot] = Stage.SPECIAL | (Stage.NONE if new.sampling.grammar is None else Stage.GRAMMAR)
        return _NO_SAMPLING

    def stages(self, slots_S: np.ndarray) -> Stage:
        """The stages that a step with these rows runs."""
        return Stage(int(np.bitwise_or.reduce(self._stage_R[slots_S], initial=0)))

    def special(self, slots_S: np.ndarray) -> np.ndarray:
        """int64: those of the rows that the whole sampler serves."""
        return np.flatnonzero(self._stage_R[slots_S] & Stage.SPECIAL)

    def with_logprobs(self, slots_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64: those of the rows that want log-probabilities, and of how many likely tokens."""
        index_N = np.flatnonzero(self._stage_R[slots_S] & Stage.LOGPROBS)
        return index_N, self._num_logprobs_R[slots_S[index_N]]


class SpecialRows:
    """Rows that the whole sampler serves; stale for free slots."""

    def __init__(
        self,
        *,
        max_slots: int,
        max_model_len: int,
        vocab_size: int,
        device: torch.device,
        sampler: type[Sampler] = Sampler,
    ) -> None:
        self._is_special_R = np.zeros(max_slots, np.bool_)
        self._history = TokenHistory(max_rows=max_slots, max_len=max_model_len + 1)
        self._sampler = sampler(vocab_size=vocab_size, history=self._history, device=device)

    def join(self, new: NewRequest, params: SamplingParams) -> None:
        """A request that needs the whole sampler enters the slot."""
        self._is_special_R[new.slot] = True
        self._history.put(new.slot, new.token_ids_T, new.num_prompt_tokens)
        self._sampler.join(new.slot, params, new.token_ids_T[new.num_prompt_tokens :])

    def leave(self, new: NewRequest) -> None:
        """Another request enters the slot: drop what it had."""
        if self._is_special_R[new.slot]:
            self._is_special_R[new.slot] = False
            self._sampler.join(new.slot, SamplingParams(), new.token_ids_T[:0])

    def sample(
        self, logits_NV: torch.Tensor, slots_N: np.ndarray, lengths_N: np.ndarray, masks: TokenMasks | None
    ) -> Sampled:
        """Choose a token for each of these slots, which hold lengths_N tokens. logits_NV: float32, overwritten. Waits
        for the device."""
        sampled = self._sampler.sample(logits_NV, slots_N, lengths_N, masks)
        self._history.tokens_RT[slots_N, lengths_N] = sampled.tokens_S.cpu().numpy()
        return sampled


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepRows:
    """The rows of a launched step. rows_B: int32 on the device. first_end: where those of ended chunks begin. slots_S:
    ``plan.sampled_slots``. stages: needed to sample them."""

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
        """Where these rows of ``plan.sampled_slots`` are in the step."""
        num_decodes = len(self.plan.decode_slots_S)
        return np.where(index_N < num_decodes, index_N, index_N - num_decodes + self.first_end)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepLogprobs:
    """index_N: rows of ``plan.sampled_slots`` whose log-probabilities come with the tokens, from column_N of the step,
    with count_N likely tokens each. num_answers: rows of the step to transfer for them. logprobs: those known
    already."""

    index_N: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    column_N: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    count_N: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    num_answers: int = 0
    logprobs: dict[int, SlotLogprobs] = field(default_factory=dict)


_NO_LOGPROBS = StepLogprobs()


class StepSampler:
    """One per runner."""

    def __init__(self, graphs: GraphRunner, config: CudaRunnerConfig, device: torch.device) -> None:
        self._graphs, self._config, self._device = graphs, config, device
        self._rows = RowSampling(graphs.sampling, max_slots=config.max_slots)
        self._masks = MaskBuffer(
            max_rows=config.max_slots, vocab_size=config.vocab_size, num_buffers=config.max_in_flight, device=device
        )
        self.special = SpecialRows(
            max_slots=config.max_slots,
            max_model_len=config.max_model_len,
            vocab_size=config.vocab_size,
            device=device,
            sampler=EachRowSampler if config.deterministic is Deterministic.ON else Sampler,
        )

    def join(self, new: NewRequest, changes: StagedRows) -> None:
        """A request enters a slot."""
        params = sampler_params(new.sampling, self._config.eos_token_ids)
        columns = self._rows.join(new, params)
        if columns is None:
            columns = self._rows.leave(new)
            self.special.join(new, params)
        else:
            self.special.leave(new)
        changes.join(new, columns)

    def warm_up(self) -> None:
        """Run every kernel once, for a row that needs none."""
        scratch_B = torch.full((1,), self._config.max_slots, dtype=torch.int32, device=self._device)
        everything = np.full((1, -(-self._config.vocab_size // 32)), -1, np.int32)
        masks = self._masks.send(np.zeros(1, np.int32), everything)
        self._graphs.run_sampling(scratch_B, ~Stage.NONE, masks)

    def rows_of(self, plan: StepPlan, rows_B: torch.Tensor, *, first_end: int) -> StepRows:
        """The rows of a launched step, with what they need. rows_B, first_end: see StepRows."""
        slots_S = plan.sampled_slots
        stages = self._rows.stages(slots_S)
        return StepRows(plan=plan, rows_B=rows_B, first_end=first_end, slots_S=slots_S, stages=stages)

    def run(self, rows: StepRows, masks: StepMasks | None) -> StepLogprobs:
        """Enqueue every kernel that the step's rows need. Waits for the device only if a row needs the general
        sampler."""
        if not rows.stages:
            return _NO_LOGPROBS
        slots_S, stages = rows.slots_S, rows.stages & ~Stage.SPECIAL
        special_N = self._rows.special(slots_S)
        # The whole sampler masks its rows itself: their log-probabilities are of the raw logits.
        masks, of_special = (None, None) if masks is None else _divided(masks, special_N)
        sent = None if masks is None else self._masks.send(rows.columns(masks.index_N), masks.bits_NW)
        self._graphs.run_sampling(rows.rows_B, stages, sent)
        logprobs = self._choose_special(rows, special_N, of_special) if len(special_N) else {}
        if Stage.LOGPROBS not in stages:
            return StepLogprobs(logprobs=logprobs)
        index_N, count_N = self._rows.with_logprobs(slots_S)
        column_N, num_answers = rows.columns(index_N), len(rows.rows_B)
        return StepLogprobs(
            index_N=index_N, column_N=column_N, count_N=count_N, num_answers=num_answers, logprobs=logprobs
        )

    def _choose_special(self, rows: StepRows, index_N: np.ndarray, masks: TokenMasks | None) -> dict[int, SlotLogprobs]:
        """Tokens of rows that only the whole sampler can serve, and their log-probabilities."""
        step, state = self._graphs.step, self._graphs.state
        slots_N, column = rows.slots_S[index_N], torch.from_numpy(rows.columns(index_N)).to(self._device)
        logits_NV, lengths_N = step.logits_BV[column].float(), _lengths(rows.plan)[index_N]
        sampled = self.special.sample(logits_NV, slots_N, lengths_N, masks)
        tokens_N = sampled.tokens_S.to(torch.int32)
        step.token_B[column] = tokens_N
        state.last_token_R[torch.from_numpy(slots_N).to(self._device)] = tokens_N
        if sampled.is_exhausted_S is not None:
            step.is_finite_B[column] |= sampled.is_exhausted_S.to(torch.int8) << 1
        if sampled.logprobs is None:
            return {}
        return {int(index_N[index]): logprobs for index, logprobs in slot_logprobs(sampled.logprobs).items()}


def _divided(masks: StepMasks, special_N: np.ndarray) -> tuple[StepMasks | None, TokenMasks | None]:
    """The masks of the device's rows, and those of the whole sampler's rows, by position in special_N; None if there
    are none."""
    if not len(special_N):
        return masks, None
    is_special_N = np.isin(masks.index_N, special_N)
    rest = StepMasks(index_N=masks.index_N[~is_special_N], bits_NW=masks.bits_NW[~is_special_N])
    place_N = np.searchsorted(special_N, masks.index_N[is_special_N])
    own = TokenMasks(index_N=place_N, bits_NW=masks.bits_NW[is_special_N])
    return rest if len(rest.index_N) else None, own if len(place_N) else None


def read_logprobs(chosen: StepLogprobs, answer_BX: np.ndarray) -> dict[int, SlotLogprobs]:
    """By index into ``plan.sampled_slots``. answer_BX: int32, in the layout of model/kernels/sampling/logprobs.py."""
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
    """int64: tokens that each sampled row holds, before the one to be sampled."""
    ends = [c.start + c.num_tokens for c in plan.prefill if c.is_last for _ in (c.slot, *c.forks)]
    return np.concatenate([plan.decode_positions_S.astype(np.int64) + 1, np.asarray(ends, np.int64)])
