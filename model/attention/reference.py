"""The obvious attention: a streaming softmax over the blocks of a sequence's table, in fp32, one sequence and one block
after the other. Slow; what every other backend is checked against. Any device.

Legend: T tokens in this step · N query heads · K kv heads · G query heads per kv head · H head dim · P blocks · B block
size · Q new tokens of one sequence · R = Q * G rows that read one kv head · J tokens of one block within the context.
Source: online softmax, Milakov and Gimelshein 2018 (arXiv 1805.02867).
Must not know: other backends.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from octavo.model.attention.interface import AttentionInputs


class ReferenceAttention:
    """Query head h = k * G + g reads KV head k. Keys and values are neither gathered nor concatenated nor repeated."""

    name = "reference"

    def attend(
        self,
        q_TNH: torch.Tensor,
        k_pool_PKBH: torch.Tensor,
        v_pool_PKBH: torch.Tensor,
        inputs: AttentionInputs,
        scale: float,
    ) -> torch.Tensor:
        """See AttentionBackend.attend."""
        out_TNH = torch.empty_like(q_TNH)
        bounds = inputs.cu_query_lens_S1.tolist()
        for s, context_len in enumerate(inputs.context_lens_S.tolist()):
            rows = slice(bounds[s], bounds[s + 1])
            q_QKGH = q_TNH[rows].unflatten(1, (k_pool_PKBH.shape[1], -1))
            q_KQGH = q_QKGH.transpose(0, 1).float() * scale
            out_KQGH = attend_one(q_KQGH, k_pool_PKBH, v_pool_PKBH, inputs.table_SM[s].tolist(), context_len)
            out_TNH[rows] = out_KQGH.transpose(0, 1).flatten(1, 2).to(q_TNH.dtype)
        return out_TNH


def attend_one(
    q_KQGH: torch.Tensor,
    k_pool_PKBH: torch.Tensor,
    v_pool_PKBH: torch.Tensor,
    table: Sequence[int],
    context_len: int,
) -> torch.Tensor:
    """Attention of one sequence's new tokens (fp32, scaled already) over its context. Returns fp32 [K, Q, G, H]."""
    block_size, (num_queries, group_size) = k_pool_PKBH.shape[2], q_KQGH.shape[1:3]
    q_KRH = q_KQGH.flatten(1, 2)
    first = context_len - num_queries
    position_R = torch.arange(first, context_len, device=q_KRH.device).repeat_interleave(group_size)
    softmax = StreamingSoftmax.empty(q_KRH)
    for start in range(0, context_len, block_size):
        block, filled = table[start // block_size], min(block_size, context_len - start)
        k_KJH = k_pool_PKBH[block, :, :filled].float()
        v_KJH = v_pool_PKBH[block, :, :filled].float()
        scores_KRJ = q_KRH @ k_KJH.mT
        if start + filled > first + 1:  # the block reaches beyond the first query
            position_J = torch.arange(start, start + filled, device=q_KRH.device)
            scores_KRJ.masked_fill_(position_J > position_R[:, None], -torch.inf)
        softmax.add(scores_KRJ, v_KJH)
    return softmax.result().unflatten(1, (num_queries, group_size))


@dataclass(slots=True, eq=False)
class StreamingSoftmax:
    """A softmax-weighted sum of values that sees its scores in pieces: the largest score so far, the sum of
    exponentials against it, and the weighted values."""

    largest_KR1: torch.Tensor
    total_KR1: torch.Tensor
    values_KRH: torch.Tensor

    @classmethod
    def empty(cls, q_KRH: torch.Tensor) -> "StreamingSoftmax":
        """Nothing seen yet."""
        column_KR1 = torch.zeros_like(q_KRH[..., :1])
        return cls(column_KR1 - torch.inf, column_KR1, torch.zeros_like(q_KRH))

    def add(self, scores_KRJ: torch.Tensor, v_KJH: torch.Tensor) -> None:
        """Take in one block. The first block must hold a position that every query sees (position 0)."""
        largest_KR1 = torch.maximum(self.largest_KR1, scores_KRJ.amax(-1, keepdim=True))
        shrink_KR1 = torch.exp(self.largest_KR1 - largest_KR1)
        weights_KRJ = torch.exp(scores_KRJ - largest_KR1)
        self.total_KR1 = self.total_KR1 * shrink_KR1 + weights_KRJ.sum(-1, keepdim=True)
        self.values_KRH = self.values_KRH * shrink_KR1 + weights_KRJ @ v_KJH
        self.largest_KR1 = largest_KR1

    def result(self) -> torch.Tensor:
        """The weighted mean [K, R, H]."""
        return self.values_KRH / self.total_KR1
