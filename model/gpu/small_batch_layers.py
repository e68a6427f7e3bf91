"""The decoder layers of a decode step of a few rows: six overlapping kernels per layer (model/kernels/overlap.py). A
family that normalises heads, or has no bias, takes seven: a program of the QKV product has only parts of heads, so
another kernel finishes them.

Larger batches use model/gpu/layers.py with model/kernels/attention/decode.py; model/gpu/autotune.py decides which of
them a batch size uses.

Legend: B sequences · D model dim · N query heads · H head dim · I intermediate dim · A = N·H · C columns of QKV ·
E = 2 I · Q inputs of a product · W parts of a context, or columns of the head.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from octavo.model.attention.kv_pool import KvPool
from octavo.model.config import ModelConfig
from octavo.model.gpu.layers import SumsInPlace
from octavo.model.gpu.state import RowState
from octavo.model.gpu.weights import GpuWeights
from octavo.model.kernels.attention.rope_write import rope_write
from octavo.model.kernels.checks import next_power_of_2
from octavo.model.kernels.overlap import Overlap
from octavo.model.kernels.products.hopper import MULTIPROCESSORS
from octavo.model.kernels.small_batch.attention import (
    MAX_SPLITS,
    AttentionCut,
    combine,
    small_batch_attention,
    split_buffers,
)
from octavo.model.kernels.small_batch.launch import MAX_WARPS, Cut
from octavo.model.kernels.small_batch.mlp import (
    small_batch_add_product,
    small_batch_gate_up,
    small_batch_head,
    small_batch_product,
)
from octavo.model.kernels.small_batch.qkv import small_batch_qkv

MAX_SMALL_BATCH = 8
LEAST_TILE, MOST_TILE, LONGEST_GRAIN = 32, 256, 128
"""Tokens."""
ATTENDED_BYTES = 65_536
"""Keys and values that the programs of a multiprocessor request first."""
LANES = 32
MAX_ELEMENTS_OF_LANE, MAX_ELEMENTS_OF_PAIR, MAX_ELEMENTS_OF_LONG_PAIR = 160, 320, 448
"""Elements of 16 bits in a thread's registers, beside those of the vector: of a row that a warp reads alone, of two
rows, and of two long rows that several warps share."""
MAX_ROWS = 8
"""Rows of a program of attention's output or down, however short the rows are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallBatchCuts:
    """How each product of a layer, attention and the head are cut."""

    qkv: Cut
    output: Cut
    gate_up: Cut
    down: Cut
    head: Cut
    attention: AttentionCut


MEASURED: dict[tuple[int, int, int], dict[str, Cut]] = {
    (896, 896, 4864): {  # 0.5B
        "qkv": Cut(rows=8, warps=8),
        "output": Cut(rows=16, warps=16, block=256),
        "down": Cut(rows=1, warps=1, block=512),
    },
    (1536, 1536, 8960): {"qkv": Cut(rows=2, warps=4), "output": Cut(rows=2, warps=2)},  # 1.5B
    (2048, 2048, 11008): {  # 3B
        "qkv": Cut(rows=2, warps=1),
        "output": Cut(rows=2, warps=1),
        "gate_up": Cut(rows=4, warps=4),
    },
    (3584, 1792, 9472): {  # 7B by two ranks
        "qkv": Cut(rows=2, warps=2),
        "output": Cut(rows=2, warps=1, block=256),
        "gate_up": Cut(rows=2, warps=2, block=512),
        "down": Cut(rows=1, warps=8),
    },
    (5120, 5120, 13824): {"qkv": Cut(rows=1, warps=8)},  # 14B
    (5120, 2560, 13824): {"output": Cut(rows=2, warps=1)},  # 32B by two ranks
}
"""Cuts of 16-bit weights that were faster than the rule's for one row on an H200, by a rank's hidden size, elements of
all query heads, and intermediate size. No rule was found for them: how much of the next kernels' weights is requested
early depends on which of their programs have room beside all others of a layer (bench/RESULTS.md)."""


def cuts_of(config: ModelConfig, *, number_bytes: int = 2) -> SmallBatchCuts:
    """Cuts of a rank's shape: as measured, else by the bytes of weights, or of keys and values, that a program reads
    and each of its threads holds. number_bytes: bytes of a weight, key or value."""

    def num_rows(row_elements: int, program_bytes: int) -> int:
        return 1 << max(0, (program_bytes // (2 * row_elements)).bit_length() - 1)

    def cut(rows: int, length: int, *, of_lane: int, least: int = 1) -> Cut:
        return Cut(rows=rows, warps=min(MAX_WARPS, max(least, _warps_for(rows * length, of_lane))))

    D, I, A = config.hidden_size, config.intermediate_size, config.num_attention_heads * config.head_dim
    rows_of_gate_up, rows_of_down = num_rows(2 * D, 16384), min(MAX_ROWS, num_rows(I, 40960))
    is_down_short = I <= MAX_ELEMENTS_OF_LANE * LANES
    cuts = SmallBatchCuts(
        qkv=cut(num_rows(2 * D, 8192), 2 * D, of_lane=80),
        output=cut(MAX_ROWS, A, of_lane=2 * MAX_ELEMENTS_OF_PAIR // number_bytes, least=4),
        gate_up=cut(rows_of_gate_up, 2 * D, of_lane=80 if rows_of_gate_up == 1 else 112),
        down=Cut(rows=rows_of_down, warps=rows_of_down)
        if is_down_short
        else cut(2, I, of_lane=2 * MAX_ELEMENTS_OF_LONG_PAIR // number_bytes, least=4),
        head=cut(4, D, of_lane=MAX_ELEMENTS_OF_LANE),
        attention=_attention_cut_of(config, number_bytes),
    )
    measured: dict[str, Any] = MEASURED.get((D, A, I), {}) if number_bytes == 2 else {}
    return replace(cuts, **measured)


def _attention_cut_of(config: ModelConfig, number_bytes: int) -> AttentionCut:
    """The first tiles of a long context, one for each part, are all in flight at once, with no more bytes than a
    multiprocessor's registers can hold beside the kernels that follow."""
    H, programs = config.head_dim, -(-config.num_key_value_heads * MAX_SPLITS // MULTIPROCESSORS)
    wanted = min(MOST_TILE, max(LEAST_TILE, ATTENDED_BYTES // (programs * 2 * number_bytes * H)))
    tile = 1 << (wanted.bit_length() - 1)
    return AttentionCut(
        grain=min(LONGEST_GRAIN, tile), tile=tile, warps=8 if programs <= 2 else 4, stages=3 if programs > 1 else 1
    )


def _warps_for(elements: int, of_lane: int) -> int:
    return next_power_of_2(-(-elements // (LANES * of_lane)))


class SmallBatchLayers:
    """Buffers for up to MAX_SMALL_BATCH rows, and the head."""

    def __init__(self, weights: GpuWeights, state: RowState, kv: KvPool, *, max_batch: int) -> None:
        config, device = weights.config, weights.embed_VD.device
        rows = min(max_batch, MAX_SMALL_BATCH)
        self.weights, self.state, self.kv = weights, state, kv
        self.overlap = Overlap.on(weights.embed_VD)
        shape = (rows, config.num_attention_heads, config.head_dim)
        self.q_BNH = torch.empty(shape, dtype=weights.dtype, device=device)
        self.out_BNH = torch.empty(shape, dtype=weights.dtype, device=device)
        self.act_BI = torch.empty(rows, config.intermediate_size, dtype=weights.dtype, device=device)
        num_columns = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
        self.qkv_BC = torch.empty(rows, num_columns, dtype=weights.dtype, device=device)
        self.position_B = torch.zeros(rows, dtype=torch.int32, device=device)
        self.is_qkv_one_kernel = config.family.has_qkv_bias and not config.family.has_qk_norm
        self.part_BWNH, self.log_BWN = split_buffers(rows, config.num_attention_heads, config.head_dim, device)

    def ops(self, rows_B: torch.Tensor, cuts: SmallBatchCuts) -> "SmallBatchOps":
        """The operations of a step that writes to the caches of rows_B (int32)."""
        if not self.is_qkv_one_kernel:
            torch.index_select(self.state.position_R, 0, rows_B, out=self.position_B[: len(rows_B)])
        return SmallBatchOps(self, rows_B, cuts)

    def head(self, x_BD: torch.Tensor, index_B: torch.Tensor, part_BW: torch.Tensor, cuts: SmallBatchCuts) -> None:
        """Final norm and head of x_BD[index_B]: writes this rank's columns to part_BW."""
        weights = self.weights
        small_batch_head(
            x_BD, index_B, weights.norm_D, weights.head_VD, part_BW, weights.config.rms_norm_eps,
            cut=cuts.head, overlap=self.overlap,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class SmallBatchOps(SumsInPlace):
    """The operations of a layer (`LayerOps`; a layer is given by its index), in the buffers of `layers`. Changes x in
    place."""

    layers: SmallBatchLayers
    rows_B: torch.Tensor
    cuts: SmallBatchCuts

    @property
    def weights(self) -> GpuWeights:  # type: ignore[override]
        """The layers' weights."""
        return self.layers.weights

    def multiply_qkv(self, layer: int, x_BD: torch.Tensor) -> torch.Tensor:
        """See LayerOps: qkv_BC; passes x_BD on if `write_qkv` also does the product."""
        own = self.layers
        if own.is_qkv_one_kernel:
            return x_BD
        qkv_BC = own.qkv_BC[: len(x_BD)]
        small_batch_product(x_BD, self.weights.layers[layer].qkv_CD, qkv_BC, cut=self.cuts.qkv, overlap=own.overlap)
        return qkv_BC

    def write_qkv(self, layer: int, x_BD: torch.Tensor, qkv_BC: torch.Tensor) -> torch.Tensor:
        """See LayerOps: q_BNH."""
        own, weights, matrices, state = self.layers, self.weights, self.weights.layers[layer], self.layers.state
        q_BNH, pools = own.q_BNH[: len(x_BD)], (own.kv.k_pools[layer], own.kv.v_pools[layer])
        angles, eps = (weights.cos_LH, weights.sin_LH), weights.config.rms_norm_eps
        if own.is_qkv_one_kernel:
            assert matrices.qkv_bias_C is not None
            small_batch_qkv(
                x_BD, matrices.qkv_CD, matrices.qkv_bias_C, q_BNH, *pools, self.rows_B, state.position_R,
                state.table_RM, *angles, eps, cut=self.cuts.qkv, overlap=own.overlap,
            )  # fmt: skip
        else:
            rope_write(
                qkv_BC, x_BD, matrices.qkv_bias_C, q_BNH, *pools, self.rows_B, own.position_B[: len(x_BD)],
                state.table_RM, *angles, eps, matrices.qk_norm_2H,
            )  # fmt: skip
        return q_BNH

    def attend(self, layer: int, x_BD: torch.Tensor, q_BNH: torch.Tensor) -> torch.Tensor:
        """See LayerOps."""
        own, state, rows_B = self.layers, self.layers.state, self.rows_B
        parts = (own.part_BWNH, own.log_BWN)
        small_batch_attention(
            q_BNH, own.kv.k_pools[layer], own.kv.v_pools[layer], *parts, rows_B, state.position_R, state.table_RM,
            self.weights.config.scale, cut=self.cuts.attention, overlap=own.overlap,
        )  # fmt: skip
        out_BNH = own.out_BNH[: len(x_BD)]
        combine(*parts, out_BNH, rows_B, state.position_R, grain=self.cuts.attention.grain, overlap=own.overlap)
        return out_BNH

    def add_output(self, layer: int, x_BD: torch.Tensor, attended_BNH: torch.Tensor) -> torch.Tensor:
        """See FinishOps."""
        return self._put(x_BD, attended_BNH.flatten(1), self.weights.layers[layer].o_DA, self.cuts.output)

    def activate(self, layer: int, x_BD: torch.Tensor) -> torch.Tensor:
        """See FinishOps."""
        own, act_BI = self.layers, self.layers.act_BI[: len(x_BD)]
        matrix, eps = own.weights.layers[layer].gate_up_ED, own.weights.config.rms_norm_eps
        small_batch_gate_up(x_BD, matrix, act_BI, eps, cut=self.cuts.gate_up, overlap=own.overlap)
        return act_BI

    def add_down(self, layer: int, x_BD: torch.Tensor, act_BI: torch.Tensor) -> torch.Tensor:
        """See FinishOps."""
        return self._put(x_BD, act_BI, self.weights.layers[layer].down_DI, self.cuts.down)

    def _put(self, x_BD: torch.Tensor, y_BQ: torch.Tensor, matrix_DQ: torch.Tensor, cut: Cut) -> torch.Tensor:
        if self.has_sums:
            small_batch_product(y_BQ, matrix_DQ, x_BD, cut=cut, overlap=self.layers.overlap)
        else:
            small_batch_add_product(x_BD, y_BQ, matrix_DQ, cut=cut, overlap=self.layers.overlap)
        return x_BD
