"""A step of decodes and prompt chunks together: decode rows first, then the chunks' tokens.

    tokens    |-- one per decode row --|--- chunk of one prompt ---|--- chunk of another ---| ...
    rows      state's last tokens       ids from the host

Decode rows go through the decode kernel (position and last token come from the state), chunks through the prefill
kernels. Rows whose prompt ends in this step get their position here, and their first token is sampled with the decodes.
A step of few tokens uses the products of a decode step of that many rows: products do not depend on the row state.

Legend: T tokens · B decode rows · S sampled rows · N query heads · H head dim · W tiles of chunk attention · D model
dim · C columns of QKV · R rows of the state · E rows whose prompt ends.
"""

from dataclasses import dataclass

import torch

from octavo.model.gpu.decode_step import DecodeStep
from octavo.model.gpu.layers import LayerBuffers, Layers, PlainFinish, attend_layers, embed_tokens, finish_of
from octavo.model.gpu.weights import GpuWeights, LayerWeights
from octavo.model.kernels.attention.prefill import prefill_attention
from octavo.model.kernels.attention.rope_write import rope_write
from octavo.model.kernels.attention.widened import MOST_TILES, WideContext, plan_wide, widen
from octavo.model.kernels.overlap import Overlap
from octavo.model.kernels.rows import rms_norm

CONTEXT_OF_TOKENS = 4
"""Tokens of context that fit into `WideContext`, per token of the step, if the cache is e4m3."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MixedInputs:
    """All int32 on the device. num_decodes: B, the number of decode tokens, which come first.

    ids_T: -1 for decodes. row_T: every token's row. position_T: of chunk tokens (decodes' entries are not read).
    tiles_W4: of the chunks (model/kernels/attention/prefill.py). last_tiles_W4: those of the last layer, where only
    tokens that are read need attention. last_S: index of each sampled row's token.
    rows_S: the sampled rows, decodes first. ended_E, position_E: rows whose prompt ends here, their last position.
    """

    num_decodes: int
    ids_T: torch.Tensor
    row_T: torch.Tensor
    position_T: torch.Tensor
    tiles_W4: torch.Tensor
    last_tiles_W4: torch.Tensor
    last_S: torch.Tensor
    rows_S: torch.Tensor
    ended_E: torch.Tensor
    position_E: torch.Tensor


class MixedStep:
    """Shares weights, state, cache and sampler with the decode step; has its own buffers for max_tokens tokens."""

    def __init__(self, decode: DecodeStep, *, max_tokens: int) -> None:
        config, weights = decode.weights.config, decode.weights
        self._decode = decode
        stream_shape, device = (max_tokens, config.hidden_size), weights.embed_VD.device
        self._buffers = LayerBuffers(weights, max_tokens, weights.ranks.stream(stream_shape, weights.dtype, device))
        self._finish = finish_of(weights, self._buffers)
        shape = (max_tokens, config.num_attention_heads, config.head_dim)
        self._q_TNH = torch.empty(shape, dtype=weights.dtype, device=device)
        pool, room = decode.kv.k_pools[0], CONTEXT_OF_TOKENS * max_tokens
        is_small = pool.dtype != weights.dtype
        self._wide = WideContext.allocate(pool, num_tokens=room, dtype=weights.dtype) if is_small else None

    @property
    def weights(self) -> GpuWeights:
        """The decode step's weights."""
        return self._decode.weights

    def run(self, inputs: MixedInputs) -> None:
        """Run a whole step. The result for rows_S is in token_B and is_finite_B of the decode step."""
        self.forward(inputs)
        self.end_chunks(inputs)
        if len(inputs.rows_S):
            self._decode.sample(self.finish(inputs.last_S), inputs.rows_S)

    def hidden(self, tokens: slice) -> torch.Tensor:
        """Hidden states after the final norm, [tokens, D], of these tokens of the last step, whose last_tiles_W4 had
        them."""
        device, weights = self._buffers.x_TD.device, self.weights
        index_S = torch.arange(tokens.start, tokens.stop, dtype=torch.int32, device=device)
        x_SD = self.finish(index_S)
        hidden_SD = torch.empty_like(x_SD)
        rms_norm(x_SD, index_S - tokens.start, weights.norm_D, hidden_SD, weights.config.rms_norm_eps)
        return hidden_SD

    def finish(self, index_S: torch.Tensor) -> torch.Tensor:
        """The residual stream x_SD after the last layer, for some tokens (int32) of the last step. The other tokens of
        a prompt are not needed there, so everything after the last attention is computed for these alone."""
        x_SD = self._buffers.x_TD.index_select(0, index_S)
        out_SNH = self._buffers.out_TNH.index_select(0, index_S)
        finish, _ = self._products(x_SD)
        finished: torch.Tensor = self.weights.config.family.finish(finish, len(self.weights.layers) - 1, x_SD, out_SNH)
        return finished

    def _products(self, x_TD: torch.Tensor) -> tuple[PlainFinish, Overlap]:
        """See DecodeStep.products. A stream that is summed by shares uses the library's, which write to the memory that
        is summed."""
        if self.weights.ranks.shares(x_TD) is not None:
            return self._finish, Overlap.NONE
        path = self._decode.autotuner.path(len(x_TD))
        return self._decode.products(path, self._buffers, plain=self._finish)

    def end_chunks(self, inputs: MixedInputs) -> None:
        """Set the position of rows whose prompt is complete to its last token."""
        self._decode.state.position_R[inputs.ended_E.long()] = inputs.position_E

    def forward(self, inputs: MixedInputs) -> None:
        """Run every layer over all tokens, up to and including the last one's attention, which only the tokens of
        last_tiles_W4 get."""
        T, B, state = len(inputs.ids_T), inputs.num_decodes, self._decode.state
        x_TD = self._buffers.x_TD[:T]
        finish, overlap = self._products(x_TD)
        embed_tokens(self.weights, inputs.ids_T, inputs.row_T, state.last_token_R, x_TD)
        args = self._decode.plan(inputs.row_T[:B], overlap) if B else None
        wide = self._wide if len(inputs.tiles_W4) <= MOST_TILES else None
        if wide is not None:
            plan_wide(inputs.tiles_W4, self._table, wide)

        def attend(
            index: int, layer: LayerWeights, qkv_TC: torch.Tensor, x_TD: torch.Tensor, out_TNH: torch.Tensor
        ) -> None:
            if args is not None:
                self._decode.attend(index, layer, qkv_TC[:B], x_TD[:B], out_TNH[:B], args)
            if B < T:
                self._attend_chunks(index, layer, qkv_TC, x_TD, out_TNH, inputs, wide, overlap)

        attend_layers(self.weights, Layers(finish, attend), x_TD)

    def _attend_chunks(
        self,
        index: int,
        layer: LayerWeights,
        qkv_TC: torch.Tensor,
        x_TD: torch.Tensor,
        out_TNH: torch.Tensor,
        inputs: MixedInputs,
        wide: WideContext | None,
        overlap: Overlap,
    ) -> None:
        T, B, config, weights = len(qkv_TC), inputs.num_decodes, self.weights.config, self.weights
        k_pool, v_pool, table_RM = self._decode.kv.k_pools[index], self._decode.kv.v_pools[index], self._table
        q_TNH = self._q_TNH[:T]
        rope_write(
            qkv_TC[B:], x_TD[B:], layer.qkv_bias_C, q_TNH[B:], k_pool, v_pool, inputs.row_T[B:], inputs.position_T[B:],
            table_RM, weights.cos_LH, weights.sin_LH, config.rms_norm_eps, layer.qk_norm_2H, overlap=overlap,
        )  # fmt: skip
        if wide is None:
            tiles_W4 = inputs.tiles_W4 if index < len(weights.layers) - 1 else inputs.last_tiles_W4
            prefill_attention(q_TNH, k_pool, v_pool, out_TNH, table_RM, tiles_W4, config.scale, overlap=overlap)
            return
        widen(k_pool, v_pool, wide)
        wide_W4, left_W4 = wide.tiles(len(inputs.tiles_W4))
        prefill_attention(q_TNH, wide.k_XKSH, wide.v_XKSH, out_TNH, wide.table_X1, wide_W4, config.scale)
        prefill_attention(q_TNH, k_pool, v_pool, out_TNH, table_RM, left_W4, config.scale)

    @property
    def _table(self) -> torch.Tensor:
        return self._decode.state.table_RM
