"""One token for each of B rows, from the last token's embedding to the next token, entirely on the device.

Nothing here waits for the device, allocates, or depends on the rows' contents, so a CUDA graph of `run` can be replayed
step after step: the kernels read lengths, tables and tokens from the row state and advance it.

With several ranks, each has some columns of the logits and chooses among them; all ranks' columns are joined
(`join_logits`) only if sampling needs more than a temperature.

Legend: B sequences of the batch · R rows · N query heads · H head dim · D model dim · V rows of the embedding, W those
that this rank has.
"""

import torch

from octavo.model.attention.kv_pool import KvPool
from octavo.model.gpu.autotune import Autotuner, Overlapping, SmallBatch, SplitK, StepPath
from octavo.model.gpu.layers import LayerBuffers, Layers, PlainFinish, decode_args, embed_tokens, finish_of, run_layers
from octavo.model.gpu.overlapping_layers import OverlappingFinish, fits_overlapping, overlapping_room
from octavo.model.gpu.small_batch_layers import SmallBatchLayers
from octavo.model.gpu.split_k_layers import SplitKFinish, split_k_room
from octavo.model.gpu.state import RowState
from octavo.model.gpu.weights import GpuWeights, LayerWeights
from octavo.model.kernels.attention.decode import DecodeArgs, decode_attention, partial_buffers
from octavo.model.kernels.attention.decode_work import DecodeWork, WorkLimits, plan_work
from octavo.model.kernels.overlap import Overlap
from octavo.model.kernels.rows import rms_norm
from octavo.model.kernels.sampling.sample import SampleParts, VocabularyPart, sample_and_advance
from octavo.model.parallel import Ranks

RESULT_BYTES = 5
"""Per row: its token, and whether its logits were finite."""


class DecodeStep:
    """Static buffers for up to max_batch rows: set `rows_B`, call `run`, read `token_B` and `is_finite_B`.

    vocab_size: ids from here on are never sampled. logits_BV: see `join_logits`. rows_B: the caller's buffer; None:
    allocate one. result: the bytes of token_B, then of is_finite_B, for a caller that takes both at once. The pool's
    last block is scratch.
    """

    def __init__(
        self,
        weights: GpuWeights,
        state: RowState,
        kv: KvPool,
        *,
        max_batch: int,
        vocab_size: int,
        rows_B: torch.Tensor | None = None,
    ) -> None:
        config, device = weights.config, weights.embed_VD.device
        self.weights, self.state, self.kv = weights, state, kv
        self.buffers = LayerBuffers(weights, max_batch)
        scratch_B = torch.full((max_batch,), state.scratch_row, dtype=torch.int32, device=device)
        self.rows_B = scratch_B if rows_B is None else rows_B
        self.result = torch.zeros(max_batch * RESULT_BYTES, dtype=torch.uint8, device=device)
        self.token_B = self.result[: 4 * max_batch].view(torch.int32)
        self.is_finite_B = self.result[4 * max_batch :].view(torch.int8)
        self.hidden_BD = torch.empty(max_batch, config.hidden_size, dtype=weights.dtype, device=device)
        self.logits_BV = torch.empty(max_batch, config.vocab_size, dtype=weights.dtype, device=device)
        self.part_BW, self._parts = self._parts_of(weights.ranks, vocab_size)
        self._no_ids_B = torch.full((max_batch,), -1, dtype=torch.int32, device=device)
        self._index_B = torch.arange(max_batch, dtype=torch.int32, device=device)
        limits = WorkLimits.of(config.num_key_value_heads)
        self._work = DecodeWork.allocate(max_batch, config.num_key_value_heads, device, limits)
        self._partials = partial_buffers(max_batch, config.num_attention_heads, config.head_dim, device, limits)
        self._small_batch = SmallBatchLayers(weights, state, kv, max_batch=max_batch)
        self._finish, self._room = finish_of(weights, self.buffers), split_k_room(config, device)
        fits = fits_overlapping(config, weights.embed_VD)
        self._overlapping_room = overlapping_room(config, device) if fits else None
        is_plain = weights.has_plain_products
        self.autotuner = (
            Autotuner.find(config, weights.embed_VD, weights.ranks) if is_plain else Autotuner.cublas_only()
        )

    def _parts_of(self, ranks: Ranks, vocab_size: int) -> tuple[torch.Tensor, SampleParts]:
        """Memory for this rank's logits, and what sampling from them needs."""
        logits_BV, width = self.logits_BV, len(self.weights.head_VD)
        (B, _), device = logits_BV.shape, logits_BV.device
        if ranks.size == 1:
            return logits_BV, SampleParts(B, vocab_size, device)
        of_ranks = VocabularyPart(
            first=ranks.rank * width, num_ranks=ranks.size, gather=lambda mine, all_: ranks.concatenate(mine, out=all_)
        )
        candidate_B = ranks.room_of_columns((B, 1), torch.int64, device)[:, 0]
        parts = SampleParts(B, vocab_size, device, num_columns=width, of_ranks=of_ranks, candidate_B=candidate_B)
        return ranks.room_of_columns((B, width), logits_BV.dtype, device), parts

    def run(self, batch_size: int) -> None:
        """A whole step for rows_B[:batch_size]; pad with the scratch row."""
        rows_B, x_BD = self.rows_B[:batch_size], self.buffers.x_TD[:batch_size]
        path = self.autotuner.path(batch_size)
        if isinstance(path, SmallBatch):
            self._embed(rows_B, x_BD)
            run_layers(self.weights, self._small_batch.ops(rows_B, path.cuts), x_BD)
            index_B, part_BW = self._index_B[:batch_size], self.part_BW[:batch_size]
            self._small_batch.head(x_BD, index_B, part_BW, path.cuts)
        else:
            self._run_planned(path, rows_B, x_BD)
        self._choose_tokens(rows_B)

    def _embed(self, rows_B: torch.Tensor, x_BD: torch.Tensor) -> None:
        # Launched normally, so it starts after all earlier work: the overlapping kernels rely on this.
        embed_tokens(self.weights, self._no_ids_B[: len(rows_B)], rows_B, self.state.last_token_R, x_BD)

    def _run_planned(self, path: StepPath, rows_B: torch.Tensor, x_BD: torch.Tensor) -> None:
        finish, overlap = self.products(path, self.buffers, plain=self._finish)
        args = self.plan(rows_B, overlap)
        self._embed(rows_B, x_BD)

        def attend(
            index: int, layer: LayerWeights, qkv_BC: torch.Tensor, x_BD: torch.Tensor, out_BNH: torch.Tensor
        ) -> None:
            self.attend(index, layer, qkv_BC, x_BD, out_BNH, args)

        run_layers(self.weights, Layers(finish, attend), x_BD)
        self.compute_logits(x_BD, self._index_B[: len(rows_B)])

    def products(self, path: StepPath, buffers: LayerBuffers, *, plain: PlainFinish) -> tuple[PlainFinish, Overlap]:
        """The operations after attention on this path, in these buffers, and whether their neighbours overlap with
        them. plain: with the library's products, for paths that have none of their own here, such as SmallBatch."""
        match path:
            case SplitK(cuts=cuts):
                return SplitKFinish(self.weights, buffers, self._room, cuts), Overlap.NONE
            case Overlapping(cuts=cuts):
                finish = OverlappingFinish(self.weights, buffers, self._overlapping_room, cuts)
                return finish, Overlap.DEPENDENT
        return plain, Overlap.NONE

    def plan(self, rows_B: torch.Tensor, overlap: Overlap = Overlap.NONE) -> DecodeArgs:
        """Divide the attention of these rows (int32, at most max_batch) among programs; all layers use the result."""
        plan_work(rows_B, self.state.position_R, self._work)
        return decode_args(self.weights, self.state, rows_B, self._work, self._partials, overlap)

    def attend(
        self,
        index: int,
        layer: LayerWeights,
        qkv_BC: torch.Tensor,
        x_BD: torch.Tensor,
        out_BNH: torch.Tensor,
        args: DecodeArgs,
    ) -> None:
        """Attention of one layer for the planned rows."""
        pools = self.kv.k_pools[index], self.kv.v_pools[index]
        decode_attention(qkv_BC, x_BD, layer.qkv_bias_C, *pools, out_BNH, args, layer.qk_norm_2H)

    def sample(self, x_BD: torch.Tensor, rows_B: torch.Tensor) -> None:
        """Final norm and head of x_BD, then a token for each of rows_B, which are advanced."""
        self.compute_logits(x_BD, self._index_B[: len(rows_B)])
        self._choose_tokens(rows_B)

    def _choose_tokens(self, rows_B: torch.Tensor) -> None:
        B, state = len(rows_B), self.state
        sample_and_advance(
            self.part_BW[:B], rows_B, state.temperature_R, state.seed_R, state.num_prompt_R, state.last_token_R,
            state.position_R, self.token_B[:B], self.is_finite_B[:B], self._parts,
        )  # fmt: skip

    def project(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Logits [S, V] of hidden states after the final norm, in new memory."""
        logits_SW, ranks = hidden_SD @ self.weights.head_VD.T, self.weights.ranks
        return logits_SW if ranks.size == 1 else ranks.concatenate(logits_SW)

    def compute_logits(self, x_TD: torch.Tensor, index_B: torch.Tensor) -> torch.Tensor:
        """Final norm and head of x_TD[index_B] (int32). Returns this rank's logits, which are in `part_BW`."""
        B = len(index_B)
        hidden_BD, part_BW = self.hidden_BD[:B], self.part_BW[:B]
        rms_norm(x_TD, index_B, self.weights.norm_D, hidden_BD, self.weights.config.rms_norm_eps)
        return torch.mm(hidden_BD, self.weights.head_VD.T, out=part_BW)

    def join_logits(self, num_rows: int) -> torch.Tensor:
        """All ranks' logits for the first rows of the last step, in `logits_BV`. With one rank they are already
        there."""
        logits_BV = self.logits_BV[:num_rows]
        ranks = self.weights.ranks
        return logits_BV if ranks.size == 1 else ranks.concatenate(self.part_BW[:num_rows], out=logits_BV)
