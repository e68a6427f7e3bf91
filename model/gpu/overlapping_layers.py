"""The decoder layers of a decode step of some dozens or hundreds of rows by kernels that all overlap: products of our
own whose weights arrive while the kernel before still runs, and attention that asks for its first keys and values.

For weights in the model's dtype, on devices whose instructions the products are made of; which batch sizes take it is
decided in model/gpu/autotune.py.
"""

from dataclasses import replace
from math import gcd

import torch

from octavo.model.config import ModelConfig
from octavo.model.gpu.cut_layers import CutFinish, LayerCuts, room_for
from octavo.model.gpu.layers import LayerBuffers
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

OverlappingCuts = LayerCuts[OverlappingCut]
OVERLAPPING_SIZES = (8, 16, 32, 64, 128, 256)
"""Batch sizes that have cuts of their own: each serves those below it."""
MOST_STAGES = 8
WHOLE_BYTES, NARROW_BYTES, PAIRED_BYTES, SHARED_BYTES = 196_608, 172_032, 114_688, 65_536
"""Of a multiprocessor's shared memory for the stages of a program: of one that shall ask for as many of its weights as
it can; of one of a small matrix, which is there whole and leaves room to the successor; of one of a pair; of three."""
NUMBER_BYTES = 2
TILES_OF_MANY = (
    OverlappingCut(outputs=128, tokens=256, blocks=1, stages=4, group=16, warps=8),
    OverlappingCut(outputs=128, tokens=128, blocks=1, stages=6, group=16, warps=8),
    OverlappingCut(outputs=64, tokens=128, blocks=1, stages=4, group=16),
    OverlappingCut(outputs=64, tokens=64, blocks=1, stages=6, group=16),
)
"""For more tokens than OVERLAPPING_SIZES has, in deterministic mode, the largest first: bits do not depend on it."""
ENOUGH_PROGRAMS = 100
"""Of an H100's 132 multiprocessors: tiles that would leave more of them idle are too large."""
HEAD_TILES = (
    (8, OverlappingCut(outputs=128, tokens=8, blocks=2, stages=4)),
    (32, OverlappingCut(outputs=128, tokens=32, blocks=2, stages=4)),
    (128, OverlappingCut(outputs=128, tokens=128, blocks=1, stages=6, warps=8)),
)
"""The most rows that a tile of the head is for, fewest first; beyond: the largest of many."""


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
    elif size <= 128:
        gate_up = cut(2 * I, D, PAIRED_BYTES, tokens=size, blocks=1)
    else:
        gate_up = replace(cut(2 * I, D, PAIRED_BYTES, tokens=128, blocks=1, outputs=128), warps=8)
    if size <= 128:
        down = cut(D, I, WHOLE_BYTES, tokens=min(size, 64), blocks=4 if size <= 32 else 2)
    else:
        down = cut(D, I, SHARED_BYTES, tokens=64, blocks=1)
    return OverlappingCuts(
        qkv=cut(A + 2 * config.num_key_value_heads * config.head_dim, D, NARROW_BYTES, tokens=narrow, blocks=2),
        output=cut(D, A, NARROW_BYTES, tokens=narrow, blocks=2),
        gate_up=gate_up,
        down=down,
    )


def cut_of_many(num_outputs: int, num_inputs: int, num_tokens: int) -> OverlappingCut:
    """Of a product of more tokens than OVERLAPPING_SIZES has: the largest tile of which there are enough."""
    turns = Splits.of(num_outputs, num_inputs).count
    fitting = (each for each in TILES_OF_MANY if each.num_tiles(num_tokens, num_outputs) >= ENOUGH_PROGRAMS)
    return replace(next(fitting, TILES_OF_MANY[-1]), turns=turns)


def head_cut(num_rows: int) -> OverlappingCut:
    """Of the product with the head, whose sums are not split."""
    return next((cut for most, cut in HEAD_TILES if num_rows <= most), TILES_OF_MANY[0])


def overlapping_cuts_of(config: ModelConfig, size: int) -> OverlappingCuts:
    """`all_cuts_of`, where a library is not faster."""
    cuts = all_cuts_of(config, size)
    if size <= 64:
        return cuts
    return replace(cuts, down=None) if size <= 128 else replace(cuts, gate_up=None, down=None)


def fits_overlapping(config: ModelConfig, weight: torch.Tensor) -> bool:
    """Whether the shape's matrices, all like this weight, have these products. config: of this rank."""
    inputs = (config.hidden_size, config.intermediate_size, config.num_attention_heads * config.head_dim)
    return fits(weight) and all(each % BLOCK == 0 for each in inputs)


def overlapping_room(config: ModelConfig, device: torch.device | str) -> SplitKRoom:
    """Room for the products of all OVERLAPPING_SIZES."""
    return room_for(config, ((size, all_cuts_of(config, size)) for size in OVERLAPPING_SIZES), device)


class OverlappingFinish(CutFinish[OverlappingCut]):
    """Products that overlap with their neighbours; room for the parts of sums."""

    def __init__(
        self, weights: GpuWeights, buffers: LayerBuffers, room: SplitKRoom | None, cuts: OverlappingCuts
    ) -> None:
        super().__init__(weights, buffers, cuts)
        self._room = room

    def _multiply(self, y_TK: torch.Tensor, matrix_OK: torch.Tensor, out_TO: torch.Tensor, cut: OverlappingCut) -> None:
        overlapping_product(y_TK, matrix_OK, out_TO, self._room, cut=cut, overlap=Overlap.DEPENDENT)

    def _add_product(
        self, x_TO: torch.Tensor, y_TK: torch.Tensor, matrix_OK: torch.Tensor, cut: OverlappingCut
    ) -> None:
        overlapping_add_product(x_TO, y_TK, matrix_OK, self._room, cut=cut, overlap=Overlap.DEPENDENT)

    def _multiply_and_activate(
        self, x_TD: torch.Tensor, gate_up_ED: torch.Tensor, act_TI: torch.Tensor, cut: OverlappingCut
    ) -> None:
        eps = self.weights.config.rms_norm_eps
        overlapping_gate_up(x_TD, gate_up_ED, act_TI, eps, cut=cut, overlap=Overlap.DEPENDENT)
