"""Which rows want more of the sampler than a temperature, and who serves them.

Their step is the ordinary one, whose last kernel chooses a token for them too; then they get another one from the same
logits, and all other rows of the batch stay untouched. That is the device's own business (model/gpu/sampling_state.py)
and nothing waits, unless a row wants more than it has room for (model/gpu/sampling_columns.py): such rows go through
the whole sampler (model/sampling/sampler.py), and the host waits for their tokens, for a row's history must hold them
before the next step.

Legend: R slots · S sampled rows of a step · N special ones, or those that want log-probabilities · V vocabulary.
"""

from collections.abc import Mapping

import numpy as np
import torch

from octavo.model.gpu.sampling_columns import Stage, plan_row
from octavo.model.gpu.sampling_state import SamplingState
from octavo.model.gpu.state import SAMPLING_COLUMNS
from octavo.model.sampling.params import Feature, SamplingParams
from octavo.model.sampling.penalties import TokenHistory
from octavo.model.sampling.sampler import Sampled, Sampler
from octavo.worker.scheduler.plan import NewRequest

_NO_SAMPLING: Mapping[str, float] = dict.fromkeys(SAMPLING_COLUMNS, 0)


class RowSampling:
    """What the host remembers of the device's rows; stale for slots that nobody holds."""

    def __init__(self, state: SamplingState, *, max_slots: int) -> None:
        self._state = state
        self._stage_R = np.zeros(max_slots, np.uint8)
        self._num_logprobs_R = np.zeros(max_slots, np.int64)

    def join(self, join: NewRequest, params: SamplingParams) -> Mapping[str, float] | None:
        """The row's columns of the state; what is larger is on its way. None where only the whole sampler can do it:
        `leave` then."""
        grammar = Feature.NONE if join.sampling.grammar is None else Feature.GRAMMAR
        plan = plan_row(params, params.features | grammar, vocab_size=self._state.vocab_size)
        if plan is None:
            return None
        self._stage_R[join.slot] = plan.stages
        self._num_logprobs_R[join.slot] = params.num_logprobs or 0
        self._state.put_tables(join.slot, params, plan, join.token_ids_T, join.num_prompt_tokens)
        return plan.columns

    def leave(self, join: NewRequest) -> Mapping[str, float]:
        """The columns of a row that needs nothing here, but for a grammar's mask: the whole sampler has it."""
        self._stage_R[join.slot] = Stage.SPECIAL | (Stage.NONE if join.sampling.grammar is None else Stage.GRAMMAR)
        return _NO_SAMPLING

    def stages(self, slots_S: np.ndarray) -> Stage:
        """What a step with these rows runs."""
        return Stage(int(np.bitwise_or.reduce(self._stage_R[slots_S], initial=0)))

    def special(self, slots_S: np.ndarray) -> np.ndarray:
        """int64: which of the rows the whole sampler has."""
        return np.flatnonzero(self._stage_R[slots_S] & Stage.SPECIAL)

    def with_logprobs(self, slots_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64: which of the rows want log-probabilities, and of how many likely tokens."""
        index_N = np.flatnonzero(self._stage_R[slots_S] & Stage.LOGPROBS)
        return index_N, self._num_logprobs_R[slots_S[index_N]]


class SpecialRows:
    """Rows of the whole sampler; stale for slots that nobody holds."""

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

    def join(self, join: NewRequest, params: SamplingParams) -> None:
        """A request that needs it enters the slot."""
        self._is_special_R[join.slot] = True
        self._history.put(join.slot, join.token_ids_T, join.num_prompt_tokens)
        self._sampler.join(join.slot, params, join.token_ids_T[join.num_prompt_tokens :])

    def leave(self, join: NewRequest) -> None:
        """Another one enters it: forget what the slot had."""
        if self._is_special_R[join.slot]:
            self._is_special_R[join.slot] = False
            self._sampler.join(join.slot, SamplingParams(), join.token_ids_T[:0])

    def sample(self, logits_NV: torch.Tensor, slots_N: np.ndarray, lengths_N: np.ndarray) -> Sampled:
        """Choose a token for each of these slots, which hold lengths_N tokens. logits_NV: float32, overwritten. Waits
        for the device."""
        sampled = self._sampler.sample(logits_NV, slots_N, lengths_N)
        self._history.tokens_RT[slots_N, lengths_N] = sampled.tokens_S.cpu().numpy()
        return sampled
