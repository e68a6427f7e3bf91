"""The decoder layers of a decode step of dozens or hundreds of rows, by kernels that all overlap: products of our own
whose weights are loaded while the preceding kernel still runs, and attention that prefetches its first keys and values.

For weights in the model's dtype, on devices that have the products' instructions; model/gpu/autotune.py decides which
batch sizes use it.
"""

from dataclasses import dataclass, replace
from math import gcd

import torch

from octavo.model.config import ModelConfig
from octavo.model.gpu.cut_layers import CutFinish, LayerCuts, room_for
from octavo.model.gpu.layers import LayerBuffers
from octavo.model.gpu.weights import GpuWeights
from octavo.model.kernels.overlap import Overlap
from octavo.model.kernels.products.clustered import (
    ClusteredCut,
    clustered_add_product,
    clustered_gate_up,
    clustered_product,
    gate_up_cut,
    split_cut,
)
from octavo.model.kernels.products.hopper import BLOCK, MULTIPROCESSORS
from octavo.model.kernels.products.invariant import Splits
from octavo.model.kernels.products.overlapping import (
    OverlappingCut,
    fits,
    overlapping_add_product,
    overlapping_gate_up,
    overlapping_product,
)
from octavo.model.kernels.products.split_k import SplitKRoom
from octavo.model.kernels.rows import rms_scale

AnyCut = OverlappingCut | ClusteredCut
OverlappingCuts = LayerCuts[AnyCut]
OVERLAPPING_SIZES = (8, 16, 32, 64, 128, 256)
"""Batch sizes with cuts of their own; each also serves smaller ones."""
CLUSTERED_SIZES = (128, 192, 256)
"""Batch sizes whose products are cut for clusters, if the device has them."""
FEW_CLUSTERED = 128
"""Up to this many rows, all products are, except in the narrowest models."""
MOST_STAGES = 8
WHOLE_BYTES, NARROW_BYTES, PAIRED_BYTES, TRIPLE_BYTES = 196_608, 172_032, 114_688, 65_536
"""Bytes of a multiprocessor's shared memory for a program's stages: for one that should prefetch as many of its weights
as possible; for one of a small matrix, all of which fits and leaves room for the next kernel; for one of two programs
on a multiprocessor; for one of three."""
SHARED_BYTES, BYTES_BESIDE = 233_472, 1_280
"""Shared memory of a multiprocessor, and what a program uses besides its stages."""
LEAST_LIMITED, MOST_AT_ONCE, LEAST_STAGES = 32, 3, 3
"""From LEAST_LIMITED rows on, stages are limited so that all programs of a multiprocessor fit at once, if these are at
most MOST_AT_ONCE and each still has LEAST_STAGES stages: programs of a second turn would prefetch nothing meanwhile."""
WIDE_DOWN = OverlappingCut(outputs=64, tokens=128, blocks=1, stages=8)
"""For more than 64 rows, if about all splits of a small matrix can run at once."""
WIDE_HIDDEN = 3_584
LARGE_TILE = OverlappingCut(outputs=128, tokens=128, blocks=1, stages=6, warps=8)
"""For more than 64 rows, if a matrix has enough tiles for most of a device with one split or a few."""
NUMBER_BYTES = 2
NARROW_INPUTS = 1024
"""Most inputs of a matrix for which a program with half a multiprocessor holds nearly all of its weights at once."""
TILES_OF_MANY = (
    OverlappingCut(outputs=128, tokens=256, blocks=1, stages=4, group=16, warps=8),
    OverlappingCut(outputs=128, tokens=128, blocks=1, stages=6, group=16, warps=8),
    OverlappingCut(outputs=64, tokens=128, blocks=1, stages=4, group=16),
    OverlappingCut(outputs=64, tokens=64, blocks=1, stages=6, group=16),
)
"""For more tokens than in OVERLAPPING_SIZES, in deterministic mode, largest first: bits do not depend on the tile."""
ENOUGH_PROGRAMS = 100
"""Programs wanted on an H100's 132 multiprocessors: tiles are too large if they give fewer."""
HEAD_TILES = (
    (8, OverlappingCut(tokens=8, blocks=2, stages=4)),
    (32, OverlappingCut(outputs=128, tokens=32, blocks=2, stages=4)),
    (128, OverlappingCut(outputs=128, tokens=128, blocks=1, stages=6, warps=8)),
)
"""(most rows, tile of the head), fewest first; beyond: the largest of TILES_OF_MANY."""


@dataclass(frozen=True, slots=True)
class _Product:
    """A matrix of num_outputs x num_inputs by which a batch of `size` rows is multiplied."""

    num_outputs: int
    num_inputs: int
    size: int

    def num_programs(self, tokens: int, outputs: int = 64) -> int:
        """Number of programs with tiles of this many tokens and outputs."""
        num_tiles = -(-self.num_outputs // outputs) * -(-self.size // tokens)
        return num_tiles * Splits.of(self.num_outputs, self.num_inputs).count

    def cut(self, room: int, *, tokens: int, blocks: int, outputs: int = 64) -> OverlappingCut:
        """A cut with as many stages as fit into `room` bytes. With many rows, fewer if then all programs of a
        multiprocessor fit at once, each with enough stages."""
        splits = Splits.of(self.num_outputs, self.num_inputs)
        block_bytes = (outputs + tokens) * BLOCK * NUMBER_BYTES
        blocks = gcd(blocks, splits.inputs // BLOCK)
        if self.size >= LEAST_LIMITED:
            at_once = -(-self.num_programs(tokens, outputs) // MULTIPROCESSORS)
            share = SHARED_BYTES // at_once - BYTES_BESIDE
            if at_once <= MOST_AT_ONCE and share >= LEAST_STAGES * block_bytes:
                room = min(room, share)
            while blocks % 2 == 0 and room // (block_bytes * blocks) < LEAST_STAGES:
                blocks //= 2
        stages = min(splits.inputs // (BLOCK * blocks), MOST_STAGES, room // (block_bytes * blocks))
        return OverlappingCut(outputs=outputs, tokens=tokens, blocks=blocks, stages=stages, splits=splits.count)


def all_cuts_of(config: ModelConfig, size: int) -> OverlappingCuts:
    """Cuts of every product for a batch of one of OVERLAPPING_SIZES: the fastest of ours for 0.5B and 7B on an
    H200 (bench/RESULTS.md). Sums are split as in deterministic mode, depending on the matrix alone."""
    D, I, A = config.hidden_size, config.intermediate_size, config.num_attention_heads * config.head_dim
    return OverlappingCuts(
        qkv=_narrow_cut(_Product(A + 2 * config.num_key_value_heads * config.head_dim, D, size)),
        output=_narrow_cut(_Product(D, A, size)),
        gate_up=_gate_up_cut(_Product(2 * I, D, size)),
        down=_down_cut(_Product(D, I, size)),
    )


def _narrow_cut(product: _Product) -> OverlappingCut:
    """One tile of tokens if that leaves no multiprocessor idle, since every further one reads the matrix again."""
    size = product.size
    is_large = size == 64 and product.num_programs(size) >= MULTIPROCESSORS
    tokens = 64 if is_large or size > 128 else min(size, 32)
    return product.cut(NARROW_BYTES, tokens=tokens, blocks=2)


def _gate_up_cut(product: _Product) -> OverlappingCut:
    size = product.size
    if size > 128:
        return replace(product.cut(PAIRED_BYTES, tokens=128, blocks=1, outputs=128), warps=8)
    programs = product.num_programs(tokens=size)
    is_large = 2 < product.num_programs(tokens=size, outputs=128) / MULTIPROCESSORS <= MOST_AT_ONCE
    is_small = programs <= 2 * MULTIPROCESSORS
    if size == 8 and product.num_inputs <= NARROW_INPUTS and is_small:
        # Two programs per multiprocessor, with nearly all of their weights in flight.
        return product.cut(SHARED_BYTES // 2 - BYTES_BESIDE, tokens=size, blocks=2)
    if size == 8:
        room = SHARED_BYTES // MOST_AT_ONCE - BYTES_BESIDE if is_large else WHOLE_BYTES
        return product.cut(room, tokens=size, blocks=2, outputs=128)
    # If programs have to take turns anyway, fewer and longer copies are faster.
    blocks = 2 if size == 32 and programs > MOST_AT_ONCE * MULTIPROCESSORS else 1
    outputs = 128 if is_large and size in (32, 64) else 64
    return product.cut(PAIRED_BYTES, tokens=min(size, 64 if is_small else 128), blocks=blocks, outputs=outputs)


def _down_cut(product: _Product) -> OverlappingCut:
    size = product.size
    if size > 128:
        return product.cut(TRIPLE_BYTES, tokens=64, blocks=1)
    return product.cut(WHOLE_BYTES, tokens=min(size, 64), blocks=4 if size <= 32 else 2)


def cut_of_many(num_outputs: int, num_inputs: int, num_tokens: int) -> OverlappingCut:
    """Cut of a product of more tokens than in OVERLAPPING_SIZES: the largest tile of which there are enough."""
    turns = Splits.of(num_outputs, num_inputs).count
    fitting = (each for each in TILES_OF_MANY if each.num_tiles(num_tokens, num_outputs) >= ENOUGH_PROGRAMS)
    return replace(next(fitting, TILES_OF_MANY[-1]), turns=turns)


def head_cut(num_rows: int) -> OverlappingCut:
    """Cut of the product with the head, whose sums are not split."""
    return next((cut for most, cut in HEAD_TILES if num_rows <= most), TILES_OF_MANY[0])


def overlapping_cuts_of(config: ModelConfig, size: int, *, has_clusters: bool = False) -> OverlappingCuts:
    """`all_cuts_of` one of OVERLAPPING_SIZES or CLUSTERED_SIZES, without those for which a library is faster. For more
    than 64 rows, products are cut for clusters of programs if the device has them; measurements decided which
    (bench/RESULTS.md)."""
    cuts = _cuts_beside_library(config, next(each for each in OVERLAPPING_SIZES if size <= each))
    if size not in CLUSTERED_SIZES or not has_clusters:
        return cuts
    D, I, A = config.hidden_size, config.intermediate_size, config.num_attention_heads * config.head_dim
    gate_up, down, is_few = gate_up_cut(2 * I, size), split_cut(D, I, size), size <= FEW_CLUSTERED
    if D <= NARROW_INPUTS:
        return replace(cuts, gate_up=gate_up, down=down)
    qkv = split_cut(A + 2 * config.num_key_value_heads * config.head_dim, D, size)
    output = split_cut(D, A, size) if is_few else cuts.output
    if D < WIDE_HIDDEN or is_few:
        return OverlappingCuts(qkv=qkv, output=output, gate_up=gate_up, down=down)
    return OverlappingCuts(gate_up=gate_up)


def _cuts_beside_library(config: ModelConfig, size: int) -> OverlappingCuts:
    """For 128 rows, and for more than 64 in wide models, sums have as many splits as a device can run at once."""
    cuts = all_cuts_of(config, size)
    if size <= 64:
        return cuts
    if config.hidden_size >= WIDE_HIDDEN:
        return _wide_cuts_of(config, size)
    if size > 128:
        return replace(cuts, gate_up=None, down=None)
    wanted = Splits.of(config.hidden_size, config.intermediate_size).count
    splits = min(wanted, MULTIPROCESSORS // WIDE_DOWN.num_tiles(size, config.hidden_size))
    if 1 < wanted <= splits + 1:
        return replace(cuts, down=replace(WIDE_DOWN, splits=splits))
    return replace(cuts, down=None)


def _wide_cuts_of(config: ModelConfig, size: int) -> OverlappingCuts:
    """The fastest for one of two ranks of 32B (bench/RESULTS.md); gate and up are left to a library."""

    def at_once(cut: OverlappingCut, num_outputs: int) -> OverlappingCut:
        return replace(cut, splits=max(1, MULTIPROCESSORS // cut.num_tiles(size, num_outputs)))

    D, heads = config.hidden_size, config.num_attention_heads + 2 * config.num_key_value_heads
    if size > 128:
        return OverlappingCuts(qkv=at_once(WIDE_DOWN, heads * config.head_dim), output=at_once(LARGE_TILE, D))
    return OverlappingCuts(output=at_once(WIDE_DOWN, D), down=at_once(LARGE_TILE, D))


def fits_overlapping(config: ModelConfig, weight: torch.Tensor) -> bool:
    """Whether these products support the shape's matrices, all of this weight's kind. config: of this rank."""
    inputs = (config.hidden_size, config.intermediate_size, config.num_attention_heads * config.head_dim)
    return fits(weight) and all(each % BLOCK == 0 for each in inputs)


def overlapping_room(config: ModelConfig, device: torch.device | str) -> SplitKRoom:
    """Memory for the products of all OVERLAPPING_SIZES."""
    ways = (all_cuts_of, overlapping_cuts_of)
    return room_for(config, ((size, way(config, size)) for size in OVERLAPPING_SIZES for way in ways), device)


class OverlappingFinish(CutFinish[AnyCut]):
    """Products that overlap with their neighbours. room: memory for the parts of sums."""

    def __init__(
        self, weights: GpuWeights, buffers: LayerBuffers, room: SplitKRoom | None, cuts: OverlappingCuts
    ) -> None:
        super().__init__(weights, buffers, cuts)
        self._room = room

    def _multiply(self, y_TK: torch.Tensor, matrix_OK: torch.Tensor, out_TO: torch.Tensor, cut: AnyCut) -> None:
        if isinstance(cut, ClusteredCut):
            clustered_product(y_TK, matrix_OK, out_TO, cut=cut, overlap=Overlap.DEPENDENT)
        else:
            overlapping_product(y_TK, matrix_OK, out_TO, self._room, cut=cut, overlap=Overlap.DEPENDENT)

    def _add_product(self, x_TO: torch.Tensor, y_TK: torch.Tensor, matrix_OK: torch.Tensor, cut: AnyCut) -> None:
        if isinstance(cut, ClusteredCut):
            clustered_add_product(x_TO, y_TK, matrix_OK, cut=cut, overlap=Overlap.DEPENDENT)
        else:
            overlapping_add_product(x_TO, y_TK, matrix_OK, self._room, cut=cut, overlap=Overlap.DEPENDENT)

    def _multiply_and_activate(
        self, x_TD: torch.Tensor, gate_up_ED: torch.Tensor, act_TI: torch.Tensor, cut: AnyCut
    ) -> None:
        eps = self.weights.config.rms_norm_eps
        if isinstance(cut, ClusteredCut):
            scale_T = self.buffers.scale_T[: len(x_TD)]
            rms_scale(x_TD, scale_T, eps, overlap=Overlap.DEPENDENT)
            clustered_gate_up(x_TD, gate_up_ED, scale_T, act_TI, cut=cut, overlap=Overlap.DEPENDENT)
        else:
            overlapping_gate_up(x_TD, gate_up_ED, act_TI, eps, cut=cut, overlap=Overlap.DEPENDENT)
