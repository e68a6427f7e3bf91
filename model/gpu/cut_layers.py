"""The operations after attention in a decode step that has kernels of our own for some products, each cut for the batch
size; the others are left to cuBLAS. Subclasses choose the kernels.

Legend: T tokens · D model dim · I intermediate dim · C columns of QKV · O outputs · K inputs of a product · N heads ·
H head dim · A = N·H · E = 2 I.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from octavo.model.config import ModelConfig
from octavo.model.gpu.layers import LayerBuffers, PlainFinish
from octavo.model.gpu.weights import GpuWeights
from octavo.model.kernels.products.split_k import SplitKRoom


class Cut(Protocol):
    """How a product is cut."""

    @property
    def splits(self) -> int:
        """Number of parts of each sum, which different programs compute."""

    def num_tiles(self, num_tokens: int, num_outputs: int) -> int:
        """Number of tiles of a product."""

    def part_elements(self, num_tokens: int, num_outputs: int) -> int:
        """Memory for the parts, in float32 elements."""


AnyCut = TypeVar("AnyCut", bound=Cut)


@dataclass(frozen=True, kw_only=True)  # with slots, Python 3.11 cannot create one through an alias of LayerCuts[...]
class LayerCuts(Generic[AnyCut]):
    """How each product of a layer is cut; None leaves it to cuBLAS."""

    qkv: AnyCut | None = None
    output: AnyCut | None = None
    gate_up: AnyCut | None = None
    down: AnyCut | None = None


def room_for(
    config: ModelConfig, cuts_by_size: Iterable[tuple[int, LayerCuts[AnyCut]]], device: torch.device | str
) -> SplitKRoom:
    """Memory for the parts of all products of all sizes, which run one after another."""
    num_elements = num_tiles = 1
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    outputs = (heads * config.head_dim, config.hidden_size, config.hidden_size)
    for size, cuts in cuts_by_size:
        for cut, num_outputs in zip((cuts.qkv, cuts.output, cuts.down), outputs, strict=True):
            if cut is not None and cut.splits > 1:
                num_elements = max(num_elements, cut.part_elements(size, num_outputs))
                num_tiles = max(num_tiles, cut.num_tiles(size, num_outputs))
    return SplitKRoom.allocate(num_elements=num_elements, num_tiles=num_tiles, device=device)


class CutFinish(PlainFinish, ABC, Generic[AnyCut]):
    """`PlainFinish` with products cut this way."""

    def __init__(self, weights: GpuWeights, buffers: LayerBuffers, cuts: LayerCuts[AnyCut]) -> None:
        super().__init__(weights, buffers)
        self._cuts = cuts

    @abstractmethod
    def _multiply(self, y_TK: torch.Tensor, matrix_OK: torch.Tensor, out_TO: torch.Tensor, cut: AnyCut) -> None:
        """out_TO = y_TK @ matrix_OK^T."""

    @abstractmethod
    def _add_product(self, x_TO: torch.Tensor, y_TK: torch.Tensor, matrix_OK: torch.Tensor, cut: AnyCut) -> None:
        """x_TO += y_TK @ matrix_OK^T."""

    @abstractmethod
    def _multiply_and_activate(
        self, x_TD: torch.Tensor, gate_up_ED: torch.Tensor, act_TI: torch.Tensor, cut: AnyCut
    ) -> None:
        """act_TI = silu(gate) * up of the normalised x_TD; the norm's weight is folded into gate_up_ED [2I, D]."""

    def multiply_qkv(self, layer: int, x_TD: torch.Tensor, qkv_TC: torch.Tensor) -> None:
        """See PlainFinish.multiply_qkv."""
        if self._cuts.qkv is None:
            super().multiply_qkv(layer, x_TD, qkv_TC)
        else:
            self._multiply(x_TD, self.weights.layers[layer].qkv_CD, qkv_TC, self._cuts.qkv)

    def add_output(self, layer: int, x_TD: torch.Tensor, attended_TNH: torch.Tensor) -> torch.Tensor:
        """See FinishOps."""
        if self._cuts.output is None:
            return super().add_output(layer, x_TD, attended_TNH)
        return self._put(x_TD, attended_TNH.flatten(1), self.weights.layers[layer].o_DA, self._cuts.output)

    def activate(self, layer: int, x_TD: torch.Tensor) -> torch.Tensor:
        """See FinishOps."""
        if self._cuts.gate_up is None:
            return super().activate(layer, x_TD)
        act_TI = self.buffers.act_TI[: len(x_TD)]
        self._multiply_and_activate(x_TD, self.weights.layers[layer].gate_up_ED, act_TI, self._cuts.gate_up)
        return act_TI

    def add_down(self, layer: int, x_TD: torch.Tensor, act_TI: torch.Tensor) -> torch.Tensor:
        """See FinishOps."""
        if self._cuts.down is None:
            return super().add_down(layer, x_TD, act_TI)
        return self._put(x_TD, act_TI, self.weights.layers[layer].down_DI, self._cuts.down)

    def _put(self, x_TO: torch.Tensor, y_TK: torch.Tensor, matrix_OK: torch.Tensor, cut: AnyCut) -> torch.Tensor:
        if self.has_sums:
            self._multiply(y_TK, matrix_OK, x_TO, cut)
        else:
            self._add_product(x_TO, y_TK, matrix_OK, cut)
        return x_TO
