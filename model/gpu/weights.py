"""The weights as the GPU steps want them: RMSNorm's weights folded into the matrices that follow them.

(x / rms(x) * g) @ W.T equals (x @ (W * g).T) / rms(x): with g in the matrix, no kernel normalises before a matrix
product, and the consumer of the product applies 1 / rms(x). Folded in float32 and rounded once.

Legend: D model dim · I intermediate dim · V rows of the embedding · C = (N + 2K)·H columns of the QKV product.
"""

from dataclasses import dataclass

import torch

from model.config import Qwen2Config
from model.layers import DecoderLayer
from model.qwen2 import Qwen2ForCausalLM
from model.rope import rotary_frequencies, yarn_amplitude


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One decoder layer; every matrix is [out, in], transposed views of them go to the products."""

    qkv_CD: torch.Tensor
    qkv_bias_C: torch.Tensor
    o_DA: torch.Tensor
    gate_up_ED: torch.Tensor
    down_DI: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class GpuWeights:
    """The whole model. cos_LH, sin_LH: float32 [max positions, H / 2], YaRN's amplitude included."""

    config: Qwen2Config
    dtype: torch.dtype
    layers: tuple[LayerWeights, ...]
    embed_VD: torch.Tensor
    norm_D: torch.Tensor
    head_VD: torch.Tensor
    cos_LH: torch.Tensor
    sin_LH: torch.Tensor

    @classmethod
    def take(cls, model: Qwen2ForCausalLM, *, max_positions: int) -> "GpuWeights":
        """Fold the model's own tensors in place: the model cannot be used on its own afterwards, and no second copy of
        the weights exists at any time."""
        cos_LH, sin_LH = rope_tables(model.config, max_positions, model.device)
        return cls(
            config=model.config,
            dtype=model.dtype,
            layers=tuple(fold_layer(layer) for layer in model.decoder_layers),
            embed_VD=model.embed_tokens.weight.data,
            norm_D=model.norm.weight.data,
            head_VD=model.lm_head.weight.data,
            cos_LH=cos_LH,
            sin_LH=sin_LH,
        )


def fold_layer(layer: DecoderLayer) -> LayerWeights:
    """The layer's matrices with its norms folded in. The norms' weights become ones, so that the layer still computes
    the same function."""
    fold(layer.self_attn.qkv_proj.weight.data, layer.input_layernorm.weight.data)
    fold(layer.mlp.gate_up_proj.weight.data, layer.post_attention_layernorm.weight.data)
    bias = layer.self_attn.qkv_proj.bias
    assert bias is not None
    return LayerWeights(
        qkv_CD=layer.self_attn.qkv_proj.weight.data,
        qkv_bias_C=bias.data,
        o_DA=layer.self_attn.o_proj.weight.data,
        gate_up_ED=layer.mlp.gate_up_proj.weight.data,
        down_DI=layer.mlp.down_proj.weight.data,
    )


def fold(matrix_OD: torch.Tensor, norm_D: torch.Tensor) -> None:
    """matrix *= norm, column by column, in place; norm becomes one."""
    matrix_OD.copy_(matrix_OD.float() * norm_D.float())
    norm_D.fill_(1.0)


def rope_tables(
    config: Qwen2Config, max_positions: int, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 cosines and sines [max_positions, H / 2] (model/rope.py)."""
    positions_L = torch.arange(max_positions, dtype=torch.float32)
    angle_LH = positions_L[:, None] * rotary_frequencies(config)[None, :]
    amplitude = yarn_amplitude(config.yarn) if config.yarn else 1.0
    return (angle_LH.cos() * amplitude).to(device), (angle_LH.sin() * amplitude).to(device)
