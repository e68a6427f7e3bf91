"""The decode step and the mixed step in deterministic mode: same state, cache and sampler, different layers
(model/gpu/invariant_layers.py).

Legend: B sequences of the batch · T tokens · D model dim.
"""

from dataclasses import replace

import torch

from octavo.model.attention.kv_pool import KvPool
from octavo.model.gpu.autotune import Autotuner
from octavo.model.gpu.decode_step import DecodeStep
from octavo.model.gpu.invariant_attention import MostTokens, StepTokens
from octavo.model.gpu.invariant_layers import InvariantLayers
from octavo.model.gpu.layers import embed_tokens
from octavo.model.gpu.mixed_step import MixedInputs, MixedStep
from octavo.model.gpu.state import RowState
from octavo.model.gpu.weights import GpuWeights
from octavo.model.invariant import InvarianceUnavailable
from octavo.model.parallel import Sums


class InvariantDecodeStep(DecodeStep):
    """See DecodeStep. There is one path, whatever the batch size. Raises InvarianceUnavailable for quantised weights
    and for addends."""

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
        if weights.is_quantized:
            raise InvarianceUnavailable("deterministic mode has no products for weights of fewer bits on a GPU")
        if weights.addends is not None:
            raise InvarianceUnavailable("deterministic mode adds nothing to products on a GPU")
        ranks = replace(weights.ranks, sums=Sums.BY_RANK, peers=None)
        weights = replace(weights, ranks=ranks if ranks.size > 1 else weights.ranks)
        super().__init__(weights, state, kv, max_batch=max_batch, vocab_size=vocab_size, rows_B=rows_B)
        self.autotuner = Autotuner.cublas_only()  # nothing to choose, nothing to measure
        device = weights.embed_VD.device
        most = MostTokens(tokens=max_batch, decodes=max_batch, chunks=0)
        self.layers = InvariantLayers(weights, state, kv, self.buffers, most)
        self._none_B = torch.full((max_batch,), -1, dtype=torch.int32, device=device)
        self._no_tiles = torch.zeros(0, 4, dtype=torch.int32, device=device)

    def run(self, batch_size: int) -> None:
        """See DecodeStep.run."""
        rows_B, x_BD = self.rows_B[:batch_size], self.buffers.x_TD[:batch_size]
        none = self._no_tiles
        tokens = StepTokens(row_T=rows_B, position_T=rows_B, tiles_W4=none, last_tiles_W4=none, num_decodes=batch_size)
        self.layers.plan(tokens)
        embed_tokens(self.weights, self._none_B[:batch_size], rows_B, self.state.last_token_R, x_BD)
        self.layers.run(x_BD, tokens)
        self.sample(x_BD, rows_B)

    def project(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """See DecodeStep.project."""
        part_SW, ranks = hidden_SD.new_empty(len(hidden_SD), len(self.weights.head_VD)), self.weights.ranks
        self.layers.project(hidden_SD, part_SW)
        return part_SW if ranks.size == 1 else ranks.concatenate(part_SW)

    def compute_logits(self, x_TD: torch.Tensor, index_B: torch.Tensor) -> torch.Tensor:
        """See DecodeStep.compute_logits."""
        B = len(index_B)
        part_BW = self.part_BW[:B]
        self.layers.head(x_TD, index_B, self.hidden_BD[:B], part_BW)
        return part_BW


class InvariantMixedStep(MixedStep):
    """See MixedStep. Decodes and chunks go through the same kernels."""

    def __init__(self, decode: InvariantDecodeStep, *, max_tokens: int) -> None:
        super().__init__(decode, max_tokens=max_tokens)
        num_rows = len(decode.state.position_R)
        self._state = decode.state
        most = MostTokens(
            tokens=max_tokens,
            decodes=max(num_rows, len(decode.rows_B)),
            chunks=max(num_rows, len(decode.token_B)),
        )
        self._layers = InvariantLayers(
            decode.weights, decode.state, decode.kv, self._buffers, most, beside=decode.layers
        )

    def forward(self, inputs: MixedInputs) -> None:
        """See MixedStep.forward."""
        x_TD = self._buffers.x_TD[: len(inputs.ids_T)]
        tokens = StepTokens(
            row_T=inputs.row_T, position_T=inputs.position_T, tiles_W4=inputs.tiles_W4,
            last_tiles_W4=inputs.last_tiles_W4, num_decodes=inputs.num_decodes,
        )  # fmt: skip
        self._layers.plan(tokens)
        embed_tokens(self.weights, inputs.ids_T, inputs.row_T, self._state.last_token_R, x_TD)
        self._layers.run_to_heads(x_TD, tokens)

    def finish(self, index_S: torch.Tensor) -> torch.Tensor:
        """See MixedStep.finish."""
        x_SD, out_SNH = (each.index_select(0, index_S) for each in (self._buffers.x_TD, self._buffers.out_TNH))
        return self._layers.finish(x_SD, out_SNH)
