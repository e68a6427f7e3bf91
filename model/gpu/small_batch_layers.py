"""The decoder layers of a decode step of a few rows: six kernels a layer that overlap
(model/kernels/small_batch/launch.py).

The wide twin of this path is model/gpu/layers.py with model/kernels/attention/decode.py; which of them a batch size
takes is decided in model/gpu/autotune.py.

Legend: B sequences · D model dim · N query heads · H head dim · I intermediate dim.
"""

from dataclasses import dataclass

import torch

from octavo.model.attention.kv_pool import KvPool
from octavo.model.config import ModelConfig
from octavo.model.gpu.state import RowState
from octavo.model.gpu.weights import GpuWeights, LayerWeights
from octavo.model.kernels.checks import next_power_of_2
from octavo.model.kernels.small_batch.attention import combine, narrow_attention, split_buffers
from octavo.model.kernels.small_batch.launch import Cut, Overlap
from octavo.model.kernels.small_batch.mlp import narrow_add_product, narrow_gate_up, narrow_head
from octavo.model.kernels.small_batch.qkv import narrow_qkv

MAX_NARROW_BATCH = 8
MAX_ELEMENTS_OF_LANE = 160
"""Of a row of weights: more would not fit a thread's registers beside the vector."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NarrowCuts:
    """How each product of a layer is cut, and the head; attention_warps of each attention program."""

    qkv: Cut
    output: Cut
    gate_up: Cut
    down: Cut
    head: Cut
    attention_warps: int = 4


def fits_family(config: ModelConfig) -> bool:
    """Whether these kernels compute a layer of the family: they add a bias, and a program of QKV has parts of heads,
    so that it cannot normalise one."""
    return config.family.has_qkv_bias and not config.family.has_qk_norm


def cuts_of(config: ModelConfig, *, factor: float = 1.0) -> NarrowCuts:
    """Cuts by the weights that a program reads: what was fastest for 0.5B on an H100, times the factor."""

    def cut(length: int, matrices: int, program_bytes: int, warps: int) -> Cut:
        wanted = int(program_bytes * factor) // (2 * length * matrices)
        lanes = -(-length // MAX_ELEMENTS_OF_LANE)
        return Cut(rows=1 << max(0, wanted.bit_length() - 1), warps=max(warps, next_power_of_2(-(-lanes // 32))))

    D, I, A = config.hidden_size, config.intermediate_size, config.num_attention_heads * config.head_dim
    return NarrowCuts(
        qkv=cut(D, 2, 8192, 4),
        output=cut(A, 1, 16384, 8),
        gate_up=cut(D, 2, 16384, 2),
        down=cut(I, 1, 40960, 4),
        head=cut(D, 1, 16384, 8),
    )


class NarrowLayers:
    """Buffers and launches for up to MAX_NARROW_BATCH rows."""

    def __init__(self, weights: GpuWeights, state: RowState, kv: KvPool, *, max_batch: int) -> None:
        config, device = weights.config, weights.embed_VD.device
        rows = min(max_batch, MAX_NARROW_BATCH)
        self._weights, self._state, self._kv = weights, state, kv
        self._overlap = Overlap.on(weights.embed_VD)
        shape = (rows, config.num_attention_heads, config.head_dim)
        self._q_BNH = torch.empty(shape, dtype=weights.dtype, device=device)
        self._out_BNH = torch.empty(shape, dtype=weights.dtype, device=device)
        self._act_BI = torch.empty(rows, config.intermediate_size, dtype=weights.dtype, device=device)
        self._part_BWNH, self._log_BWN = split_buffers(rows, config.num_attention_heads, config.head_dim, device)

    def run(self, x_BD: torch.Tensor, rows_B: torch.Tensor, cuts: NarrowCuts) -> None:
        """Take x_BD through every layer, in place, writing the caches of rows_B (int32)."""
        for index, layer in enumerate(self._weights.layers):
            self._attend(index, layer, x_BD, rows_B, cuts)
            self._mlp(layer, x_BD, cuts)

    def head(self, x_BD: torch.Tensor, index_B: torch.Tensor, logits_BV: torch.Tensor, cuts: NarrowCuts) -> None:
        """Final norm and head of x_BD[index_B]."""
        weights = self._weights
        narrow_head(
            x_BD, index_B, weights.norm_D, weights.head_VD, logits_BV, weights.config.rms_norm_eps,
            cut=cuts.head, overlap=self._overlap,
        )  # fmt: skip

    def _attend(
        self, index: int, layer: LayerWeights, x_BD: torch.Tensor, rows_B: torch.Tensor, cuts: NarrowCuts
    ) -> None:
        weights, state, overlap, B = self._weights, self._state, self._overlap, len(rows_B)
        assert layer.qkv_bias_C is not None  # fits_family
        pools, q_BNH = (self._kv.k_pools[index], self._kv.v_pools[index]), self._q_BNH[:B]
        narrow_qkv(
            x_BD, layer.qkv_CD, layer.qkv_bias_C, q_BNH, *pools, rows_B, state.position_R, state.table_RM,
            weights.cos_LH, weights.sin_LH, weights.config.rms_norm_eps, cut=cuts.qkv, overlap=overlap,
        )  # fmt: skip
        parts = (self._part_BWNH, self._log_BWN)
        narrow_attention(
            q_BNH, *pools, *parts, rows_B, state.position_R, state.table_RM, weights.config.scale,
            warps=cuts.attention_warps, overlap=overlap,
        )  # fmt: skip
        out_BNH = self._out_BNH[:B]
        combine(*parts, out_BNH, rows_B, state.position_R, overlap=overlap)
        narrow_add_product(x_BD, out_BNH.flatten(1), layer.o_DA, cut=cuts.output, overlap=overlap)

    def _mlp(self, layer: LayerWeights, x_BD: torch.Tensor, cuts: NarrowCuts) -> None:
        act_BI = self._act_BI[: len(x_BD)]
        eps = self._weights.config.rms_norm_eps
        narrow_gate_up(x_BD, layer.gate_up_ED, act_BI, eps, cut=cuts.gate_up, overlap=self._overlap)
        narrow_add_product(x_BD, act_BI, layer.down_DI, cut=cuts.down, overlap=self._overlap)
