"""The decoder layers of a step in deterministic mode: every token goes through the same kernels, which give it the same
bits whatever else is in the batch (docs/decisions/0006-deterministic-mode.md).

Decoded tokens and prompts' tokens differ in nothing but how their attention is listed. The slow references are those of
model/gpu/layers.py.

Legend: T tokens, decodes first · B decodes · S sampled tokens · N query heads · H head dim · D model dim · W tiles.
"""

from dataclasses import dataclass

import torch

from octavo.model.attention.kv_pool import KvPool
from octavo.model.gpu.layers import LayerBuffers, SumsInPlace, run_layers
from octavo.model.gpu.overlapping_layers import (
    GATE_UP_OF_MANY,
    OVERLAPPING_SIZES,
    OverlappingCuts,
    all_cuts_of,
    fits_overlapping,
    overlapping_room,
)
from octavo.model.gpu.state import RowState
from octavo.model.gpu.weights import GpuWeights
from octavo.model.kernels.attention.invariant import AttentionParts, invariant_attention, tile_tokens
from octavo.model.kernels.attention.invariant_work import InvariantWork, plan_invariant_work
from octavo.model.kernels.attention.prefill import QUERY_TILE
from octavo.model.kernels.attention.rope_write import rope_write
from octavo.model.kernels.overlap import Overlap
from octavo.model.kernels.products.activation import invariant_silu_mul
from octavo.model.kernels.products.invariant import MANY_TOKENS, invariant_add_product, invariant_product, part_elements
from octavo.model.kernels.products.overlapping import (
    overlapping_add_product,
    overlapping_gate_up,
    overlapping_product,
)
from octavo.model.kernels.rows import rms_norm


class InvariantLayers:
    """For up to max_tokens tokens of which up to max_decodes are decodes, and max_chunks chunks of prompts.

    parts: what another step's attention has, to be shared; only one of the two runs at a time.
    """

    def __init__(
        self,
        weights: GpuWeights,
        state: RowState,
        kv: KvPool,
        buffers: LayerBuffers,
        *,
        max_tokens: int,
        max_decodes: int,
        max_chunks: int,
        parts: AttentionParts | None = None,
    ) -> None:
        config, device = weights.config, weights.embed_VD.device
        self.weights, self.state, self.kv, self.buffers = weights, state, kv, buffers
        heads = config.num_attention_heads
        self.q_TNH = torch.empty(max_tokens, heads, config.head_dim, dtype=weights.dtype, device=device)
        self._position_T = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        matrices = [config.vocab_size, config.hidden_size]
        for layer in weights.layers[:1]:
            shapes = [
                (len(each), each.shape[1]) for each in (layer.qkv_CD, layer.o_DA, layer.gate_up_ED, layer.down_DI)
            ]
        room = max(part_elements(max(max_tokens, MANY_TOKENS), *shape) for shape in [*shapes, tuple(matrices)])
        self.part = torch.empty(max(room, 1), dtype=torch.float32, device=device)
        self.overlap, self._room = Overlap.NONE, None
        self._cuts, self._cuts_of_many = dict[int, OverlappingCuts](), OverlappingCuts()
        if fits_overlapping(config, weights.embed_VD):
            self.overlap = Overlap.DEPENDENT
            self._cuts = {size: all_cuts_of(config, size) for size in OVERLAPPING_SIZES}
            self._cuts_of_many = OverlappingCuts(gate_up=GATE_UP_OF_MANY)
            self._room = overlapping_room(config, device)
        self.work = InvariantWork.allocate(
            max_decodes=max_decodes,
            max_tiles=max_tokens // QUERY_TILE + max_chunks if max_chunks else 0,
            max_context=state.table_RM.shape[1] * kv.block_size,
            tile_tokens=tile_tokens(heads, config.num_key_value_heads),
            device=device,
        )
        self.parts = parts or AttentionParts.allocate(max_decodes, self.work.max_chunks, heads, config.head_dim, device)

    def run(
        self,
        x_TD: torch.Tensor,
        row_T: torch.Tensor,
        position_T: torch.Tensor,
        tiles_W4: torch.Tensor,
        num_decodes: int,
    ) -> None:
        """Take x_TD, a view of the buffers', through every layer, in place, writing the caches of row_T.

        All int32. position_T: of all tokens, read behind the decodes (they stand where the state says). tiles_W4: of
        the chunks (model/kernels/attention/prefill.py).
        """
        B, T, state = num_decodes, len(x_TD), self.state
        places_T = self._position_T[:T]
        if B:
            torch.index_select(state.position_R, 0, row_T[:B], out=places_T[:B])
        if B < T:
            places_T[B:].copy_(position_T[B:T])
        plan_invariant_work(row_T[:B], state.position_R, tiles_W4, self.work)
        run_layers(self.weights, _InvariantOps(self, row_T, places_T, B), x_TD)

    def cuts(self, num_tokens: int) -> OverlappingCuts:
        """How overlapping products of so many tokens are cut: none of them on other devices, few of them for so many
        tokens that others are faster, whose bits are the same."""
        return next((cuts for size, cuts in self._cuts.items() if num_tokens <= size), self._cuts_of_many)

    def multiply(self, y_TQ: torch.Tensor, matrix_OQ: torch.Tensor, out_TO: torch.Tensor, name: str) -> None:
        """out_TO = y_TQ @ matrix_OQ^T. name: of the matrix among the cuts."""
        cut = getattr(self.cuts(len(y_TQ)), name)
        if cut is None:
            invariant_product(y_TQ, matrix_OQ, out_TO, self.part)
        else:
            overlapping_product(y_TQ, matrix_OQ, out_TO, self._room, cut=cut, overlap=self.overlap)

    def add_product(self, y_TQ: torch.Tensor, matrix_OQ: torch.Tensor, out_TO: torch.Tensor, name: str) -> None:
        """out_TO += y_TQ @ matrix_OQ^T. name: of the matrix among the cuts."""
        cut = getattr(self.cuts(len(y_TQ)), name)
        if cut is None:
            invariant_add_product(y_TQ, matrix_OQ, out_TO, self.part)
        else:
            overlapping_add_product(out_TO, y_TQ, matrix_OQ, self._room, cut=cut, overlap=self.overlap)

    def activate(self, x_TD: torch.Tensor, gate_up_ED: torch.Tensor, act_TI: torch.Tensor) -> None:
        """Gate, up and their activation: in one kernel for any number of tokens, or in two."""
        cut, eps = self.cuts(len(x_TD)).gate_up, self.weights.config.rms_norm_eps
        if cut is None:
            gate_up_T2I = self.buffers.gate_up_T2I[: len(x_TD)]
            invariant_product(x_TD, gate_up_ED, gate_up_T2I, self.part)
            invariant_silu_mul(gate_up_T2I, x_TD, act_TI, eps)
        else:
            overlapping_gate_up(x_TD, gate_up_ED, act_TI, eps, cut=cut, overlap=self.overlap)

    def head(self, x_TD: torch.Tensor, index_S: torch.Tensor, hidden_SD: torch.Tensor, logits_SV: torch.Tensor) -> None:
        """Final norm and head of x_TD[index_S] (int32)."""
        weights = self.weights
        rms_norm(x_TD, index_S, weights.norm_D, hidden_SD, weights.config.rms_norm_eps)
        self.project(hidden_SD, logits_SV)

    def project(self, hidden_SD: torch.Tensor, logits_SV: torch.Tensor) -> None:
        """The head alone, of any number of rows; all ranks' columns."""
        ranks, head_VD = self.weights.ranks, self.weights.head_VD
        part_SW = logits_SV if ranks.size == 1 else logits_SV.new_empty(len(logits_SV), len(head_VD))
        invariant_product(hidden_SD, head_VD, part_SW, self.part)
        if ranks.size > 1:
            logits_SV.copy_(ranks.concatenate(part_SW))


@dataclass(frozen=True, slots=True, eq=False)
class _InvariantOps(SumsInPlace):
    """The operations of a layer (`LayerOps`; a layer is its index) over the buffers of `layers`; x is changed in
    place."""

    layers: InvariantLayers
    row_T: torch.Tensor
    place_T: torch.Tensor
    num_decodes: int

    @property
    def weights(self) -> GpuWeights:  # type: ignore[override]
        """Of the layers."""
        return self.layers.weights

    def multiply_qkv(self, layer: int, x_TD: torch.Tensor) -> torch.Tensor:
        """See LayerOps."""
        qkv_TC = self.layers.buffers.qkv_TC[: len(x_TD)]
        self.layers.multiply(x_TD, self.weights.layers[layer].qkv_CD, qkv_TC, "qkv")
        return qkv_TC

    def write_qkv(self, layer: int, x_TD: torch.Tensor, qkv_TC: torch.Tensor) -> torch.Tensor:
        """See LayerOps."""
        own, weights, matrices = self.layers, self.weights, self.weights.layers[layer]
        q_TNH = own.q_TNH[: len(x_TD)]
        rope_write(
            qkv_TC, x_TD, matrices.qkv_bias_C, q_TNH, own.kv.k_pools[layer], own.kv.v_pools[layer], self.row_T,
            self.place_T, own.state.table_RM, weights.cos_LH, weights.sin_LH, weights.config.rms_norm_eps,
            matrices.qk_norm_2H, overlap=own.overlap,
        )  # fmt: skip
        return q_TNH

    def attend(self, layer: int, x_TD: torch.Tensor, q_TNH: torch.Tensor) -> torch.Tensor:
        """See LayerOps."""
        own, out_TNH = self.layers, self.layers.buffers.out_TNH[: len(x_TD)]
        invariant_attention(
            q_TNH, own.kv.k_pools[layer], own.kv.v_pools[layer], out_TNH, own.state.table_RM, own.work, own.parts,
            self.weights.config.scale, num_decodes=self.num_decodes, overlap=own.overlap,
        )  # fmt: skip
        return out_TNH

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
