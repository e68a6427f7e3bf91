"""The decoder layers of a decode step of some dozens of rows: products by our own kernel where it is faster.

The counterpart of model/gpu/layers.py for weights in the model's dtype; which batch sizes take it is decided in
model/gpu/autotune.py.
"""

from dataclasses import dataclass

import torch

from octavo.model.config import ModelConfig
from octavo.model.gpu.layers import LayerBuffers, PlainFinish
from octavo.model.gpu.weights import GpuWeights
from octavo.model.kernels.products.split_k import (
    SplitKCut,
    SplitKRoom,
    dot_gate_up,
    split_k_add_product,
    split_k_product,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitKCuts:
    """How each product of a layer is cut; None leaves it to cuBLAS."""

    qkv: SplitKCut | None = None
    output: SplitKCut | None = None
    gate_up: SplitKCut | None = None
    down: SplitKCut | None = None


SPLIT_K_SIZES = (16, 32, 64)
"""Batch sizes that have cuts of their own: each serves those below it. Beyond, cuBLAS has won every product."""
WANTED_PROGRAMS = 140


def split_k_cuts_of(config: ModelConfig, size: int) -> SplitKCuts:
    """Cuts for a batch of one of SPLIT_K_SIZES: what was fastest for 0.5B on an H100 (bench/RESULTS.md)."""

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
    """Room for all products of all sizes, which run one after the other."""
    num_elements = num_tiles = 1
    for size in SPLIT_K_SIZES:
        cuts = split_k_cuts_of(config, size)
        heads = config.num_attention_heads + 2 * config.num_key_value_heads
        for cut, num_outputs in ((cuts.qkv, heads * config.head_dim), (cuts.down, config.hidden_size)):
            if cut is not None:
                num_elements = max(num_elements, cut.part_elements(size, num_outputs))
                num_tiles = max(num_tiles, cut.num_tiles(size, num_outputs))
    return SplitKRoom.allocate(num_elements=num_elements, num_tiles=num_tiles, device=device)


class SplitKFinish(PlainFinish):
    """`PlainFinish` with products cut this way; room for the parts of sums."""

    def __init__(self, weights: GpuWeights, buffers: LayerBuffers, room: SplitKRoom, cuts: SplitKCuts) -> None:
        super().__init__(weights, buffers)
        self._room, self._cuts = room, cuts

    def multiply_qkv(self, layer: int, x_TD: torch.Tensor, qkv_TC: torch.Tensor) -> None:
        """See PlainFinish.multiply_qkv."""
        if self._cuts.qkv is None:
            super().multiply_qkv(layer, x_TD, qkv_TC)
        else:
            split_k_product(x_TD, self.weights.layers[layer].qkv_CD, qkv_TC, self._room, self._cuts.qkv)

    def add_output(self, layer: int, x_TD: torch.Tensor, attended_TNH: torch.Tensor) -> torch.Tensor:
        """See FinishOps."""
        if self._cuts.output is None:
            return super().add_output(layer, x_TD, attended_TNH)
        weight = self.weights.layers[layer].o_DA
        return self._put(x_TD, attended_TNH.flatten(1), weight, self._cuts.output)

    def activate(self, layer: int, x_TD: torch.Tensor) -> torch.Tensor:
        """See FinishOps."""
        if self._cuts.gate_up is None:
            return super().activate(layer, x_TD)
        act_TI, weight = self.buffers.act_TI[: len(x_TD)], self.weights.layers[layer].gate_up_ED
        dot_gate_up(x_TD, weight, act_TI, self.weights.config.rms_norm_eps, self._cuts.gate_up)
        return act_TI

    def add_down(self, layer: int, x_TD: torch.Tensor, act_TI: torch.Tensor) -> torch.Tensor:
        """See FinishOps."""
        if self._cuts.down is None:
            return super().add_down(layer, x_TD, act_TI)
        return self._put(x_TD, act_TI, self.weights.layers[layer].down_DI, self._cuts.down)

    def _put(self, x_TD: torch.Tensor, y_TQ: torch.Tensor, matrix_DQ: torch.Tensor, cut: SplitKCut) -> torch.Tensor:
        if self.has_sums:
            split_k_product(y_TQ, matrix_DQ, x_TD, self._room, cut)
        else:
            split_k_add_product(x_TD, y_TQ, matrix_DQ, self._room, cut)
        return x_TD
