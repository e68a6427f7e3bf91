"""One decoder layer by torch and the C kernels: RMSNorm, RoPE, attention with fused QKV, SwiGLU with fused gate and up.
What a family has besides (a bias of QKV, norms of queries and keys) is optional here; the order of the operations is
the family's (model/families).

Legend: T tokens in this step · S wanted rows · N query heads · K kv heads · H head dim · D model dim ·
I intermediate dim · P blocks · B block size · C columns of QKV · E = 2 I.
Must not know: checkpoints, how many layers there are, who owns a block.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from octavo.model.attention.interface import AttentionBackend, AttentionInputs
from octavo.model.attention.kv_pool import KvPool, write_rows_of
from octavo.model.config import ModelConfig
from octavo.model.cpu.ops import LANES, rms_norm, rope_write, silu_mul, takes
from octavo.model.cpu.products import LayerRest
from octavo.model.layers.linear import Linear
from octavo.model.layers.rope_scaling import YarnScaling
from octavo.model.parallel import ALONE, Ranks

MakeTensor = Callable[..., torch.Tensor]
"""Shape in, uninitialised tensor of the model's dtype and device out."""


class RmsNorm(nn.Module):
    """Divides each row by its root mean square, in fp32 whatever the dtype, then multiplies with the weight (Zhang and
    Sennrich 2019, arXiv 1910.07467).

    The row is rounded to its dtype before the weight is applied, as transformers does: bf16 results are the same bits.
    """

    def __init__(self, weight_D: torch.Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_D, requires_grad=False)
        self.epsilon = epsilon

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Returns a new tensor of x's dtype."""
        if x_TD.dim() == 2 and takes(x_TD, width=x_TD.shape[1]):
            return rms_norm(x_TD, self.weight, self.epsilon)
        return plain_rms_norm(x_TD, self.weight, self.epsilon)


def plain_rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, epsilon: float) -> torch.Tensor:
    """With torch's operators, on any device."""
    wide_TD = x_TD.float()
    mean_square_T1 = wide_TD.pow(2).mean(-1, keepdim=True)
    return weight_D * (wide_TD * torch.rsqrt(mean_square_T1 + epsilon)).to(x_TD.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class RopeAngles:
    """cos_TH / sin_TH: the cosines and sines of this step's positions, in the dtype of the activations."""

    cos_TH: torch.Tensor
    sin_TH: torch.Tensor


class Rope:
    """Angles of rotary position embeddings (Su et al. 2021, arXiv 2104.09864) with YaRN, in the half-split layout of
    Hugging Face checkpoints. Frequencies and angles are fp32 whatever the model's dtype: bf16 cannot represent position
    257."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._frequencies = rotary_frequencies(config).to(device)
        self._amplitude = yarn_amplitude(config.yarn) if config.yarn else 1.0

    def angles(self, positions_T: torch.Tensor) -> RopeAngles:
        """positions_T: any integer dtype, 0-based."""
        half = positions_T.float()[:, None] * self._frequencies
        angles_TH = torch.cat([half, half], dim=-1)
        cos_TH, sin_TH = angles_TH.cos() * self._amplitude, angles_TH.sin() * self._amplitude
        return RopeAngles(cos_TH.to(self._dtype), sin_TH.to(self._dtype))


def rotate(x_TNH: torch.Tensor, angles: RopeAngles) -> torch.Tensor:
    """Turn each pair (h, h + H/2) of every head by its angle. Returns a new tensor of the same dtype."""
    first, second = x_TNH.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return x_TNH * angles.cos_TH[:, None] + turned * angles.sin_TH[:, None]


def rotary_frequencies(config: ModelConfig) -> torch.Tensor:
    """fp32 [H/2]: radians per position of each pair."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    periods = config.rope_theta**exponents
    if config.yarn is None:
        return 1.0 / periods
    keep = yarn_keep_share(config, config.yarn)
    return (1.0 / (config.yarn.factor * periods)) * (1 - keep) + (1.0 / periods) * keep


def yarn_keep_share(config: ModelConfig, yarn: YarnScaling) -> torch.Tensor:
    """fp32 [H/2]: 1 for frequencies that turn often enough within the original context to be kept, 0 for those divided
    by the factor, a ramp in between (YaRN, "NTK-by-parts")."""

    def pair_of(rotations: float) -> float:
        """The (fractional) pair that turns this many times within the original context."""
        wavelength = yarn.original_max_position_embeddings / (rotations * 2 * math.pi)
        return config.head_dim * math.log(wavelength) / (2 * math.log(config.rope_theta))

    low = max(math.floor(pair_of(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_of(yarn.beta_slow)), config.head_dim - 1)
    width = (high - low) or 0.001
    pairs = torch.arange(config.head_dim // 2, dtype=torch.float32)
    return 1 - ((pairs - low) / width).clamp(0, 1)


def yarn_amplitude(yarn: YarnScaling) -> float:
    """The factor by which YaRN multiplies cosine and sine, to keep attention's temperature over the longer context."""
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    return 0.1 * math.log(yarn.factor) + 1.0


class Attention(nn.Module):
    """Grouped-query attention over the paged cache."""

    def __init__(self, config: ModelConfig, make: MakeTensor) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.scale = config.scale
        q_size = config.num_attention_heads * config.head_dim
        qkv_size = q_size + 2 * config.num_key_value_heads * config.head_dim
        bias_C = make(qkv_size) if config.family.has_qkv_bias else None
        self.qkv_proj = Linear(make(qkv_size, config.hidden_size), bias_C)
        self.o_proj = Linear(make(config.hidden_size, q_size))
        self.q_norm = self.k_norm = None
        if config.family.has_qk_norm:
            self.q_norm = RmsNorm(make(config.head_dim), config.rms_norm_eps)
            self.k_norm = RmsNorm(make(config.head_dim), config.rms_norm_eps)

    def multiply(self, x_TD: torch.Tensor) -> torch.Tensor:
        """qkv_TC: queries, keys and values of every token, with query and key heads normalised if the family does
        that."""
        qkv_TC: torch.Tensor = self.qkv_proj(x_TD)
        if self.q_norm is None or self.k_norm is None:
            return qkv_TC
        N, K = self.num_heads, self.num_kv_heads
        heads = qkv_TC.unflatten(1, (N + 2 * K, -1))
        parts = ((self.q_norm, heads[:, :N]), (self.k_norm, heads[:, N : N + K]))
        normed = [norm(part.flatten(0, 1)).view(part.shape) for norm, part in parts]
        return torch.cat([*normed, heads[:, N + K :]], dim=1).flatten(1)

    def forward(
        self,
        q_TNH: torch.Tensor,
        k_pool_PKBH: torch.Tensor,
        v_pool_PKBH: torch.Tensor,
        inputs: AttentionInputs,
        backend: AttentionBackend,
    ) -> torch.Tensor:
        """Attention over the cache, including this step's keys and values: [T, N * H], the input of `o_proj`."""
        return backend.attend(q_TNH, k_pool_PKBH, v_pool_PKBH, inputs, self.scale).flatten(1)


class Mlp(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, make: MakeTensor) -> None:
        super().__init__()
        self.gate_up_proj = Linear(make(2 * config.intermediate_size, config.hidden_size))
        self.down_proj = Linear(make(config.hidden_size, config.intermediate_size))

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """[T, D] in and out."""
        return self.down_proj(self.activate(x_TD))

    def activate(self, x_TD: torch.Tensor) -> torch.Tensor:
        """silu(gate(x)) * up(x)."""
        gate_up_TE = self.gate_up_proj(x_TD)
        if gate_up_TE.dim() == 2 and takes(gate_up_TE, width=gate_up_TE.shape[1] // 2):
            return silu_mul(gate_up_TE)
        gate_TI, up_TI = gate_up_TE.chunk(2, dim=-1)
        return F.silu(gate_TI) * up_TI


class DecoderLayer(nn.Module):
    """Attention and MLP, each applied to the normalised stream and added to it. index: of the layer, from 0."""

    def __init__(self, config: ModelConfig, make: MakeTensor, index: int, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.index, self._family, self._ranks = index, config.family, ranks
        self.input_layernorm = RmsNorm(make(config.hidden_size), config.rms_norm_eps)
        self.self_attn = Attention(config, make)
        self.post_attention_layernorm = RmsNorm(make(config.hidden_size), config.rms_norm_eps)
        self.mlp = Mlp(config, make)
        self.rest: LayerRest | None = None

    def fuse(self) -> None:
        """Call after packing, and after setting an addend: computes everything after attention in one call, if the
        weights have the layout for it and nothing happens between the stages. Setting `rest` to None undoes this, to
        observe the stages."""
        self.rest = None
        linears = (self.self_attn.o_proj, self.mlp.gate_up_proj, self.mlp.down_proj)
        o, gate_up, down = (each.panels for each in linears)
        norm = self.post_attention_layernorm
        if self._ranks.size > 1 or any(each.addend is not None for each in linears):
            return
        if o is None or gate_up is None or down is None or (o.num_outputs | down.num_inputs) % LANES:
            return
        self.rest = LayerRest.of(o=o, norm_D=norm.weight, epsilon=norm.epsilon, gate_up=gate_up, down=down)

    def forward(self, hidden_TD: torch.Tensor, ops: "PagedOps", wanted_S: torch.Tensor | None = None) -> torch.Tensor:
        """Returns a new tensor; hidden_TD is not changed. wanted_S: rows that are read afterwards; then [S, D] is
        returned. None: all."""
        attended_TC = self._family.attend(ops, self, hidden_TD)
        if wanted_S is not None:
            attended_TC, hidden_TD = attended_TC[wanted_S], hidden_TD[wanted_S]
            if not len(wanted_S):
                return hidden_TD
        if self.rest is not None:
            return self.rest.run(attended_TC, hidden_TD)
        finished: torch.Tensor = self._family.finish(ops, self, hidden_TD, attended_TC)
        return finished


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TorchOps:
    """The operations of a layer (`LayerOps`; a layer is a DecoderLayer) except attention, with one module per product.
    x is never changed in place."""

    angles: RopeAngles
    ranks: Ranks = ALONE

    def multiply_qkv(self, layer: DecoderLayer, x_TD: torch.Tensor) -> torch.Tensor:
        """See LayerOps. Includes the bias and the norms of heads."""
        return layer.self_attn.multiply(layer.input_layernorm(x_TD))

    def add_output(self, layer: DecoderLayer, x_SD: torch.Tensor, attended_SC: torch.Tensor) -> torch.Tensor:
        """See LayerOps."""
        return x_SD + layer.self_attn.o_proj(attended_SC)

    def activate(self, layer: DecoderLayer, x_SD: torch.Tensor) -> torch.Tensor:
        """See LayerOps."""
        return layer.mlp.activate(layer.post_attention_layernorm(x_SD))

    def add_down(self, layer: DecoderLayer, x_SD: torch.Tensor, act_SI: torch.Tensor) -> torch.Tensor:
        """See LayerOps."""
        return x_SD + layer.mlp.down_proj(act_SI)

    def begin_sum(self, x_SD: torch.Tensor) -> torch.Tensor:
        """See LayerOps."""
        return x_SD if self.ranks.size == 1 else torch.zeros_like(x_SD)

    def reduce(self, x_SD: torch.Tensor, partial_SD: torch.Tensor) -> torch.Tensor:
        """See LayerOps."""
        return partial_SD if self.ranks.size == 1 else x_SD + self.ranks.sum(partial_SD)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagedOps(TorchOps):
    """All operations of a layer, over the paged cache."""

    kv: KvPool
    inputs: AttentionInputs
    backend: AttentionBackend

    def write_qkv(self, layer: DecoderLayer, x_TD: torch.Tensor, qkv_TC: torch.Tensor) -> torch.Tensor:
        """See LayerOps: q_TNH."""
        k_pool_PKBH, v_pool_PKBH = self.kv.k_pools[layer.index], self.kv.v_pools[layer.index]
        angles, slots_T = self.angles, self.inputs.slot_mapping_T
        if takes(qkv_TC, width=k_pool_PKBH.shape[3]) and k_pool_PKBH.dtype == qkv_TC.dtype:
            return rope_write(qkv_TC, angles.cos_TH, angles.sin_TH, slots_T, k_pool_PKBH, v_pool_PKBH)
        q_TNH, k_TKH, v_TKH = turn_heads(layer, qkv_TC, angles)
        rows = write_rows_of(self.inputs, self.kv.block_size)
        rows.write(k_TKH, k_pool_PKBH)
        rows.write(v_TKH, v_pool_PKBH)
        return q_TNH

    def attend(self, layer: DecoderLayer, x_TD: torch.Tensor, q_TNH: torch.Tensor) -> torch.Tensor:
        """See LayerOps: [T, N * H]."""
        pools = self.kv.k_pools[layer.index], self.kv.v_pools[layer.index]
        attended_TC: torch.Tensor = layer.self_attn(q_TNH, *pools, self.inputs, self.backend)
        return attended_TC


def turn_heads(
    layer: DecoderLayer, qkv_TC: torch.Tensor, angles: RopeAngles
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q_TNH and k_TKH rotated by their positions, and v_TKH. One rotation for q and k together."""
    N, K = layer.self_attn.num_heads, layer.self_attn.num_kv_heads
    heads = qkv_TC.unflatten(1, (N + 2 * K, -1))
    turned = rotate(heads[:, : N + K], angles)
    return turned[:, :N], turned[:, N:], heads[:, N + K :]
