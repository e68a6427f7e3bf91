"""Keys and values brought into the range of an 8-bit cache, by factors that no later step has to know.

An e4m3 cache holds magnitudes up to 448. Its relative precision is the same from there down to 2^-6, so all that a
scale has to do is to keep values below the top; calibration would gain nothing. RMSNorm bounds what a key can become:
the normalised input has a norm of at most sqrt(D), so (Cauchy and Schwarz) |w·x + b| <= |w * g| sqrt(D) + |b|; RoPE
turns two of them into at most the root of their squares' sum. Each layer and KV head gets the power of two that brings
its bound to 448, divided into the rows of the key's matrix and multiplied into those of its queries, and likewise for
values and the inputs of the output matrix. Powers of two round nothing, so the model computes the same function.

Where each key head is normalised (model/families), its norm takes back what its matrix is multiplied with, and bounds
keys by itself: |k| <= sqrt(H) |g|. One power of two for all heads goes into the weights of both norms then.

Legend: N query heads · K kv heads · H head dim · D model dim · A = N·H · C = (N + 2K)·H.
Must not know: the cache, devices' kernels.
"""

import torch

from octavo.model.causal_lm import CausalLM
from octavo.model.config import ModelConfig
from octavo.model.layers.decoder import DecoderLayer, yarn_amplitude
from octavo.model.layers.linear import Linear
from octavo.model.quantization.grouped import GroupedWeight
from octavo.model.quantization.rounding import FP8_MAX


def fold_cache_scales(model: CausalLM) -> None:
    """Change the matrices in place; call before they are packed or rounded."""
    for layer in model.decoder_layers:
        fold_layer_scales(layer, model.config)


def fold_layer_scales(layer: DecoderLayer, config: ModelConfig) -> None:
    """One layer of `fold_cache_scales`."""
    N, K, H, G = config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.group_size
    qkv, output = layer.self_attn.qkv_proj, layer.self_attn.o_proj
    key_K, value_K = cache_scales(qkv, layer.input_layernorm.weight.data, config)
    q_norm, k_norm = layer.self_attn.q_norm, layer.self_attn.k_norm
    if q_norm is not None and k_norm is not None:
        key = normed_key_scale(k_norm.weight.data, config)
        k_norm.weight.data.copy_(k_norm.weight.data.float() / key)
        q_norm.weight.data.copy_(q_norm.weight.data.float() * key)
        key_K = torch.ones_like(key_K)
    query_N, value_N = key_K.repeat_interleave(G), value_K.repeat_interleave(G)
    factor_C = torch.cat([query_N, 1 / key_K, 1 / value_K]).repeat_interleave(H)
    assert len(factor_C) == (N + 2 * K) * H
    scale_outputs(qkv, factor_C)
    scale_inputs(output, value_N.repeat_interleave(H))


def cache_scales(qkv: Linear, norm_D: torch.Tensor, config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 powers of two [K] by which keys and values are to be divided."""
    K, H = config.num_key_value_heads, config.head_dim
    weight_CD = qkv.quantized.dequantized() if qkv.quantized is not None else qkv.weight.data
    rows = weight_CD[-2 * K * H :].float() * norm_D.float()
    bound = rows.norm(dim=1) * config.hidden_size**0.5
    if qkv.bias is not None:
        bound += qkv.bias.data[-2 * K * H :].float().abs()
    key_K2H, value_KH = bound[: K * H].view(K, 2, H // 2), bound[K * H :].view(K, H)
    amplitude = yarn_amplitude(config.yarn) if config.yarn else 1.0
    return power_of_two(key_K2H.norm(dim=1).amax(1) * amplitude), power_of_two(value_KH.amax(1))


def normed_key_scale(norm_H: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """float32 power of two by which normalised keys are to be divided."""
    pair_2H = norm_H.float().view(2, config.head_dim // 2)
    amplitude = yarn_amplitude(config.yarn) if config.yarn else 1.0
    return power_of_two(pair_2H.norm(dim=0).amax() * config.head_dim**0.5 * amplitude)


def power_of_two(bound_K: torch.Tensor) -> torch.Tensor:
    """The least that brings each bound to FP8_MAX; 1 for a bound of 0."""
    exponent_K = (bound_K / FP8_MAX).clamp(min=2.0**-60).log2().ceil()
    return torch.where(bound_K > 0, torch.exp2(exponent_K), torch.ones_like(bound_K))


def scale_outputs(linear: Linear, factor_O: torch.Tensor) -> None:
    """Multiply rows and bias by powers of two."""
    if linear.bias is not None:
        linear.bias.data.copy_(linear.bias.data.float() * factor_O)
    if isinstance(linear.quantized, GroupedWeight):
        linear.hold(linear.quantized.with_outputs_scaled(factor_O))
    else:
        linear.weight.data.mul_(factor_O[:, None].to(linear.weight.dtype))


def scale_inputs(linear: Linear, factor_I: torch.Tensor) -> None:
    """Multiply columns by powers of two."""
    if isinstance(linear.quantized, GroupedWeight):
        linear.hold(linear.quantized.with_inputs_scaled(factor_I))
    else:
        linear.weight.data.mul_(factor_I.to(linear.weight.dtype))
