"""One decoder layer by torch and the C kernels: attention with fused QKV, SwiGLU with fused gate and up. What a family
has besides (a bias of QKV, norms of queries and keys) is optional here; the order is the family's (model/families).

Legend: T tokens in this step · S wanted rows · N query heads · K kv heads · H head dim · D model dim ·
I intermediate dim · P blocks · B block size · C columns of QKV · E = 2 I.
Must not know: checkpoints, how many layers there are, who owns a block.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from octavo.model.attention.interface import AttentionBackend, AttentionInputs
from octavo.model.attention.kv_pool import WriteRows
from octavo.model.config import ModelConfig
from octavo.model.cpu.layer import LayerRest
from octavo.model.cpu.ops import LANES, rms_norm, rope_write, silu_mul, takes
from octavo.model.layers.linear import Linear
from octavo.model.layers.rope import RopeAngles, rotate

MakeTensor = Callable[..., torch.Tensor]
"""Shape in, uninitialised tensor of the model's dtype and device out."""


# Root mean square normalisation (Zhang and Sennrich 2019, arXiv 1910.07467).
#
# Must not know: what it normalises.


class RmsNorm(nn.Module):
    """Divides each row by its root mean square, in fp32 whatever the dtype, then multiplies with the weight.

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
    """By torch's operators, on any device."""
    wide_TD = x_TD.float()
    mean_square_T1 = wide_TD.pow(2).mean(-1, keepdim=True)
    return weight_D * (wide_TD * torch.rsqrt(mean_square_T1 + epsilon)).to(x_TD.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class StepContext:
    """What every layer of one step shares."""

    angles: RopeAngles
    write_rows: WriteRows
    inputs: AttentionInputs
    backend: AttentionBackend


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
        """qkv_TC: queries, keys and values of every token, its heads of queries and keys normalised where the family
        does that."""
        qkv_TC: torch.Tensor = self.qkv_proj(x_TD)
        if self.q_norm is None or self.k_norm is None:
            return qkv_TC
        N, K = self.num_heads, self.num_kv_heads
        heads = qkv_TC.unflatten(1, (N + 2 * K, -1))
        parts = ((self.q_norm, heads[:, :N]), (self.k_norm, heads[:, N : N + K]))
        normed = [norm(part.flatten(0, 1)).view(part.shape) for norm, part in parts]
        return torch.cat([*normed, heads[:, N + K :]], dim=1).flatten(1)

    def project(self, x_TD: torch.Tensor, angles: RopeAngles) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q_TNH and k_TKH with their positions turned in, v_TKH. One multiplication, one rotation for q and k."""
        heads = self.multiply(x_TD).unflatten(1, (self.num_heads + 2 * self.num_kv_heads, -1))
        turned = rotate(heads[:, : self.num_heads + self.num_kv_heads], angles)
        return turned[:, : self.num_heads], turned[:, self.num_heads :], heads[:, -self.num_kv_heads :]

    def forward(
        self, x_TD: torch.Tensor, k_pool_PKBH: torch.Tensor, v_pool_PKBH: torch.Tensor, step: StepContext
    ) -> torch.Tensor:
        """Write this step's keys and values into the pool, then attend: [T, N * H], which `o_proj` is for."""
        q_TNH = self._project_and_write(x_TD, k_pool_PKBH, v_pool_PKBH, step)
        return step.backend.attend(q_TNH, k_pool_PKBH, v_pool_PKBH, step.inputs, self.scale).flatten(1)

    def _project_and_write(
        self, x_TD: torch.Tensor, k_pool_PKBH: torch.Tensor, v_pool_PKBH: torch.Tensor, step: StepContext
    ) -> torch.Tensor:
        """q_TNH; keys and values are in the pool."""
        if takes(x_TD, width=k_pool_PKBH.shape[3]) and k_pool_PKBH.dtype == x_TD.dtype:
            angles, slots_T = step.angles, step.inputs.slot_mapping_T
            qkv_TC = self.multiply(x_TD)
            return rope_write(qkv_TC, angles.cos_TH, angles.sin_TH, slots_T, k_pool_PKBH, v_pool_PKBH)
        q_TNH, k_TKH, v_TKH = self.project(x_TD, step.angles)
        step.write_rows.write(k_TKH, k_pool_PKBH)
        step.write_rows.write(v_TKH, v_pool_PKBH)
        return q_TNH


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
    """Attention and MLP, each on the normalised stream and added to it."""

    def __init__(self, config: ModelConfig, make: MakeTensor) -> None:
        super().__init__()
        self._finish = config.family.finish
        self.input_layernorm = RmsNorm(make(config.hidden_size), config.rms_norm_eps)
        self.self_attn = Attention(config, make)
        self.post_attention_layernorm = RmsNorm(make(config.hidden_size), config.rms_norm_eps)
        self.mlp = Mlp(config, make)
        self.rest: LayerRest | None = None

    def fuse(self) -> None:
        """After packing: what follows attention in one call, where the weights are laid out for it. `rest` may be taken
        away again, by who wants to see the stages between."""
        o, gate_up, down = (each.panels for each in (self.self_attn.o_proj, self.mlp.gate_up_proj, self.mlp.down_proj))
        norm = self.post_attention_layernorm
        if o is None or gate_up is None or down is None or (o.num_outputs | down.num_inputs) % LANES:
            return
        self.rest = LayerRest.of(o=o, norm_D=norm.weight, epsilon=norm.epsilon, gate_up=gate_up, down=down)

    def forward(
        self,
        hidden_TD: torch.Tensor,
        k_pool_PKBH: torch.Tensor,
        v_pool_PKBH: torch.Tensor,
        step: StepContext,
        wanted_S: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns a new tensor; hidden_TD stays as it was. wanted_S: the rows that anybody reads afterwards, where they
        are not all: [S, D] comes back."""
        attended_TC = self.self_attn(self.input_layernorm(hidden_TD), k_pool_PKBH, v_pool_PKBH, step)
        if wanted_S is not None:
            attended_TC, hidden_TD = attended_TC[wanted_S], hidden_TD[wanted_S]
            if not len(wanted_S):
                return hidden_TD
        if self.rest is not None:
            return self.rest.run(attended_TC, hidden_TD)
        finished: torch.Tensor = self._finish(TorchFinish(), self, hidden_TD, attended_TC)
        return finished


class TorchFinish:
    """What follows attention (`FinishOps`; a layer is a DecoderLayer), a module for each operation."""

    def add_output(self, layer: DecoderLayer, x_SD: torch.Tensor, attended_SC: torch.Tensor) -> torch.Tensor:
        """See FinishOps."""
        return x_SD + layer.self_attn.o_proj(attended_SC)

    def activate(self, layer: DecoderLayer, x_SD: torch.Tensor) -> torch.Tensor:
        """See FinishOps."""
        return layer.mlp.activate(layer.post_attention_layernorm(x_SD))

    def add_down(self, layer: DecoderLayer, x_SD: torch.Tensor, act_SI: torch.Tensor) -> torch.Tensor:
        """See FinishOps."""
        return x_SD + layer.mlp.down_proj(act_SI)
