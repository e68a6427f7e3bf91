"""Checked launchers of the kernels in `invariant.c`: products, norm, SiLU and attention in fp32.

Each has a slow reference in torch: the product ``F.linear``, `rms_norm` model.layers.decoder.plain_rms_norm,
`silu_mul` the expression in model.layers.decoder.Mlp, `attention` model.attention.reference. A row's bits depend on
nothing but the row.

Legend: T tokens · S sequences · N outputs, or query heads · K inputs, or kv heads · H head dim · D model dim ·
I intermediate · P blocks · B block size · M table width. Must not know: layers, requests.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from octavo.model.cpu.native import loaded_library
from octavo.model.cpu.ops import LANES, require, require_attention, threads_for, threads_for_product

PANEL = 32
"""Outputs of a panel, as in invariant.c."""


@dataclass(frozen=True, slots=True, eq=False)
class InvariantWeight:
    """panels: [P, K, PANEL], bias_N: fp32, filled up to whole panels. A `model.layers.linear.Packed`."""

    panels: torch.Tensor
    bias_N: torch.Tensor
    num_outputs: int

    @classmethod
    def pack(cls, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> "InvariantWeight":
        """The same values in another order. Raises ValueError."""
        require(weight_NK.is_cpu and weight_NK.dtype == torch.float32, "weight_NK")
        num_outputs, behind = len(weight_NK), -len(weight_NK) % PANEL
        whole_NK = F.pad(weight_NK, (0, 0, 0, behind))
        panels = whole_NK.view(-1, PANEL, weight_NK.shape[1]).transpose(1, 2).contiguous()
        bias = torch.zeros(num_outputs) if bias_N is None else bias_N.float()
        return cls(panels, F.pad(bias, (0, behind)), num_outputs)

    @property
    def num_bytes(self) -> int:
        """Of the weights."""
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


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, epsilon: float) -> torch.Tensor:
    """See model.layers.decoder.RmsNorm; fp32, D a multiple of LANES."""
    x_TD = x_TD.contiguous()
    num_rows, dim = x_TD.shape
    require(weight_D.shape == (dim,) and dim % LANES == 0, "weight_D")
    require(x_TD.dtype == weight_D.dtype == torch.float32, "dtype")
    out_TD = torch.empty_like(x_TD)
    loaded_library().octavo_rms_norm_f32(
        x_TD.data_ptr(), weight_D.data_ptr(), out_TD.data_ptr(), num_rows, dim, epsilon, threads_for(4 * num_rows * dim)
    )
    return out_TD


def silu_mul(gate_up_TE: torch.Tensor) -> torch.Tensor:
    """silu of the first half of each row times its second half: fp32 [T, 2 I] to [T, I], I a multiple of LANES."""
    gate_up_TE = gate_up_TE.contiguous()
    num_rows, dim = gate_up_TE.shape[0], gate_up_TE.shape[1] // 2
    require(gate_up_TE.dtype == torch.float32 and dim % LANES == 0, "gate_up_TE")
    out_TI = gate_up_TE.new_empty(num_rows, dim)
    loaded_library().octavo_silu_mul_f32(
        gate_up_TE.data_ptr(), out_TI.data_ptr(), num_rows, dim, threads_for(8 * num_rows * dim)
    )
    return out_TI


def attention(
    q_SNH: torch.Tensor,
    k_pool_PKBH: torch.Tensor,
    v_pool_PKBH: torch.Tensor,
    table_SM: torch.Tensor,
    context_S: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """One token per sequence, over the blocks of its table row as they lie; fp32. table_SM, context_S: int32, contexts
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
