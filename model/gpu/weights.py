"""The weights as the GPU steps need them: RMSNorm weights are folded into the matrices that follow them.

(x / rms(x) * g) @ W.T equals (x @ (W * g).T) / rms(x): with g in the matrix, no kernel normalises before a matrix
product, and the consumer of the product applies 1 / rms(x). Folding is done in float32 and rounded once.

Legend: D model dim · I intermediate dim · V rows of the embedding · C = (N + 2K)·H columns of the QKV product ·
A = N·H · E = 2 I · L positions of the RoPE table.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from octavo.model.causal_lm import CausalLM
from octavo.model.config import ModelConfig
from octavo.model.layers.decoder import DecoderLayer, rotary_frequencies, yarn_amplitude
from octavo.model.layers.linear import Linear, WeightFormat
from octavo.model.parallel import ALONE, Ranks
from octavo.model.quantization.grouped import GroupedWeight, join_outputs
from octavo.model.quantization.rounding import Fp8Weight, round_to_groups

if TYPE_CHECKING:
    from octavo.model.gpu.quant_products import QuantProducts


Matrix = GroupedWeight | Fp8Weight | torch.Tensor
"""A matrix of a layer in which some are quantised; the others are plain."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantMatrices:
    """The matrices of a layer in which some are quantised. Norms are folded into plain and e4m3 weights; for integers,
    into the scales of the inputs."""

    qkv: Matrix
    output: Matrix
    gate_up: Matrix
    down: Matrix

    def all(self) -> tuple[Matrix, ...]:
        """All four, in the order of a step."""
        return self.qkv, self.output, self.gate_up, self.down


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One decoder layer. Every matrix is [out, in]; products take transposed views. If `quantized` has the matrices,
    the plain ones are empty. qkv_bias_C, qk_norm_2H (of query heads, of key heads): None if the family has none."""

    qkv_CD: torch.Tensor
    qkv_bias_C: torch.Tensor | None
    o_DA: torch.Tensor
    gate_up_ED: torch.Tensor
    down_DI: torch.Tensor
    qk_norm_2H: torch.Tensor | None = None
    quantized: QuantMatrices | None = None


AddInPlace = Callable[[torch.Tensor, torch.Tensor], None]
"""(x_SI, out_SO): adds to out_SO, which holds a product with x_SI, by kernels that a CUDA graph can capture."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerAddends:
    """What is added to the products of a layer (LoRA, arXiv 2106.09685); None for nothing. Those of qkv and gate_up get
    x before its norm, whose weight they must have folded in; what they add is scaled by 1 / rms(x) with the product."""

    qkv: AddInPlace | None = None
    output: AddInPlace | None = None
    gate_up: AddInPlace | None = None
    down: AddInPlace | None = None


@dataclass(frozen=True, slots=True, eq=False)
class GpuWeights:
    """The model, or a rank's part of it. cos_LH, sin_LH: float32 [max positions, H / 2], YaRN's amplitude included.

    products: scratch for quantised matrices, None if they are plain. addends: for each layer; None if there are none.
    ranks: over which the products of a layer are summed.
    """

    config: ModelConfig
    dtype: torch.dtype
    layers: tuple[LayerWeights, ...]
    embed_VD: torch.Tensor
    norm_D: torch.Tensor
    head_VD: torch.Tensor
    cos_LH: torch.Tensor
    sin_LH: torch.Tensor
    products: "QuantProducts | None" = None
    addends: tuple[LayerAddends, ...] | None = None
    ranks: Ranks = ALONE

    @property
    def has_plain_products(self) -> bool:
        """Whether the layers' matrices are not quantised and nothing is added to products."""
        return self.products is None and self.addends is None

    @property
    def is_quantized(self) -> bool:
        """Whether the layers' matrices are quantised."""
        return self.products is not None

    @classmethod
    def take(
        cls, model: CausalLM, *, max_positions: int, weight_format: WeightFormat = WeightFormat.BF16
    ) -> "GpuWeights":
        """Fold the model's own tensors in place: the model cannot be used on its own afterwards, and there is never a
        second copy of the weights. weight_format: what the layers' matrices are rounded to, one after another; those
        that are already quantised in the model stay as they are, as do plain ones beside them with BF16."""
        cos_LH, sin_LH = rope_tables(model.config, max_positions, model.device)
        weights = cls(
            config=model.config,
            dtype=model.dtype,
            layers=tuple(take_layer(layer, weight_format) for layer in model.decoder_layers),
            embed_VD=model.embed_tokens.weight.data,
            norm_D=model.norm.weight.data,
            head_VD=model.lm_head.weight.data,
            cos_LH=cos_LH,
            sin_LH=sin_LH,
            ranks=model.ranks,
        )
        if all(layer.quantized is None for layer in weights.layers):
            return weights
        from octavo.model.gpu.quant_products import QuantProducts  # which needs the types above

        return replace(weights, products=QuantProducts.allocate(weights))


def take_layer(layer: DecoderLayer, weight_format: WeightFormat) -> LayerWeights:
    """The layer's matrices, plain or quantised."""
    linears = (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj)
    is_packed = any(linear.quantized is not None for linear in linears)  # ranks unpack what they cannot cut
    if weight_format is WeightFormat.BF16 and not is_packed:
        return fold_layer(layer)
    matrices = QuantMatrices(
        qkv=quantize(layer.self_attn.qkv_proj, weight_format, layer.input_layernorm.weight.data),
        output=quantize(layer.self_attn.o_proj, weight_format),
        gate_up=quantize(layer.mlp.gate_up_proj, weight_format, layer.post_attention_layernorm.weight.data),
        down=quantize(layer.mlp.down_proj, weight_format),
    )
    none = layer.input_layernorm.weight.data.new_empty(0, 0)
    return LayerWeights(
        qkv_CD=none, qkv_bias_C=qkv_bias(layer), o_DA=none, gate_up_ED=none, down_DI=none,
        qk_norm_2H=qk_norm(layer), quantized=matrices,
    )  # fmt: skip


def qkv_bias(layer: DecoderLayer) -> torch.Tensor | None:
    """bias_C of the QKV product, None if the family has none."""
    bias = layer.self_attn.qkv_proj.bias
    return None if bias is None else bias.data


def qk_norm(layer: DecoderLayer) -> torch.Tensor | None:
    """qk_norm_2H: the norm weights of query heads and of key heads, None if the family has none."""
    q_norm, k_norm = layer.self_attn.q_norm, layer.self_attn.k_norm
    return None if q_norm is None or k_norm is None else torch.stack([q_norm.weight.data, k_norm.weight.data])


def quantize(linear: Linear, weight_format: WeightFormat, norm_D: torch.Tensor | None = None) -> Matrix:
    """Quantise the layer's weight, fold the norm's weight in and set that to one. Returns the quantised weight, which
    the layer then holds instead of the plain one; with BF16, a plain weight stays plain."""
    held = linear.quantized
    if held is None and norm_D is not None:
        fold(linear.weight.data, norm_D)
    if held is None and weight_format is WeightFormat.BF16:
        return linear.weight.data
    if held is None:
        plain = linear.weight.data
        held = Fp8Weight.quantize(plain) if weight_format is WeightFormat.FP8 else round_rows_to_integers(plain)
    elif norm_D is not None:
        held = held.with_inputs_scaled(norm_D) if isinstance(held, GroupedWeight) else held
        norm_D.fill_(1.0)
    linear.hold(held)
    return held


def round_rows_to_integers(weight_OI: torch.Tensor) -> GroupedWeight:
    """8 bits, one scale per output, as on a CPU; in parts of 4096 outputs, since a whole float32 copy would be
    large."""
    parts = [round_to_groups(part, bits=8) for part in weight_OI.split(4096)]
    joined = join_outputs(parts)
    assert joined is not None
    return joined


def fold_layer(layer: DecoderLayer) -> LayerWeights:
    """The layer's matrices with its norms folded in. The norms' weights become ones, so that the layer still computes
    the same function."""
    fold(layer.self_attn.qkv_proj.weight.data, layer.input_layernorm.weight.data)
    fold(layer.mlp.gate_up_proj.weight.data, layer.post_attention_layernorm.weight.data)
    return LayerWeights(
        qkv_CD=layer.self_attn.qkv_proj.weight.data,
        qkv_bias_C=qkv_bias(layer),
        qk_norm_2H=qk_norm(layer),
        o_DA=layer.self_attn.o_proj.weight.data,
        gate_up_ED=layer.mlp.gate_up_proj.weight.data,
        down_DI=layer.mlp.down_proj.weight.data,
    )


def fold(matrix_OD: torch.Tensor, norm_D: torch.Tensor) -> None:
    """matrix *= norm, column by column, in place; norm is set to one."""
    matrix_OD.copy_(matrix_OD.float() * norm_D.float())
    norm_D.fill_(1.0)


def rope_tables(
    config: ModelConfig, max_positions: int, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 cosines and sines [max_positions, H / 2] (model/layers/decoder.py)."""
    positions_L = torch.arange(max_positions, dtype=torch.float32)
    angle_LH = positions_L[:, None] * rotary_frequencies(config)[None, :]
    amplitude = yarn_amplitude(config.yarn) if config.yarn else 1.0
    return (angle_LH.cos() * amplitude).to(device), (angle_LH.sin() * amplitude).to(device)
