"""The decoder layers of a step, with attention left to the caller: products by cuBLAS, the rest by our kernels.

The residual stream x is never normalised in memory: weights have the norms folded in (model/gpu/weights.py), and the
kernels behind a product scale by 1 / rms(x).

Legend: T tokens · N query heads · K kv heads · H head dim · D model dim · I intermediate dim · A = N·H ·
C = (N + 2K)·H.
"""

from collections.abc import Callable

import torch

from model.gpu.weights import GpuWeights, LayerWeights
from model.kernels.activation import silu_mul

Attend = Callable[[int, LayerWeights, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""(layer index, its weights, qkv_TC, x_TD, out_TNH): writes the caches and fills out."""


class LayerBuffers:
    """Room for up to max_tokens tokens between the products of a layer; one set serves all layers."""

    def __init__(self, weights: GpuWeights, max_tokens: int) -> None:
        config, device = weights.config, weights.embed_VD.device

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(max_tokens, *shape, dtype=weights.dtype, device=device)

        heads = config.num_attention_heads + 2 * config.num_key_value_heads
        self.x_TD = empty(config.hidden_size)
        self.qkv_TC = empty(heads * config.head_dim)
        self.out_TNH = empty(config.num_attention_heads, config.head_dim)
        self.gate_up_T2I = empty(2 * config.intermediate_size)
        self.act_TI = empty(config.intermediate_size)


def run_layers(weights: GpuWeights, buffers: LayerBuffers, num_tokens: int, attend: Attend) -> torch.Tensor:
    """Take buffers.x_TD[:num_tokens] through every layer, in place; returns it."""
    if weights.is_quantized:
        from model.gpu.quant_layers import run_quantized_layers  # which needs the types above

        return run_quantized_layers(weights, buffers, num_tokens, attend)
    x_TD, qkv_TC = buffers.x_TD[:num_tokens], buffers.qkv_TC[:num_tokens]
    out_TNH, gate_up_T2I = buffers.out_TNH[:num_tokens], buffers.gate_up_T2I[:num_tokens]
    act_TI, eps = buffers.act_TI[:num_tokens], weights.config.rms_norm_eps
    for index, layer in enumerate(weights.layers):
        torch.mm(x_TD, layer.qkv_CD.T, out=qkv_TC)
        attend(index, layer, qkv_TC, x_TD, out_TNH)
        x_TD.addmm_(out_TNH.flatten(1), layer.o_DA.T)
        torch.mm(x_TD, layer.gate_up_ED.T, out=gate_up_T2I)
        silu_mul(gate_up_T2I, x_TD, act_TI, eps)
        x_TD.addmm_(act_TI, layer.down_DI.T)
    return x_TD
