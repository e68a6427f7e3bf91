"""The obvious attention: a streaming softmax over the blocks of a sequence's table, in fp32, one sequence and one block
after the other. Slow; what every other backend is checked against. Any device.

Legend: Q new tokens of one sequence · K kv heads · G query heads per kv head · H head dim · J tokens of one block that
belong to the context.
Source: online softmax, Milakov and Gimelshein 2018 (arXiv 1805.02867).
Must not know: other backends.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from model.attention import AttentionInputs


class ReferenceAttention:
    """Query head h = k * G + g reads KV head k. Nothing is gathered, concatenated or repeated."""

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
            q_QKGH = q_TNH[rows].unflatten(1, (k_pool_PKBH.shape[1], -1)).float() * scale
            out_QKGH = attend_one(q_QKGH, k_pool_PKBH, v_pool_PKBH, inputs.table_SM[s].tolist(), context_len)
            out_TNH[rows] = out_QKGH.flatten(1, 2).to(q_TNH.dtype)
        return out_TNH


def attend_one(
    q_QKGH: torch.Tensor,
    k_pool_PKBH: torch.Tensor,
    v_pool_PKBH: torch.Tensor,
    table: Sequence[int],
    context_len: int,
) -> torch.Tensor:
    """Attention of one sequence's new tokens (fp32, scaled already) over its context."""
    block_size = k_pool_PKBH.shape[2]
    positions_Q = torch.arange(context_len - q_QKGH.shape[0], context_len, device=q_QKGH.device)
    softmax = StreamingSoftmax.empty(q_QKGH)
    for start in range(0, context_len, block_size):
        block = table[start // block_size]
        filled = min(block_size, context_len - start)
        k_KJH = k_pool_PKBH[block, :, :filled].float()
        v_KJH = v_pool_PKBH[block, :, :filled].float()
        scores_QKGJ = torch.einsum("qkgh,kjh->qkgj", q_QKGH, k_KJH)
        positions_J = torch.arange(start, start + filled, device=q_QKGH.device)
        is_future_QJ = positions_J[None] > positions_Q[:, None]
        scores_QKGJ = scores_QKGJ.masked_fill(is_future_QJ[:, None, None], -torch.inf)
        softmax.add(scores_QKGJ, v_KJH)
    return softmax.result()


@dataclass(slots=True, eq=False)
class StreamingSoftmax:
    """A softmax-weighted sum of values that sees its scores in pieces: the largest score so far, the sum of
    exponentials against it, and the weighted values."""

    largest_QKG1: torch.Tensor
    total_QKG1: torch.Tensor
    values_QKGH: torch.Tensor

    @classmethod
    def empty(cls, q_QKGH: torch.Tensor) -> "StreamingSoftmax":
        """Nothing seen yet."""
        column_QKG1 = torch.zeros_like(q_QKGH[..., :1])
        return cls(column_QKG1 - torch.inf, column_QKG1, torch.zeros_like(q_QKGH))

    def add(self, scores_QKGJ: torch.Tensor, v_KJH: torch.Tensor) -> None:
        """Take in one block. The first block must hold a position that every query sees (position 0)."""
        largest_QKG1 = torch.maximum(self.largest_QKG1, scores_QKGJ.amax(-1, keepdim=True))
        shrink_QKG1 = torch.exp(self.largest_QKG1 - largest_QKG1)
        weights_QKGJ = torch.exp(scores_QKGJ - largest_QKG1)
        self.total_QKG1 = self.total_QKG1 * shrink_QKG1 + weights_QKGJ.sum(-1, keepdim=True)
        weighted_QKGH = torch.einsum("qkgj,kjh->qkgh", weights_QKGJ, v_KJH)
        self.values_QKGH = self.values_QKGH * shrink_QKG1 + weighted_QKGH
        self.largest_QKG1 = largest_QKG1

    def result(self) -> torch.Tensor:
        """The weighted mean [Q, K, G, H]."""
        return self.values_QKGH / self.total_QKG1
