"""The decoder layers of a step in deterministic mode: every token goes through the same kernels, which give it the same
bits whatever else is in the batch (docs/decisions/0006-deterministic-mode.md).

Decode and prompt tokens differ only in how their attention is listed. The slow references are the same as for
model/gpu/layers.py.

Legend: T tokens, decodes first · S sampled tokens · N query heads · H head dim · D model dim · A = N·H · C columns of
QKV · I intermediate dim · E = 2 I · V rows of the head · W those that this rank has · O outputs · Q inputs of a
product.
"""

from dataclasses import replace

import torch

from octavo.model.attention.kv_pool import KvPool
from octavo.model.gpu.invariant_attention import MostTokens, StepAttention, StepTokens, attention_of
from octavo.model.gpu.layers import LayerBuffers, SumsInPlace, attend_layers, run_layers
from octavo.model.gpu.overlapping_layers import (
    OVERLAPPING_SIZES,
    OverlappingCuts,
    all_cuts_of,
    cut_of_many,
    fits_overlapping,
    head_cut,
    overlapping_room,
)
from octavo.model.gpu.state import RowState
from octavo.model.gpu.weights import GpuWeights
from octavo.model.kernels.overlap import Overlap
from octavo.model.kernels.products import gate_up
from octavo.model.kernels.products.activation import invariant_silu_mul
from octavo.model.kernels.products.invariant import (
    MANY_TOKENS,
    Splits,
    invariant_add_product,
    invariant_product,
    part_elements,
)
from octavo.model.kernels.products.overlapping import (
    OverlappingCut,
    overlapping_add_product,
    overlapping_gate_up,
    overlapping_product,
    overlapping_scale,
)
from octavo.model.kernels.rows import rms_norm


class InvariantLayers:
    """For steps of up to `most` tokens.

    beside: another step's layers, whose buffers are shared; only one of the two may run at a time.
    """

    def __init__(
        self,
        weights: GpuWeights,
        state: RowState,
        kv: KvPool,
        buffers: LayerBuffers,
        most: MostTokens,
        *,
        beside: "InvariantLayers | None" = None,
    ) -> None:
        config, device = weights.config, weights.embed_VD.device
        self.weights, self.buffers = weights, buffers
        matrices = [config.vocab_size, config.hidden_size]
        for layer in weights.layers[:1]:
            shapes = [
                (len(each), each.shape[1]) for each in (layer.qkv_CD, layer.o_DA, layer.gate_up_ED, layer.down_DI)
            ]
        room = max(part_elements(max(most.tokens, MANY_TOKENS), *shape) for shape in [*shapes, tuple(matrices)])
        self.part = torch.empty(max(room, 1), dtype=torch.float32, device=device)
        self.overlap, self._room = Overlap.NONE, None
        self._cuts = dict[int, OverlappingCuts]()
        if fits_overlapping(config, weights.embed_VD):
            self.overlap = Overlap.DEPENDENT
            self._cuts = {size: all_cuts_of(config, size) for size in OVERLAPPING_SIZES}
            self._room = overlapping_room(config, device)
        self._has_head = bool(self._cuts) and Splits.of(len(weights.head_VD), config.hidden_size).count == 1
        others = None if beside is None else beside.attention
        self.attention: StepAttention = attention_of(weights, state, kv, most, self.overlap, others)

    def plan(self, tokens: StepTokens) -> None:
        """Plan the step's attention. Call it before the step's embedding: kernels after the embedding then see the
        whole plan."""
        self.attention.plan(tokens)

    def run(self, x_TD: torch.Tensor, tokens: StepTokens) -> None:
        """Run x_TD, a view of the buffers', through every layer in place, writing the caches of the planned tokens."""
        run_layers(self.weights, _InvariantOps(self, tokens), x_TD)

    def run_to_heads(self, x_TD: torch.Tensor, tokens: StepTokens) -> None:
        """`run` up to and including the last layer's attention, whose heads are left in the buffers."""
        attend_layers(self.weights, _InvariantOps(self, tokens), x_TD)

    def finish(self, x_SD: torch.Tensor, attended_SNH: torch.Tensor) -> torch.Tensor:
        """x_SD after the last layer, for any tokens, from the last attention's heads; in place."""
        last, family = len(self.weights.layers) - 1, self.weights.config.family
        finished: torch.Tensor = family.finish(_InvariantFinish(self), last, x_SD, attended_SNH)
        return finished

    def attend(self, layer: int, x_TD: torch.Tensor, qkv_TC: torch.Tensor, tokens: StepTokens) -> torch.Tensor:
        """Attention of one layer: out_TNH, in the buffers."""
        out_TNH = self.buffers.out_TNH[: len(x_TD)]
        self.attention.attend(layer, x_TD, qkv_TC, out_TNH, tokens)
        return out_TNH

    def _cut(self, name: str, num_tokens: int, matrix_OQ: torch.Tensor) -> OverlappingCut | None:
        """How the overlapping product of this many tokens with this matrix is cut; None if the device has none."""
        if not self._cuts:
            return None
        for size, cuts in self._cuts.items():
            if num_tokens <= size:
                cut: OverlappingCut | None = getattr(cuts, name)
                return cut
        return cut_of_many(len(matrix_OQ), matrix_OQ.shape[1], num_tokens)

    def multiply(self, y_TQ: torch.Tensor, matrix_OQ: torch.Tensor, out_TO: torch.Tensor, name: str) -> None:
        """out_TO = y_TQ @ matrix_OQ^T. name: of the matrix among the cuts."""
        cut = self._cut(name, len(y_TQ), matrix_OQ)
        if cut is None:
            invariant_product(y_TQ, matrix_OQ, out_TO, self.part)
        else:
            overlapping_product(y_TQ, matrix_OQ, out_TO, self._room, cut=cut, overlap=self.overlap)

    def add_product(self, y_TQ: torch.Tensor, matrix_OQ: torch.Tensor, out_TO: torch.Tensor, name: str) -> None:
        """out_TO += y_TQ @ matrix_OQ^T. name: of the matrix among the cuts."""
        cut = self._cut(name, len(y_TQ), matrix_OQ)
        if cut is None:
            invariant_add_product(y_TQ, matrix_OQ, out_TO, self.part)
        else:
            overlapping_add_product(out_TO, y_TQ, matrix_OQ, self._room, cut=cut, overlap=self.overlap)

    def activate(self, x_TD: torch.Tensor, gate_up_ED: torch.Tensor, act_TI: torch.Tensor) -> None:
        """Gate, up and their activation: in one kernel, or in several, depending on the device and the tokens."""
        num_tokens, eps = len(x_TD), self.weights.config.rms_norm_eps
        cut = self._cut("gate_up", num_tokens, gate_up_ED)
        if cut is None:
            gate_up_T2I = self.buffers.gate_up_T2I[:num_tokens]
            invariant_product(x_TD, gate_up_ED, gate_up_T2I, self.part)
            invariant_silu_mul(gate_up_T2I, x_TD, act_TI, eps)
            return
        scale_T = self.buffers.scale_T[:num_tokens] if num_tokens > max(OVERLAPPING_SIZES) else None
        if scale_T is not None and gate_up.TILES.fit(gate_up_ED):
            overlapping_scale(x_TD, scale_T, eps)
            tiles = gate_up.tiles_of(num_tokens, gate_up_ED)
            gate_up.gate_up_product(x_TD, gate_up_ED, scale_T, act_TI, tiles)
        else:
            overlapping_gate_up(
                x_TD, gate_up_ED, act_TI, eps, cut=replace(cut, turns=1), overlap=self.overlap, scale_T=scale_T
            )

    def head(self, x_TD: torch.Tensor, index_S: torch.Tensor, hidden_SD: torch.Tensor, part_SW: torch.Tensor) -> None:
        """Final norm and head of x_TD[index_S] (int32): writes this rank's columns to part_SW."""
        weights = self.weights
        rms_norm(x_TD, index_S, weights.norm_D, hidden_SD, weights.config.rms_norm_eps, overlap=self.overlap)
        self.project(hidden_SD, part_SW, self.overlap)

    def project(self, hidden_SD: torch.Tensor, part_SW: torch.Tensor, overlap: Overlap = Overlap.NONE) -> None:
        """The head alone, for any number of rows: writes this rank's columns to part_SW."""
        head_VD = self.weights.head_VD
        if self._has_head and len(hidden_SD):
            cut = head_cut(len(hidden_SD))
            overlapping_product(hidden_SD, head_VD, part_SW, None, cut=cut, overlap=overlap)
        else:
            invariant_product(hidden_SD, head_VD, part_SW, self.part)


class _InvariantFinish(SumsInPlace):
    """The operations after attention (`FinishOps`; a layer is given by its index), in the buffers of `layers`. Changes
    x in place."""

    def __init__(self, layers: InvariantLayers) -> None:
        self.layers, self.weights = layers, layers.weights

    def add_output(self, layer: int, x_TD: torch.Tensor, attended_TNH: torch.Tensor) -> torch.Tensor:
        """See FinishOps."""
        return self._put(x_TD, attended_TNH.flatten(1), self.weights.layers[layer].o_DA, "output")

    def activate(self, layer: int, x_TD: torch.Tensor) -> torch.Tensor:
        """See FinishOps."""
        act_TI = self.layers.buffers.act_TI[: len(x_TD)]
        self.layers.activate(x_TD, self.weights.layers[layer].gate_up_ED, act_TI)
        return act_TI

    def add_down(self, layer: int, x_TD: torch.Tensor, act_TI: torch.Tensor) -> torch.Tensor:
        """See FinishOps."""
        return self._put(x_TD, act_TI, self.weights.layers[layer].down_DI, "down")

    def _put(self, x_TD: torch.Tensor, y_TQ: torch.Tensor, matrix_DQ: torch.Tensor, name: str) -> torch.Tensor:
        put = self.layers.multiply if self.has_sums else self.layers.add_product
        put(y_TQ, matrix_DQ, x_TD, name)
        return x_TD


class _InvariantOps(_InvariantFinish):
    """All operations of a layer (`LayerOps`) for these tokens."""

    def __init__(self, layers: InvariantLayers, tokens: StepTokens) -> None:
        super().__init__(layers)
        self.tokens = tokens

    def multiply_qkv(self, layer: int, x_TD: torch.Tensor) -> torch.Tensor:
        """See LayerOps."""
        qkv_TC = self.layers.buffers.qkv_TC[: len(x_TD)]
        self.layers.multiply(x_TD, self.weights.layers[layer].qkv_CD, qkv_TC, "qkv")
        return qkv_TC

    def write_qkv(self, layer: int, x_TD: torch.Tensor, qkv_TC: torch.Tensor) -> torch.Tensor:
        """See LayerOps: passes qkv_TC on."""
        return qkv_TC

    def attend(self, layer: int, x_TD: torch.Tensor, qkv_TC: torch.Tensor) -> torch.Tensor:
        """See LayerOps."""
        return self.layers.attend(layer, x_TD, qkv_TC, self.tokens)
