"""Checked launchers of the kernels in `invariant.c` that fp32 alone has: products and attention.

Each has a slow reference in torch: the product ``F.linear``, `attention` model.attention.reference. A row's bits depend
on nothing but the row.

Legend: T tokens · S sequences · N outputs, or query heads · K inputs, or kv heads · H head dim · P blocks ·
B block size · M table width. Must not know: layers, requests.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from octavo.model.cpu.ops import LANES, loaded_library, require, require_attention, threads_for, threads_for_product

PANEL = 32
"""Outputs of a panel, as in invariant.c."""


@dataclass(frozen=True, slots=True, eq=False)
class InvariantWeight:
    """panels: [P, K, PANEL], bias_N: fp32, padded to whole panels. A `model.layers.linear.Packed`."""

    panels: torch.Tensor
    bias_N: torch.Tensor
    num_outputs: int

    @classmethod
    def pack(cls, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> "InvariantWeight":
        """The same values, reordered. Raises ValueError."""
        require(weight_NK.is_cpu and weight_NK.dtype == torch.float32, "weight_NK")
        num_outputs, behind = len(weight_NK), -len(weight_NK) % PANEL
        whole_NK = F.pad(weight_NK, (0, 0, 0, behind))
        panels = whole_NK.view(-1, PANEL, weight_NK.shape[1]).transpose(1, 2).contiguous()
        bias = torch.zeros(num_outputs) if bias_N is None else bias_N.float()
        return cls(panels, F.pad(bias, (0, behind)), num_outputs)

    @property
    def num_bytes(self) -> int:
        """Size of the weights."""
        return self.panels.numel() * self.panels.element_size()

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., K] of the weights' dtype. Returns [..., N]. Raises ValueError."""
        num_inputs = self.panels.shape[1]
        require(x.is_cpu and x.dtype == self.panels.dtype and x.shape[-1] == num_inputs, "x")
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], self.num_outputs)
        num_rows = x.numel() // num_inputs
        loaded_library().octavo_invariant_product(
            x.data_ptr(),
            self.panels.data_ptr(),
            self.bias_N.data_ptr(),
            out.data_ptr(),
            num_rows,
            self.num_outputs,
            num_inputs,
            threads_for_product(num_rows, self.num_bytes),
        )
        return out


def attention(
    q_SNH: torch.Tensor,
    k_pool_PKBH: torch.Tensor,
    v_pool_PKBH: torch.Tensor,
    table_SM: torch.Tensor,
    context_S: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """One token per sequence, reading the blocks of its table row in place; fp32. table_SM, context_S: int32, contexts
    of at least 1. Raises ValueError, MemoryError."""
    q_SNH, table_SM, context_S = q_SNH.contiguous(), table_SM.contiguous(), context_S.contiguous()
    num_rows, num_heads, head_dim = q_SNH.shape
    num_kv_heads, block_size = k_pool_PKBH.shape[1], k_pool_PKBH.shape[2]
    require_attention(q_SNH, k_pool_PKBH, v_pool_PKBH, table_SM, context_S, dtype=torch.float32, multiple=LANES)
    out_SNH = torch.empty_like(q_SNH)
    failed = loaded_library().octavo_attention_f32(
        q_SNH.data_ptr(),
        k_pool_PKBH.data_ptr(),
        v_pool_PKBH.data_ptr(),
        table_SM.data_ptr(),
        table_SM.shape[1],
        context_S.data_ptr(),
        out_SNH.data_ptr(),
        num_rows,
        num_heads,
        num_kv_heads,
        head_dim,
        block_size,
        scale,
        threads_for(8 * num_heads * head_dim * int(context_S.sum())),
    )
    if failed:
        raise MemoryError("no memory for the weights of an attention")
    return out_SNH
