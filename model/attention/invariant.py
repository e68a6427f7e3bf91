"""Attention in deterministic mode on a CPU: every new token is a sequence of its own over its context so far.

How a prompt was cut, and whether a token was decoded, then changes nothing: the kernels of model.cpu give a token a
result that depends on its context alone. A prompt's keys are read once for each of its tokens, which is the price.

Legend: T tokens in this step · S sequences · N query heads · H head dim · P blocks · K kv heads · B block size ·
M table width. Must not know: other backends.
"""

from dataclasses import dataclass

import torch

from octavo.model.attention.interface import AttentionInputs
from octavo.model.cpu import invariant, ops


@dataclass(frozen=True, slots=True, eq=False)
class TokenPlan:
    """int32: table row and context length of every token, its own position included."""

    table_TM: torch.Tensor
    context_T: torch.Tensor


class InvariantAttention:
    """bf16 and fp32, with the compiled kernels."""

    name = "invariant"

    def attend(
        self,
        q_TNH: torch.Tensor,
        k_pool_PKBH: torch.Tensor,
        v_pool_PKBH: torch.Tensor,
        inputs: AttentionInputs,
        scale: float,
    ) -> torch.Tensor:
        """See AttentionBackend.attend."""
        plan = plan_of(inputs)
        where = (k_pool_PKBH, v_pool_PKBH, plan.table_TM, plan.context_T, scale)
        if q_TNH.dtype == torch.bfloat16:
            return ops.decode_attention(q_TNH, *where, max_context_len=inputs.max_context_len)
        return invariant.attention(q_TNH, *where)


def plan_of(inputs: AttentionInputs) -> TokenPlan:
    """This step's plan, made in its first layer."""
    plan = inputs.derived.get("invariant")
    if plan is None:
        plan = inputs.derived["invariant"] = make_plan(inputs)
    return plan


def make_plan(inputs: AttentionInputs) -> TokenPlan:
    """One row per token: its sequence's, with the context that ends at the token."""
    bounds_S1 = inputs.cu_query_lens_S1.long()
    length_S = bounds_S1.diff()
    sequence_T = torch.repeat_interleave(torch.arange(len(length_S)), length_S)
    behind_T = bounds_S1[1:][sequence_T] - 1 - torch.arange(len(sequence_T))
    context_T = inputs.context_lens_S.long()[sequence_T] - behind_T
    return TokenPlan(inputs.table_SM[sequence_T].contiguous(), context_T.to(torch.int32))
