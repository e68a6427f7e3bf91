"""What the runner knows of every slot: its tokens, its block table, its sampling.

Kept from plans alone: joins, block updates, sampled tokens. Must not know: the block manager, the scheduler.

Legend: R slots · T longest request · M table width · S sampled rows.
"""

import numpy as np
import torch

from octavo.model.sampling.params import SamplingParams
from octavo.model.sampling.penalties import TokenHistory
from octavo.model.sampling.sampler import Sampler
from octavo.wire.messages import Sampling
from octavo.worker.scheduler.plan import NewRequest, StepPlan


class RunnerRows:
    """Rows of numpy arrays, one per slot; entries past a row's length are stale.

    table_RM: int32 block ids, -1 where unset. history: tokens. sampler: the parameters of each row.
    """

    def __init__(
        self,
        *,
        max_slots: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device,
        sampler: type[Sampler] = Sampler,
    ) -> None:
        # One token more than a request may have: a step that runs ahead samples after the last one, for nobody.
        self.history = TokenHistory(max_rows=max_slots, max_len=max_model_len + 1)
        self.table_RM = np.full((max_slots, -(-(max_model_len + 1) // block_size)), -1, np.int32)
        self.sampler = sampler(vocab_size=vocab_size, history=self.history, device=device)
        self._eos_token_ids = eos_token_ids

    def apply(self, plan: StepPlan) -> None:
        """Joins, then block updates; copies of blocks are the KV pool's business."""
        for join in plan.new_requests:
            self._join(join)
        if len(plan.block_updates_U3):
            slot_U, column_U, block_U = plan.block_updates_U3.T
            self.table_RM[slot_U, column_U] = block_U

    def append(self, slots_S: np.ndarray, lengths_S: np.ndarray, tokens_S: np.ndarray) -> None:
        """Each row holds ``lengths_S`` tokens and gets one more."""
        self.history.tokens_RT[slots_S, lengths_S] = tokens_S

    def _join(self, join: NewRequest) -> None:
        self.table_RM[join.slot] = -1
        self.history.put(join.slot, join.token_ids_T, join.num_prompt_tokens)
        params = sampling_params(join.sampling, self._eos_token_ids)
        self.sampler.join(join.slot, params, join.token_ids_T[join.num_prompt_tokens :])


def sampling_params(sampling: Sampling, eos_token_ids: tuple[int, ...]) -> SamplingParams:
    """The sampler's view of a request's parameters: end tokens are stop ids like others, unless ignored."""
    ends = () if sampling.ignore_eos else eos_token_ids
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        min_tokens=0 if sampling.grammar is not None else sampling.min_tokens,  # its masks see to it
        stop_ids=(*sampling.stop_token_ids, *ends),
        num_logprobs=sampling.num_logprobs,
        typical_p=sampling.typical_p,
        logit_bias=sampling.logit_bias,
        allowed_token_ids=sampling.allowed_token_ids,
        bad_words=sampling.bad_words,
    )
