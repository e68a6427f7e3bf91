"""The decoder layers of a step, with attention left to the caller: products by cuBLAS (of fewer bits:
model/gpu/quant_products.py), the rest by our kernels, with gate and up of many tokens, which never stand in memory
then.

The residual stream x is never normalised in memory: weights have the norms folded in (model/gpu/weights.py), and the
kernels behind a product scale by 1 / rms(x).

Legend: T tokens · S rows, of all tokens or some · N query heads · K kv heads · H head dim · D model dim ·
I intermediate dim · A = N·H · C = (N + 2K)·H.
"""

from collections.abc import Callable

import torch

from octavo.model.gpu.quant_products import QuantProducts, matrices_of
from octavo.model.gpu.weights import GpuWeights, LayerWeights, QuantMatrices
from octavo.model.kernels.products.activation import silu_mul
from octavo.model.kernels.products.gate_up import gate_up_product, is_faster
from octavo.model.kernels.rows import rms_scale

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
    x_TD = attend_layers(weights, buffers, num_tokens, attend)
    add_rest(weights, len(weights.layers) - 1, buffers, x_TD, buffers.out_TNH[:num_tokens])
    return x_TD


def attend_layers(weights: GpuWeights, buffers: LayerBuffers, num_tokens: int, attend: Attend) -> torch.Tensor:
    """`run_layers` up to the last layer's attention, which is left in buffers.out_TNH for `add_rest`."""
    x_TD, qkv_TC, out_TNH = buffers.x_TD[:num_tokens], buffers.qkv_TC[:num_tokens], buffers.out_TNH[:num_tokens]
    for index, layer in enumerate(weights.layers):
        if index:
            add_rest(weights, index - 1, buffers, x_TD, out_TNH)
        if weights.products is None:
            torch.mm(x_TD, layer.qkv_CD.T, out=qkv_TC)
        else:
            weights.products.multiply(x_TD, matrices_of(layer).qkv, qkv_TC)
        attend(index, layer, qkv_TC, x_TD, out_TNH)
    return x_TD


def add_rest(weights: GpuWeights, index: int, buffers: LayerBuffers, x_SD: torch.Tensor, out_SNH: torch.Tensor) -> None:
    """What follows attention in a layer, for any rows: x_SD, in place, gets o(out), then down(silu(gate) * up)."""
    layer, eps, num_rows = weights.layers[index], weights.config.rms_norm_eps, len(x_SD)
    if weights.products is not None:
        _add_quantized_rest(weights.products, matrices_of(layer), buffers, x_SD, out_SNH, eps)
        return
    x_SD.addmm_(out_SNH.flatten(1), layer.o_DA.T)
    activate = _activate_in_one if is_faster(num_rows, layer.gate_up_ED) else _activate
    activate(layer, buffers, x_SD, eps)
    x_SD.addmm_(buffers.act_TI[:num_rows], layer.down_DI.T)


def _add_quantized_rest(
    products: QuantProducts,
    matrices: QuantMatrices,
    buffers: LayerBuffers,
    x_SD: torch.Tensor,
    out_SNH: torch.Tensor,
    eps: float,
) -> None:
    """`add_rest` of matrices that have fewer bits."""
    gate_up_S2I, act_SI = buffers.gate_up_T2I[: len(x_SD)], buffers.act_TI[: len(x_SD)]
    products.add_product(out_SNH.flatten(1), matrices.output, x_SD)
    products.multiply(x_SD, matrices.gate_up, gate_up_S2I)
    silu_mul(gate_up_S2I, x_SD, act_SI, eps)
    products.add_product(act_SI, matrices.down, x_SD)


def _activate(layer: LayerWeights, buffers: LayerBuffers, x_SD: torch.Tensor, eps: float) -> None:
    """buffers.act_TI from x_SD by way of memory."""
    gate_up_S2I = buffers.gate_up_T2I[: len(x_SD)]
    torch.mm(x_SD, layer.gate_up_ED.T, out=gate_up_S2I)
    silu_mul(gate_up_S2I, x_SD, buffers.act_TI[: len(x_SD)], eps)


def _activate_in_one(layer: LayerWeights, buffers: LayerBuffers, x_SD: torch.Tensor, eps: float) -> None:
    """As `_activate`, the activation in the product's epilogue."""
    scale_S = buffers.scale_T[: len(x_SD)]
    rms_scale(x_SD, scale_S, eps)
    gate_up_product(x_SD, layer.gate_up_ED, scale_S, buffers.act_TI[: len(x_SD)])
