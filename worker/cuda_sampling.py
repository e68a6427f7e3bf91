"""Rows that want more of the sampler than a temperature: top-k, top-p, min-p, penalties, min_tokens, logprobs.

Their step is the ordinary one, whose last kernel chooses a token for them too; then they get another one from the same
logits, and all other rows of the batch stay untouched. Filters and penalties are the device's own business
(model/gpu/wishes.py). What that cannot do, min_tokens and logprobs above all, goes through the whole sampler
(model/sampler.py): then the host waits for the tokens, for a row's history must hold them before the next step.

Legend: R slots · N special rows of this step · V vocabulary.
"""

import numpy as np
import torch

from model.gpu.wishes import wish_of
from model.sampler import Sampled, Sampler
from model.sampling import SamplingParams
from model.sampling_penalties import TokenHistory
from worker.plan import Join


class SpecialRows:
    """has_wish_R: rows for the device; is_special_R: rows for the whole sampler. bool, stale for slots that nobody
    holds."""

    def __init__(
        self,
        *,
        max_slots: int,
        max_model_len: int,
        vocab_size: int,
        device: torch.device,
        sampler: type[Sampler] = Sampler,
    ) -> None:
        self.has_wish_R = np.zeros(max_slots, np.bool_)
        self.is_special_R = np.zeros(max_slots, np.bool_)
        self._history = TokenHistory(max_rows=max_slots, max_len=max_model_len + 1)
        self._sampler = sampler(vocab_size=vocab_size, history=self._history, device=device)

    def join(self, join: Join, params: SamplingParams) -> None:
        """A request enters the slot; what the slot had is forgotten."""
        wish = wish_of(params, vocab_size=self._sampler.vocab_size)
        was_special, is_special = self.is_special_R[join.slot], wish is None
        self.is_special_R[join.slot] = is_special
        self.has_wish_R[join.slot] = bool(wish)
        if was_special or is_special:
            self._history.put(join.slot, join.token_ids_T, join.num_prompt_tokens)
            self._sampler.join(join.slot, params, join.token_ids_T[join.num_prompt_tokens :])

    def sample(self, logits_NV: torch.Tensor, slots_N: np.ndarray, lengths_N: np.ndarray) -> Sampled:
        """Choose a token for each of these slots, which hold lengths_N tokens. logits_NV: float32, overwritten. Waits
        for the device."""
        sampled = self._sampler.sample(logits_NV, slots_N, lengths_N)
        self._history.tokens_RT[slots_N, lengths_N] = sampled.tokens_S.cpu().numpy()
        return sampled
