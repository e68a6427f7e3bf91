"""The decoder layers of a decode step of a few rows: six overlapping kernels per layer (model/kernels/overlap.py). A
family that normalises heads, or has no bias, takes seven: a program of the QKV product has only parts of heads, so
another kernel finishes them.

Larger batches use model/gpu/layers.py with model/kernels/attention/decode.py; model/gpu/autotune.py decides which of
them a batch size uses.

Legend: B sequences · D model dim · N query heads · H head dim · I intermediate dim.
"""

from dataclasses import dataclass

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
MAX_ELEMENTS_OF_LANE, MAX_ELEMENTS_OF_LONG_ROW = 160, 108
"""Elements of a row of weights: more would not fit into a thread's registers beside the vector. Fewer were faster if
several warps share a row."""
MAX_ROWS = 8
"""Rows of a program whose warps read one row each, however short the rows are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallBatchCuts:
    """How each product of a layer, attention and the head are cut."""

    qkv: Cut
    output: Cut
    gate_up: Cut
    down: Cut
    head: Cut
    attention: AttentionCut


def cuts_of(config: ModelConfig, *, number_bytes: int = 2) -> SmallBatchCuts:
    """Cuts by the bytes of weights, or of keys and values, that a program reads and each of its threads holds: the
    fastest of those tried for 0.5B, 7B and 32B on an H200 (bench/RESULTS.md). number_bytes: bytes of a weight, key or
    value."""

    def num_rows(row_elements: int, program_bytes: int, *, least: int = 1) -> int:
        wanted = program_bytes // (2 * row_elements)
        return max(least, 1 << max(0, wanted.bit_length() - 1))

    def together(length: int, matrices: int, program_bytes: int, *, of_lane: int, least: int = 1) -> Cut:
        """All warps read all rows."""
        rows = num_rows(length * matrices, program_bytes, least=least)
        return Cut(rows=rows, warps=min(MAX_WARPS, _warps_for(rows * length * matrices, of_lane)))

    def one_by_one(length: int, program_bytes: int, *, least: int = 1) -> Cut:
        """A warp reads a row, or several do if it is long; nothing is summed across warps of different rows."""
        rows = min(MAX_ROWS, num_rows(length, program_bytes, least=least))
        fits = length <= MAX_ELEMENTS_OF_LANE * LANES
        of_row = 1 if fits else _warps_for(length, MAX_ELEMENTS_OF_LONG_ROW)
        return Cut(rows=rows, warps=min(MAX_WARPS, rows * of_row))

    D, I, A = config.hidden_size, config.intermediate_size, config.num_attention_heads * config.head_dim
    return SmallBatchCuts(
        qkv=together(D, 2, 8192, of_lane=80),
        output=one_by_one(A, 16384, least=4),
        gate_up=together(D, 2, 16384, of_lane=80 if num_rows(2 * D, 16384) == 1 else 112),
        down=one_by_one(I, 40960),
        head=together(D, 1, 0, of_lane=MAX_ELEMENTS_OF_LANE, least=4),
        attention=_attention_cut_of(config, number_bytes),
    )


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
