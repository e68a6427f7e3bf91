"""The decoder layers of a decode step of a few dozen rows: products by our own kernel where it is faster.

The counterpart of model/gpu/layers.py for weights in the model's dtype; model/gpu/autotune.py decides which batch sizes
use it.
"""

import torch

from octavo.model.config import ModelConfig
from octavo.model.gpu.cut_layers import CutFinish, LayerCuts, room_for
from octavo.model.gpu.layers import LayerBuffers
from octavo.model.gpu.weights import GpuWeights
from octavo.model.kernels.products.split_k import (
    SplitKCut,
    SplitKRoom,
    dot_gate_up,
    split_k_add_product,
    split_k_product,
)

SplitKCuts = LayerCuts[SplitKCut]
SPLIT_K_SIZES = (16, 32, 64)
"""Batch sizes with cuts of their own; each also serves smaller ones. Beyond, cuBLAS was faster for every product."""
WANTED_PROGRAMS = 140


def split_k_cuts_of(config: ModelConfig, size: int) -> SplitKCuts:
    """Cuts for a batch of one of SPLIT_K_SIZES: the fastest for 0.5B on an H100 (bench/RESULTS.md)."""

    def cut(num_outputs: int, outputs: int) -> SplitKCut:
        tiles = -(-num_outputs // outputs)
        return SplitKCut(outputs=outputs, tokens=size, splits=max(1, WANTED_PROGRAMS // tiles))

    if size == 64:
        return SplitKCuts(gate_up=SplitKCut(tokens=64, inputs=64))
    qkv = cut((config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim, 32)
    return SplitKCuts(
        qkv=qkv if size == 16 else SplitKCut(tokens=size),
        gate_up=SplitKCut(tokens=size),
        down=cut(config.hidden_size, 32),
    )


def split_k_room(config: ModelConfig, device: torch.device | str) -> SplitKRoom:
    """Memory for the products of all SPLIT_K_SIZES."""
    return room_for(config, ((size, split_k_cuts_of(config, size)) for size in SPLIT_K_SIZES), device)


class SplitKFinish(CutFinish[SplitKCut]):
    """Products whose inputs are split. room: memory for the parts of sums."""

    def __init__(self, weights: GpuWeights, buffers: LayerBuffers, room: SplitKRoom, cuts: SplitKCuts) -> None:
        super().__init__(weights, buffers, cuts)
        self._room = room

    def _multiply(self, y_TK: torch.Tensor, matrix_OK: torch.Tensor, out_TO: torch.Tensor, cut: SplitKCut) -> None:
        split_k_product(y_TK, matrix_OK, out_TO, self._room, cut)

    def _add_product(self, x_TO: torch.Tensor, y_TK: torch.Tensor, matrix_OK: torch.Tensor, cut: SplitKCut) -> None:
        split_k_add_product(x_TO, y_TK, matrix_OK, self._room, cut)

    def _multiply_and_activate(
        self, x_TD: torch.Tensor, gate_up_ED: torch.Tensor, act_TI: torch.Tensor, cut: SplitKCut
    ) -> None:
        dot_gate_up(x_TD, gate_up_ED, act_TI, self.weights.config.rms_norm_eps, cut)
