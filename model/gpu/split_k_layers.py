"""The decoder layers of a decode step of some dozens of rows: products by our own kernel where it is faster.

The twin of model/gpu/layers.py for weights in the model's dtype; which batch sizes take it is decided in
model/gpu/autotune.py.
"""

from dataclasses import dataclass

import torch

from octavo.model.config import ModelConfig
from octavo.model.gpu.layers import Attend, LayerBuffers
from octavo.model.gpu.weights import GpuWeights
from octavo.model.kernels.products.activation import silu_mul
from octavo.model.kernels.products.split_k import SplitCut, SplitRoom, dot_gate_up, split_add_product, split_product


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCuts:
    """How each product of a layer is cut; None leaves it to cuBLAS."""

    qkv: SplitCut | None = None
    output: SplitCut | None = None
    gate_up: SplitCut | None = None
    down: SplitCut | None = None


SPLIT_SIZES = (16, 32, 64)
"""Batch sizes that have cuts of their own: each serves those below it. Beyond, cuBLAS has won every product."""
WANTED_PROGRAMS = 140


def split_cuts_of(config: ModelConfig, size: int) -> SplitCuts:
    """Cuts for a batch of one of SPLIT_SIZES: what was fastest for 0.5B on an H100 (bench/RESULTS.md)."""

    def cut(num_outputs: int, outputs: int) -> SplitCut:
        tiles = -(-num_outputs // outputs)
        return SplitCut(outputs=outputs, tokens=size, splits=max(1, WANTED_PROGRAMS // tiles))

    if size == 64:
        return SplitCuts(gate_up=SplitCut(tokens=64, inputs=64))
    qkv = cut((config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim, 32)
    return SplitCuts(
        qkv=qkv if size == 16 else SplitCut(tokens=size),
        gate_up=SplitCut(tokens=size),
        down=cut(config.hidden_size, 32),
    )


def split_room(config: ModelConfig, device: torch.device | str) -> SplitRoom:
    """Room for all products of all sizes, which run one after the other."""
    num_elements = num_tiles = 1
    for size in SPLIT_SIZES:
        cuts = split_cuts_of(config, size)
        heads = config.num_attention_heads + 2 * config.num_key_value_heads
        for cut, num_outputs in ((cuts.qkv, heads * config.head_dim), (cuts.down, config.hidden_size)):
            if cut is not None:
                num_elements = max(num_elements, cut.part_elements(size, num_outputs))
                num_tiles = max(num_tiles, cut.num_tiles(size, num_outputs))
    return SplitRoom.allocate(num_elements=num_elements, num_tiles=num_tiles, device=device)


class SplitLayers:
    """Launches, and room for the parts of sums."""

    def __init__(self, weights: GpuWeights, buffers: LayerBuffers, room: SplitRoom | None = None) -> None:
        self._weights, self._buffers = weights, buffers
        self._room = room or split_room(weights.config, weights.embed_VD.device)

    def run(self, num_tokens: int, attend: Attend, cuts: SplitCuts) -> torch.Tensor:
        """Take the first tokens of buffers.x_TD through every layer, in place; returns them."""
        buffers, weights = self._buffers, self._weights
        x_TD, out_TNH = buffers.x_TD[:num_tokens], buffers.out_TNH[:num_tokens]
        qkv_TC, act_TI = buffers.qkv_TC[:num_tokens], buffers.act_TI[:num_tokens]
        for index, layer in enumerate(weights.layers):
            self._multiply(x_TD, layer.qkv_CD, qkv_TC, cuts.qkv)
            attend(index, layer, qkv_TC, x_TD, out_TNH)
            self._add(x_TD, out_TNH.flatten(1), layer.o_DA, cuts.output)
            self._gate_up(x_TD, layer.gate_up_ED, act_TI, cuts.gate_up)
            self._add(x_TD, act_TI, layer.down_DI, cuts.down)
        return x_TD

    def _multiply(self, x_TD: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, cut: SplitCut | None) -> None:
        if cut is None:
            torch.mm(x_TD, weight.T, out=out)
        else:
            split_product(x_TD, weight, out, self._room, cut)

    def _add(self, x_TD: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, cut: SplitCut | None) -> None:
        if cut is None:
            x_TD.addmm_(y, weight.T)
        else:
            split_add_product(x_TD, y, weight, self._room, cut)

    def _gate_up(self, x_TD: torch.Tensor, weight: torch.Tensor, act_TI: torch.Tensor, cut: SplitCut | None) -> None:
        eps = self._weights.config.rms_norm_eps
        if cut is None:
            gate_up_T2I = self._buffers.gate_up_T2I[: len(x_TD)]
            torch.mm(x_TD, weight.T, out=gate_up_T2I)
            silu_mul(gate_up_T2I, x_TD, act_TI, eps)
        else:
            dot_gate_up(x_TD, weight, act_TI, eps, cut)
