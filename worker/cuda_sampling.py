"""Rows that want more of the sampler than a temperature: top-k, top-p, min-p, penalties, min_tokens, logprobs.

Their step is the ordinary one, whose last kernel chooses a token for them too; then this chooses again from the same
logits with the whole sampler (model/sampler.py) and overwrites it. So all other rows of the batch are untouched. The
host waits for these tokens: a row's history must hold them before the next step.

Legend: R slots · N special rows of this step · V vocabulary.
"""

import numpy as np
import torch

from model.sampler import Sampled, Sampler
from model.sampling import Feature, SamplingParams
from model.sampling_penalties import TokenHistory
from worker.plan import Join
from worker.runner_rows import sampling_params

_SPECIAL = Feature.FILTER | Feature.PENALTY | Feature.MIN_TOKENS | Feature.LOGPROBS
_LEAST_TEMPERATURE = 1e-4
"""Below it, a logit divided by the temperature leaves what float32 can hold beside others."""


class SpecialRows:
    """is_special_R: bool, stale for slots that nobody holds."""

    def __init__(
        self,
        *,
        max_slots: int,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device,
    ) -> None:
        self.is_special_R = np.zeros(max_slots, np.bool_)
        self._history = TokenHistory(max_rows=max_slots, max_len=max_model_len + 1)
        self._sampler = Sampler(vocab_size=vocab_size, history=self._history, device=device)
        self._eos_token_ids = eos_token_ids

    def join(self, join: Join) -> None:
        """A request enters the slot; what the slot had is forgotten."""
        params = sampling_params(join.sampling, self._eos_token_ids)
        was_special = self.is_special_R[join.slot]
        self.is_special_R[join.slot] = is_special(params)
        if was_special or is_special(params):
            self._history.put(join.slot, join.token_ids_T, join.num_prompt_tokens)
            self._sampler.join(join.slot, params, join.token_ids_T[join.num_prompt_tokens :])

    def sample(self, logits_NV: torch.Tensor, slots_N: np.ndarray, lengths_N: np.ndarray) -> Sampled:
        """Choose a token for each of these slots, which hold lengths_N tokens. logits_NV: float32, overwritten. Waits
        for the device."""
        sampled = self._sampler.sample(logits_NV, slots_N, lengths_N)
        self._history.tokens_RT[slots_N, lengths_N] = sampled.tokens_S.cpu().numpy()
        return sampled


def is_special(params: SamplingParams) -> bool:
    """Whether the step's own sampler kernel is not enough."""
    if params.features & _SPECIAL:
        return True
    return params.temperature > 0 and (params.min_p > 0 or params.temperature < _LEAST_TEMPERATURE)
