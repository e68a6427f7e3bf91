"""Attention of a step in deterministic mode: by the plain kernel, or by the kernels for Hopper GPUs.

With both, a token's bits depend on its own sequence and position only, but the two give different bits: a worker uses
one of them for all its steps.

Legend: T tokens, decodes first · B decodes · N query heads · H head dim · D model dim · C columns of QKV · W tiles.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from octavo.model.attention.kv_pool import KvPool
from octavo.model.gpu.layers import decode_args
from octavo.model.gpu.state import RowState
from octavo.model.gpu.weights import GpuWeights
from octavo.model.kernels.attention import invariant_hopper
from octavo.model.kernels.attention.decode import partial_buffers
from octavo.model.kernels.attention.decode_work import DecodeWork, plan_work
from octavo.model.kernels.attention.invariant import AttentionParts, invariant_attention, tile_tokens
from octavo.model.kernels.attention.invariant_work import InvariantWork, plan_invariant_work
from octavo.model.kernels.attention.prefill import QUERY_TILE
from octavo.model.kernels.attention.rope_write import rope_write
from octavo.model.kernels.overlap import Overlap


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepTokens:
    """The tokens of a step, all int32. row_T: every token's row. position_T: of tokens after the decodes, whose
    positions are in the state. tiles_W4, last_tiles_W4: of the chunks, as in MixedInputs; a kernel whose work is
    divided once for all layers takes the former in the last layer, too."""

    row_T: torch.Tensor
    position_T: torch.Tensor
    tiles_W4: torch.Tensor
    last_tiles_W4: torch.Tensor
    num_decodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MostTokens:
    """The most that a step may have: tokens, decodes among them, and chunks of prompts."""

    tokens: int
    decodes: int
    chunks: int


class StepAttention(Protocol):
    """From the raw QKV product to the heads, one layer after another."""

    def plan(self, tokens: StepTokens) -> None:
        """Called once per step, before its embedding."""

    def attend(
        self, layer: int, x_TD: torch.Tensor, qkv_TC: torch.Tensor, out_TNH: torch.Tensor, tokens: StepTokens
    ) -> None:
        """Write the caches and fill out_TNH."""


class HopperAttention:
    """Prompts by warp groups, decodes by the ring. beside: another step's attention, whose buffers are shared."""

    def __init__(
        self,
        weights: GpuWeights,
        state: RowState,
        kv: KvPool,
        most: MostTokens,
        overlap: Overlap,
        beside: "HopperAttention | None" = None,
    ) -> None:
        config, device = weights.config, weights.embed_VD.device
        self.weights, self.state, self.kv, self.overlap = weights, state, kv, overlap
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        limits = invariant_hopper.chunks_of(num_kv_heads, state.table_RM.shape[1] * kv.block_size)
        self._work = DecodeWork.allocate(most.decodes, num_kv_heads, device, limits)
        self._partials: tuple[torch.Tensor, torch.Tensor] = (
            partial_buffers(most.decodes, num_heads, config.head_dim, device, limits)
            if beside is None
            else beside._partials
        )
        num_queries = most.tokens if most.chunks else 0
        self._q_TNH = torch.empty(num_queries, num_heads, config.head_dim, dtype=weights.dtype, device=device)

    @staticmethod
    def fits(weights: GpuWeights, kv: KvPool) -> bool:
        """Whether these kernels should be used."""
        config = weights.config
        q_TNH = weights.embed_VD.new_empty(1, config.num_attention_heads, config.head_dim)
        return invariant_hopper.fits(q_TNH, kv.k_pools[0])

    def plan(self, tokens: StepTokens) -> None:
        """See StepAttention."""
        if tokens.num_decodes:
            plan_work(tokens.row_T[: tokens.num_decodes], self.state.position_R, self._work)

    def attend(
        self, layer: int, x_TD: torch.Tensor, qkv_TC: torch.Tensor, out_TNH: torch.Tensor, tokens: StepTokens
    ) -> None:
        """See StepAttention."""
        B, weights, matrices = tokens.num_decodes, self.weights, self.weights.layers[layer]
        pools = self.kv.k_pools[layer], self.kv.v_pools[layer]
        table_RM, eps, scale = self.state.table_RM, weights.config.rms_norm_eps, weights.config.scale
        if len(x_TD) > B:
            q_TNH = self._q_TNH[: len(x_TD)]
            invariant_hopper.write_heads(
                qkv_TC[B:], x_TD[B:], matrices.qkv_bias_C, q_TNH[B:], *pools, tokens.row_T[B:], tokens.position_T[B:],
                table_RM, weights.cos_LH, weights.sin_LH, eps, matrices.qk_norm_2H,
            )  # fmt: skip
            tiles_W4 = tokens.tiles_W4 if layer < len(weights.layers) - 1 else tokens.last_tiles_W4
            invariant_hopper.attend_prompts(q_TNH, *pools, out_TNH, table_RM, tiles_W4, scale)
        if B:
            # With chunks, the kernel before this one does not signal when this one may start.
            overlap = self.overlap if len(x_TD) == B else Overlap.NONE
            args = decode_args(weights, self.state, tokens.row_T[:B], self._work, self._partials, overlap)
            invariant_hopper.attend_decodes(
                qkv_TC[:B], x_TD[:B], matrices.qkv_bias_C, *pools, out_TNH[:B], args, matrices.qk_norm_2H
            )


class PlainAttention:
    """One kernel for prompts and decodes. beside: another step's attention, whose buffers are shared."""

    def __init__(
        self,
        weights: GpuWeights,
        state: RowState,
        kv: KvPool,
        most: MostTokens,
        overlap: Overlap,
        beside: "PlainAttention | None" = None,
    ) -> None:
        config, device = weights.config, weights.embed_VD.device
        self.weights, self.state, self.kv, self.overlap = weights, state, kv, overlap
        heads = config.num_attention_heads
        self._q_TNH = torch.empty(most.tokens, heads, config.head_dim, dtype=weights.dtype, device=device)
        self._place_T = torch.zeros(most.tokens, dtype=torch.int32, device=device)
        self._work = InvariantWork.allocate(
            max_decodes=most.decodes,
            max_tiles=most.tokens // QUERY_TILE + most.chunks if most.chunks else 0,
            max_context=state.table_RM.shape[1] * kv.block_size,
            tile_tokens=tile_tokens(heads, config.num_key_value_heads),
            device=device,
        )
        self._parts: AttentionParts = (
            AttentionParts.allocate(most.decodes, self._work.max_chunks, heads, config.head_dim, device)
            if beside is None
            else beside._parts
        )

    def plan(self, tokens: StepTokens) -> None:
        """See StepAttention."""
        B, T = tokens.num_decodes, len(tokens.row_T)
        if B:
            torch.index_select(self.state.position_R, 0, tokens.row_T[:B], out=self._place_T[:B])
        if B < T:
            self._place_T[B:T].copy_(tokens.position_T[B:T])
        plan_invariant_work(tokens.row_T[:B], self.state.position_R, tokens.tiles_W4, self._work)

    def attend(
        self, layer: int, x_TD: torch.Tensor, qkv_TC: torch.Tensor, out_TNH: torch.Tensor, tokens: StepTokens
    ) -> None:
        """See StepAttention."""
        weights, matrices, T = self.weights, self.weights.layers[layer], len(x_TD)
        pools, table_RM, q_TNH = (self.kv.k_pools[layer], self.kv.v_pools[layer]), self.state.table_RM, self._q_TNH[:T]
        rope_write(
            qkv_TC, x_TD, matrices.qkv_bias_C, q_TNH, *pools, tokens.row_T, self._place_T[:T], table_RM,
            weights.cos_LH, weights.sin_LH, weights.config.rms_norm_eps, matrices.qk_norm_2H, overlap=self.overlap,
        )  # fmt: skip
        invariant_attention(
            q_TNH, *pools, out_TNH, table_RM, self._work, self._parts, weights.config.scale,
            num_decodes=tokens.num_decodes, overlap=self.overlap,
        )  # fmt: skip


def attention_of(
    weights: GpuWeights,
    state: RowState,
    kv: KvPool,
    most: MostTokens,
    overlap: Overlap,
    beside: StepAttention | None = None,
) -> StepAttention:
    """The attention that this worker uses. beside: another step's, whose buffers are shared."""
    if HopperAttention.fits(weights, kv):
        assert beside is None or isinstance(beside, HopperAttention)
        return HopperAttention(weights, state, kv, most, overlap, beside)
    assert beside is None or isinstance(beside, PlainAttention)
    return PlainAttention(weights, state, kv, most, overlap, beside)
