"""The decoder layers of a decode step of some dozens or hundreds of rows by kernels that all overlap: products of our
own whose weights arrive while the kernel before still runs, and attention that asks for its first keys and values.

For weights in the model's dtype, on devices whose instructions the products are made of; which batch sizes take it is
decided in model/gpu/autotune.py.
"""

from dataclasses import dataclass, replace
from math import gcd

import torch

from octavo.model.config import ModelConfig
from octavo.model.gpu.layers import LayerBuffers, PlainFinish
from octavo.model.gpu.weights import GpuWeights
from octavo.model.kernels.overlap import Overlap
from octavo.model.kernels.products.invariant import Splits
from octavo.model.kernels.products.overlapping import (
    BLOCK,
    OverlappingCut,
    fits,
    overlapping_add_product,
    overlapping_gate_up,
    overlapping_product,
)
from octavo.model.kernels.products.split_k import SplitKRoom
from octavo.model.kernels.trials import Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlappingCuts:
    """How each product of a layer is cut; None leaves it to cuBLAS."""

    qkv: OverlappingCut | None = None
    output: OverlappingCut | None = None
    gate_up: OverlappingCut | None = None
    down: OverlappingCut | None = None


OVERLAPPING_SIZES = (8, 16, 32, 64, 128, 256)
"""Batch sizes that have cuts of their own: each serves those below it."""
MOST_STAGES = 8
WHOLE_BYTES, NARROW_BYTES, PAIRED_BYTES = 196_608, 172_032, 114_688
"""Of a multiprocessor's shared memory for the stages of a program: of one that shall ask for as many of its weights as
it can; of one of a small matrix, which is there whole and leaves room to the successor; of one of a pair."""
NUMBER_BYTES = 2
GATE_UP_OF_MANY = OverlappingCut(outputs=128, tokens=256, blocks=1, stages=4, warps=8)
"""For more tokens than OVERLAPPING_SIZES has, in deterministic mode: the bits do not depend on the tile."""


def all_cuts_of(config: ModelConfig, size: int) -> OverlappingCuts:
    """Cuts of every product for a batch of one of OVERLAPPING_SIZES: the fastest of ours for 0.5B on an H100
    (bench/RESULTS.md). Sums are cut as in deterministic mode, by the matrix alone."""

    def cut(
        num_outputs: int, num_inputs: int, room: int, *, tokens: int, blocks: int, outputs: int = 64
    ) -> OverlappingCut:
        splits = Splits.of(num_outputs, num_inputs)
        blocks = gcd(blocks, splits.inputs // BLOCK)
        rounds = splits.inputs // (BLOCK * blocks)
        stages = min(rounds, MOST_STAGES, room // ((outputs + tokens) * blocks * BLOCK * NUMBER_BYTES))
        return OverlappingCut(outputs=outputs, tokens=tokens, blocks=blocks, stages=stages, splits=splits.count)

    D, I, A = config.hidden_size, config.intermediate_size, config.num_attention_heads * config.head_dim
    narrow = min(size, 32) if size <= 128 else 64
    if size == 8:
        gate_up = cut(2 * I, D, WHOLE_BYTES, tokens=size, blocks=2, outputs=128)
    else:
        gate_up = cut(2 * I, D, PAIRED_BYTES, tokens=min(size, 128), blocks=1)
    return OverlappingCuts(
        qkv=cut(A + 2 * config.num_key_value_heads * config.head_dim, D, NARROW_BYTES, tokens=narrow, blocks=2),
        output=cut(D, A, NARROW_BYTES, tokens=narrow, blocks=2),
        gate_up=gate_up,
        down=cut(D, I, WHOLE_BYTES, tokens=min(size, 64), blocks=4 if size <= 32 else 2),
    )


def overlapping_cuts_of(config: ModelConfig, size: int) -> OverlappingCuts:
    """`all_cuts_of`, where a library is not faster."""
    cuts = all_cuts_of(config, size)
    if size <= 64:
        return cuts
    return replace(cuts, down=None) if size <= 128 else replace(cuts, gate_up=None, down=None)


def fits_overlapping(config: ModelConfig, weight: torch.Tensor) -> bool:
    """Whether the shape's matrices, all like this weight, have these products (on trial). config: of this rank."""
    inputs = (config.hidden_size, config.intermediate_size, config.num_attention_heads * config.head_dim)
    return Trial.OVERLAPPING.is_on and fits(weight) and all(each % BLOCK == 0 for each in inputs)


def overlapping_room(config: ModelConfig, device: torch.device | str) -> SplitKRoom:
    """Room for all products of all sizes, which run one after the other."""
    num_elements = num_tiles = 1
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    for size in OVERLAPPING_SIZES:
        cuts = all_cuts_of(config, size)
        outputs = (heads * config.head_dim, config.hidden_size, config.hidden_size)
        for cut, num_outputs in zip((cuts.qkv, cuts.output, cuts.down), outputs, strict=True):
            if cut is not None and cut.splits > 1:
                num_elements = max(num_elements, cut.part_elements(size, num_outputs))
                num_tiles = max(num_tiles, cut.num_tiles(size, num_outputs))
    return SplitKRoom.allocate(num_elements=num_elements, num_tiles=num_tiles, device=device)


class OverlappingFinish(PlainFinish):
    """`PlainFinish` with products cut this way; room for the parts of sums."""

    def __init__(self, weights: GpuWeights, buffers: LayerBuffers, room: SplitKRoom, cuts: OverlappingCuts) -> None:
        super().__init__(weights, buffers)
        self._room, self._cuts = room, cuts

    def multiply_qkv(self, layer: int, x_TD: torch.Tensor, qkv_TC: torch.Tensor) -> None:
        """See PlainFinish.multiply_qkv."""
        if self._cuts.qkv is None:
            super().multiply_qkv(layer, x_TD, qkv_TC)
        else:
            matrix_CD, cut = self.weights.layers[layer].qkv_CD, self._cuts.qkv
            overlapping_product(x_TD, matrix_CD, qkv_TC, self._room, cut=cut, overlap=Overlap.DEPENDENT)

    def add_output(self, layer: int, x_TD: torch.Tensor, attended_TNH: torch.Tensor) -> torch.Tensor:
        """See FinishOps."""
        if self._cuts.output is None:
            return super().add_output(layer, x_TD, attended_TNH)
        return self._put(x_TD, attended_TNH.flatten(1), self.weights.layers[layer].o_DA, self._cuts.output)

    def activate(self, layer: int, x_TD: torch.Tensor) -> torch.Tensor:
        """See FinishOps."""
        if self._cuts.gate_up is None:
            return super().activate(layer, x_TD)
        act_TI, matrix_ED = self.buffers.act_TI[: len(x_TD)], self.weights.layers[layer].gate_up_ED
        eps = self.weights.config.rms_norm_eps
        overlapping_gate_up(x_TD, matrix_ED, act_TI, eps, cut=self._cuts.gate_up, overlap=Overlap.DEPENDENT)
        return act_TI

    def add_down(self, layer: int, x_TD: torch.Tensor, act_TI: torch.Tensor) -> torch.Tensor:
        """See FinishOps."""
        if self._cuts.down is None:
            return super().add_down(layer, x_TD, act_TI)
        return self._put(x_TD, act_TI, self.weights.layers[layer].down_DI, self._cuts.down)

    def _put(
        self, x_TD: torch.Tensor, y_TQ: torch.Tensor, matrix_DQ: torch.Tensor, cut: OverlappingCut
    ) -> torch.Tensor:
        if self.has_sums:
            overlapping_product(y_TQ, matrix_DQ, x_TD, self._room, cut=cut, overlap=Overlap.DEPENDENT)
        else:
            overlapping_add_product(x_TD, y_TQ, matrix_DQ, self._room, cut=cut, overlap=Overlap.DEPENDENT)
        return x_TD
