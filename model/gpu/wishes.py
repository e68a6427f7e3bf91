"""What rows wish for beyond a temperature, on the device, and what they have said where a penalty depends on it.

Legend: R rows · V vocabulary · T tokens of a request.
"""

import math

import numpy as np
import torch

from model.gpu.state import RowState
from model.kernels.filter_sample import (
    FILTERS,
    IN_PROMPT,
    MAX_COUNT,
    MAX_TOP_K,
    NO_WISH,
    PENALTIES_ONLY,
    FilterParts,
    Wishes,
    filter_and_choose,
)
from model.sampling import MASKS, Feature, SamplingParams

_ONLY_WHOLE_SAMPLER = Feature.LOGPROBS | Feature.BIAS | MASKS | Feature.TYPICAL
LEAST_TEMPERATURE = 1e-4
"""Below it, a logit divided by the temperature leaves what float32 can hold beside others."""


class WishState:
    """count_RV and the columns that `filter_and_choose` reads. The columns are the row state's, or its own (tests)."""

    def __init__(
        self,
        *,
        num_rows: int,
        max_batch: int,
        vocab_size: int,
        device: torch.device | str,
        state: RowState | None = None,
    ) -> None:
        state = state or RowState(num_slots=num_rows - 1, table_width=1, scratch_block=0, device=device)
        self.vocab_size = vocab_size
        self.parts = FilterParts(max_batch, vocab_size, device)
        self.wishes = Wishes(
            wish_R=state.wish_R,
            top_k_R=state.top_k_R,
            top_p_R=state.top_p_R,
            log_min_p_R=state.log_min_p_R,
            repetition_R=state.repetition_R,
            presence_R=state.presence_R,
            frequency_R=state.frequency_R,
            count_RV=torch.zeros(num_rows, vocab_size, dtype=torch.int16, device=device),
        )

    def put(self, row: int, params: SamplingParams, token_ids_T: np.ndarray, num_prompt_tokens: int) -> None:
        """Set everything of a row, value by value."""
        for name, value in wish_columns(params, vocab_size=self.vocab_size).items():
            getattr(self.wishes, f"{name}_R")[row] = value
        self.put_counts(row, token_ids_T, num_prompt_tokens)

    def put_counts(self, row: int, token_ids_T: np.ndarray, num_prompt_tokens: int) -> None:
        """Forget what the row has said and count these tokens, int32, of which the first are its prompt."""
        count_V = self.wishes.count_RV[row].zero_()
        ids_U, count_U = packed_counts(token_ids_T, num_prompt_tokens)
        count_V[torch.from_numpy(ids_U).to(count_V.device)] = torch.from_numpy(count_U).to(count_V.device)

    def choose(
        self,
        logits_BV: torch.Tensor,
        rows_B: torch.Tensor,
        token_B: torch.Tensor,
        state: RowState,
    ) -> None:
        """Give the rows that have a wish their tokens, behind the step's own sampler."""
        filter_and_choose(
            logits_BV, rows_B, state.temperature_R, state.seed_R, state.position_R, state.num_prompt_R,
            state.last_token_R, token_B, self.wishes, self.parts,
        )  # fmt: skip


def packed_counts(token_ids_T: np.ndarray, num_prompt_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Distinct ids (int64) and what count_RV holds for them (int16)."""
    ids_U, index_T = np.unique(token_ids_T, return_inverse=True)
    count_U = np.bincount(index_T[num_prompt_tokens:], minlength=len(ids_U)).clip(max=MAX_COUNT)
    count_U[index_T[:num_prompt_tokens]] |= IN_PROMPT
    return ids_U.astype(np.int64), count_U.astype(np.int16)


def wish_of(params: SamplingParams, *, vocab_size: int) -> int | None:
    """The number for wish_R, NO_WISH where the step's own sampler is enough; None where only model/sampler.py can do
    it: log-probabilities, bias, masks, typical-p, more than MAX_TOP_K candidates, a temperature next to zero."""
    if params.features & _ONLY_WHOLE_SAMPLER or 0 < params.temperature < LEAST_TEMPERATURE:
        return None
    is_filtered = params.temperature > 0 and (0 < params.top_k < vocab_size or params.top_p < 1 or params.min_p > 0)
    if is_filtered:
        return None if MAX_TOP_K < params.top_k < vocab_size else FILTERS
    return PENALTIES_ONLY if params.features & Feature.PENALTY else NO_WISH


def wish_columns(params: SamplingParams, *, vocab_size: int) -> dict[str, float]:
    """By the name of the column; a wish of None is stored as NO_WISH."""
    return {
        "wish": wish_of(params, vocab_size=vocab_size) or NO_WISH,
        "top_k": params.top_k if 0 < params.top_k < vocab_size else 0,
        "top_p": params.top_p,
        "log_min_p": math.log(params.min_p) if params.min_p > 0 else -math.inf,
        "repetition": params.repetition_penalty,
        "presence": params.presence_penalty,
        "frequency": params.frequency_penalty,
    }
