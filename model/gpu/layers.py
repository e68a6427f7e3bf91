"""The decoder layers of a step, with attention left to the caller: products by cuBLAS, the rest by our kernels, with
gate and up of many tokens, which never stand in memory then.

The residual stream x is never normalised in memory: weights have the norms folded in (model/gpu/weights.py), and the
kernels behind a product scale by 1 / rms(x).

Legend: T tokens · N query heads · K kv heads · H head dim · D model dim · I intermediate dim · A = N·H ·
C = (N + 2K)·H.
"""

from collections.abc import Callable

import torch

from model.gpu.weights import GpuWeights, LayerWeights
from model.kernels.activation import silu_mul
from model.kernels.gate_up_product import gate_up_product, is_faster
from model.kernels.rows import rms_scale

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
        self.scale_T = torch.empty(max_tokens, dtype=torch.float32, device=device)


def run_layers(weights: GpuWeights, buffers: LayerBuffers, num_tokens: int, attend: Attend) -> torch.Tensor:
    """Take buffers.x_TD[:num_tokens] through every layer, in place; returns it."""
    if weights.is_quantized:
        from model.gpu.quant_layers import run_quantized_layers  # which needs the types above

        return run_quantized_layers(weights, buffers, num_tokens, attend)
    x_TD, qkv_TC = buffers.x_TD[:num_tokens], buffers.qkv_TC[:num_tokens]
    out_TNH, act_TI = buffers.out_TNH[:num_tokens], buffers.act_TI[:num_tokens]
    eps = weights.config.rms_norm_eps
    activate = _activate_in_one if is_faster(num_tokens, weights.layers[0].gate_up_ED) else _activate
    for index, layer in enumerate(weights.layers):
        torch.mm(x_TD, layer.qkv_CD.T, out=qkv_TC)
        attend(index, layer, qkv_TC, x_TD, out_TNH)
        x_TD.addmm_(out_TNH.flatten(1), layer.o_DA.T)
        activate(layer, buffers, num_tokens, eps)
        x_TD.addmm_(act_TI, layer.down_DI.T)
    return x_TD


def _activate(layer: LayerWeights, buffers: LayerBuffers, num_tokens: int, eps: float) -> None:
    """act_TI from x_TD by way of memory."""
    gate_up_T2I = buffers.gate_up_T2I[:num_tokens]
    torch.mm(buffers.x_TD[:num_tokens], layer.gate_up_ED.T, out=gate_up_T2I)
    silu_mul(gate_up_T2I, buffers.x_TD[:num_tokens], buffers.act_TI[:num_tokens], eps)


def _activate_in_one(layer: LayerWeights, buffers: LayerBuffers, num_tokens: int, eps: float) -> None:
    """As `_activate`, the activation in the product's epilogue."""
    scale_T = buffers.scale_T[:num_tokens]
    rms_scale(buffers.x_TD[:num_tokens], scale_T, eps)
    gate_up_product(buffers.x_TD[:num_tokens], layer.gate_up_ED, scale_T, buffers.act_TI[:num_tokens])
