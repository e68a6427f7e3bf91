"""The decoder layers of a step, run by the family's program, and the operations of a layer except attention, which the
caller provides: products by cuBLAS (quantised: model/gpu/quant_products.py), the rest by our own kernels. With many
tokens, gate and up are also a kernel of ours and are never written to memory.

The residual stream x is never normalised in memory: norms are folded into the weights (model/gpu/weights.py), and the
kernels that follow a product scale by 1 / rms(x).

Legend: T tokens · S rows, of all tokens or some · N query heads · K kv heads · H head dim · D model dim ·
I intermediate dim · A = N·H · C = (N + 2K)·H · E = 2 I · O outputs · Q inputs of a product · B decoded rows · R rows of
the state.
"""

from collections.abc import Callable
from typing import Any

import torch

from octavo.model.causal_lm import TakeHidden
from octavo.model.families.interface import LayerOps
from octavo.model.gpu.quant_products import QuantProducts, matrices_of
from octavo.model.gpu.state import RowState
from octavo.model.gpu.weights import GpuWeights, LayerWeights, Matrix
from octavo.model.kernels.attention.decode import DecodeArgs
from octavo.model.kernels.attention.decode_work import DecodeWork
from octavo.model.kernels.overlap import Overlap
from octavo.model.kernels.products.activation import silu_mul
from octavo.model.kernels.products.gate_up import gate_up_product, is_faster
from octavo.model.kernels.products.rounded import RoundedTokens, silu_round
from octavo.model.kernels.rows import embed, rms_scale
from octavo.model.parallel import DividedSums

Attend = Callable[[int, LayerWeights, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""(layer index, its weights, qkv_TC, x_TD, out_TNH): writes the caches and fills out_TNH."""


def decode_args(
    weights: GpuWeights,
    state: RowState,
    rows_B: torch.Tensor,
    work: DecodeWork,
    partials: tuple[torch.Tensor, torch.Tensor],
    overlap: Overlap = Overlap.NONE,
) -> DecodeArgs:
    """Arguments for the attention of these rows (int32). work: divides them among programs. partials: see
    `partial_buffers`."""
    config = weights.config
    return DecodeArgs(
        rows_B=rows_B,
        position_R=state.position_R,
        table_RM=state.table_RM,
        cos_LH=weights.cos_LH,
        sin_LH=weights.sin_LH,
        work=work,
        partial_out=partials[0],
        partial_ml=partials[1],
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        scale=config.scale,
        eps=config.rms_norm_eps,
        overlap=overlap,
    )


class LayerBuffers:
    """Buffers between the products of a layer, for up to max_tokens tokens; one set serves all layers."""

    def __init__(self, weights: GpuWeights, max_tokens: int, x_TD: torch.Tensor | None = None) -> None:
        """x_TD: the caller's residual stream; None: allocate one."""
        config, device = weights.config, weights.embed_VD.device

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(max_tokens, *shape, dtype=weights.dtype, device=device)

        heads = config.num_attention_heads + 2 * config.num_key_value_heads
        self.x_TD = empty(config.hidden_size) if x_TD is None else x_TD
        self.qkv_TC = empty(heads * config.head_dim)
        self.out_TNH = empty(config.num_attention_heads, config.head_dim)
        self.gate_up_T2I = empty(2 * config.intermediate_size)
        self.act_TI = empty(config.intermediate_size)
        self.scale_T = torch.empty(max_tokens, dtype=torch.float32, device=device)


class SumsInPlace:
    """Sums over ranks for operations that change x in place. With several ranks, operations that otherwise add a
    product overwrite instead: the memory from `begin_sum` is uninitialised."""

    weights: GpuWeights

    @property
    def has_sums(self) -> bool:
        """Whether there are several ranks."""
        return self.weights.ranks.size > 1

    def begin_sum(self, x_SD: torch.Tensor) -> torch.Tensor:
        """See FinishOps."""
        return self.weights.ranks.room(x_SD) if self.has_sums else x_SD

    def reduce(self, x_SD: torch.Tensor, partial_SD: torch.Tensor) -> torch.Tensor:
        """See FinishOps."""
        return self.weights.ranks.add_sum(partial_SD, x_SD) if self.has_sums else partial_SD


class PlainFinish(SumsInPlace):
    """The operations after attention, for any rows (`FinishOps`; a layer is given by its index), with weights in the
    model's dtype. Changes x in place."""

    def __init__(self, weights: GpuWeights, buffers: LayerBuffers) -> None:
        self.weights, self.buffers = weights, buffers

    def begin_sum(self, x_SD: torch.Tensor) -> torch.Tensor:
        """See FinishOps; x itself if it is summed by shares."""
        return super().begin_sum(x_SD) if self._shares(x_SD) is None else x_SD

    def reduce(self, x_SD: torch.Tensor, partial_SD: torch.Tensor) -> torch.Tensor:
        """See FinishOps. If x is summed by shares, its rows are still arriving on return."""
        shares = self._shares(x_SD)
        if shares is None:
            return super().reduce(x_SD, partial_SD)
        shares.add(x_SD)
        return x_SD

    def _shares(self, x_SD: torch.Tensor) -> DividedSums | None:
        """The DividedSums for x; None unless all matrices are in the model's dtype and nothing is added to products."""
        return self.weights.ranks.shares(x_SD) if self.weights.has_plain_products else None

    def add_output(self, layer: int, x_SD: torch.Tensor, attended_SNH: torch.Tensor) -> torch.Tensor:
        """See FinishOps."""
        return self._take_product(x_SD, attended_SNH.flatten(1), self.weights.layers[layer].o_DA)

    def activate(self, layer: int, x_SD: torch.Tensor) -> torch.Tensor:
        """See FinishOps; in the product's epilogue if that is faster, else in a kernel of its own."""
        num_rows, eps, gate_up_ED = len(x_SD), self.weights.config.rms_norm_eps, self.weights.layers[layer].gate_up_ED
        act_SI = self.buffers.act_TI[:num_rows]
        if is_faster(num_rows, gate_up_ED):
            scale_S = self.buffers.scale_T[:num_rows]
            for rows in self.weights.ranks.arrivals(x_SD):
                rms_scale(x_SD[rows], scale_S[rows], eps)
                gate_up_product(x_SD[rows], gate_up_ED, scale_S[rows], act_SI[rows])
        else:
            gate_up_S2I = self.buffers.gate_up_T2I[:num_rows]
            self.multiply_gate_up(layer, x_SD, gate_up_S2I)
            silu_mul(gate_up_S2I, x_SD, act_SI, eps)
        return act_SI

    def add_down(self, layer: int, x_SD: torch.Tensor, act_SI: torch.Tensor) -> torch.Tensor:
        """See FinishOps."""
        return self._take_product(x_SD, act_SI, self.weights.layers[layer].down_DI)

    def _take_product(self, x_SD: torch.Tensor, y_SQ: torch.Tensor, matrix_DQ: torch.Tensor) -> torch.Tensor:
        if not self.has_sums:
            return x_SD.addmm_(y_SQ, matrix_DQ.T)
        shares = self._shares(x_SD)
        for rows, out_RD in [(slice(None), x_SD)] if shares is None else shares.parts(x_SD):
            torch.mm(y_SQ[rows], matrix_DQ.T, out=out_RD)
        return x_SD

    def multiply_qkv(self, layer: int, x_TD: torch.Tensor, qkv_TC: torch.Tensor) -> None:
        """Write the raw QKV product, which attention starts from, to qkv_TC."""
        for rows in self.weights.ranks.arrivals(x_TD):
            torch.mm(x_TD[rows], self.weights.layers[layer].qkv_CD.T, out=qkv_TC[rows])

    def multiply_gate_up(self, layer: int, x_SD: torch.Tensor, gate_up_S2I: torch.Tensor) -> None:
        """Write the raw product that `activate` starts from, if it is not fused, to gate_up_S2I."""
        for rows in self.weights.ranks.arrivals(x_SD):
            torch.mm(x_SD[rows], self.weights.layers[layer].gate_up_ED.T, out=gate_up_S2I[rows])


class QuantizedFinish(PlainFinish):
    """`PlainFinish` for quantised matrices."""

    def __init__(self, weights: GpuWeights, buffers: LayerBuffers, products: QuantProducts) -> None:
        super().__init__(weights, buffers)
        self._products = products

    def add_output(self, layer: int, x_SD: torch.Tensor, attended_SNH: torch.Tensor) -> torch.Tensor:
        """See FinishOps."""
        self._put(x_SD, attended_SNH.flatten(1), matrices_of(self.weights.layers[layer]).output)
        return x_SD

    def activate(self, layer: int, x_SD: torch.Tensor) -> Any:
        """See FinishOps; already rounded if the next product would round it."""
        gate_up_S2I, act_SI = self.buffers.gate_up_T2I[: len(x_SD)], self.buffers.act_TI[: len(x_SD)]
        self.multiply_gate_up(layer, x_SD, gate_up_S2I)
        eps, down = self.weights.config.rms_norm_eps, matrices_of(self.weights.layers[layer]).down
        if self._products.rounds_tokens(len(x_SD), x_SD.dtype, down):
            tokens = RoundedTokens.empty(len(x_SD), act_SI.shape[1], x_SD.device)
            silu_round(gate_up_S2I, x_SD, tokens, eps)
            return tokens
        silu_mul(gate_up_S2I, x_SD, act_SI, eps)
        return act_SI

    def add_down(self, layer: int, x_SD: torch.Tensor, act_SI: torch.Tensor | RoundedTokens) -> torch.Tensor:
        """See FinishOps."""
        self._put(x_SD, act_SI, matrices_of(self.weights.layers[layer]).down)
        return x_SD

    def _put(self, x_SD: torch.Tensor, y_SQ: torch.Tensor | RoundedTokens, matrix: Matrix) -> None:
        put = self._products.multiply if self.has_sums else self._products.add_product
        put(y_SQ, matrix, x_SD)

    def multiply_qkv(self, layer: int, x_TD: torch.Tensor, qkv_TC: torch.Tensor) -> None:
        """See PlainFinish.multiply_qkv."""
        self._products.multiply(x_TD, matrices_of(self.weights.layers[layer]).qkv, qkv_TC)

    def multiply_gate_up(self, layer: int, x_SD: torch.Tensor, gate_up_S2I: torch.Tensor) -> None:
        """See PlainFinish.multiply_gate_up."""
        self._products.multiply(x_SD, matrices_of(self.weights.layers[layer]).gate_up, gate_up_S2I)


class AddendFinish(PlainFinish):
    """The operations of `inner` with something added to each product (`LayerAddends`)."""

    def __init__(self, inner: PlainFinish) -> None:
        super().__init__(inner.weights, inner.buffers)
        self._inner = inner

    def add_output(self, layer: int, x_SD: torch.Tensor, attended_SNH: torch.Tensor) -> torch.Tensor:
        """See FinishOps."""
        x_SD = self._inner.add_output(layer, x_SD, attended_SNH)
        self._add("output", layer, attended_SNH.flatten(1), x_SD)
        return x_SD

    def activate(self, layer: int, x_SD: torch.Tensor) -> torch.Tensor:
        """See FinishOps; gate and up go through memory."""
        gate_up_S2I, act_SI = self.buffers.gate_up_T2I[: len(x_SD)], self.buffers.act_TI[: len(x_SD)]
        self._inner.multiply_gate_up(layer, x_SD, gate_up_S2I)
        self._add("gate_up", layer, x_SD, gate_up_S2I)
        silu_mul(gate_up_S2I, x_SD, act_SI, self.weights.config.rms_norm_eps)
        return act_SI

    def add_down(self, layer: int, x_SD: torch.Tensor, act_SI: torch.Tensor) -> torch.Tensor:
        """See FinishOps."""
        x_SD = self._inner.add_down(layer, x_SD, act_SI)
        self._add("down", layer, act_SI, x_SD)
        return x_SD

    def multiply_qkv(self, layer: int, x_TD: torch.Tensor, qkv_TC: torch.Tensor) -> None:
        """See PlainFinish.multiply_qkv."""
        self._inner.multiply_qkv(layer, x_TD, qkv_TC)
        self._add("qkv", layer, x_TD, qkv_TC)

    def _add(self, product: str, layer: int, x_SI: torch.Tensor, out_SO: torch.Tensor) -> None:
        assert self.weights.addends is not None
        addend = getattr(self.weights.addends[layer], product)
        if addend is not None:
            addend(x_SI, out_SO)


class Layers(SumsInPlace):
    """All operations of a layer (`LayerOps`), with the products of `finish`. Everything between the QKV product and the
    heads is left to the caller's `attend`."""

    def __init__(self, finish: PlainFinish, attend: Attend) -> None:
        self.weights, self._finish, self._attend = finish.weights, finish, attend
        self.add_output, self.activate, self.add_down = finish.add_output, finish.activate, finish.add_down
        self.begin_sum, self.reduce = finish.begin_sum, finish.reduce  # type: ignore[method-assign]

    def multiply_qkv(self, layer: int, x_TD: torch.Tensor) -> torch.Tensor:
        """See LayerOps: qkv_TC of the buffers."""
        qkv_TC = self._finish.buffers.qkv_TC[: len(x_TD)]
        self._finish.multiply_qkv(layer, x_TD, qkv_TC)
        return qkv_TC

    def write_qkv(self, layer: int, x_TD: torch.Tensor, qkv_TC: torch.Tensor) -> torch.Tensor:
        """See LayerOps: passes qkv_TC on."""
        return qkv_TC

    def attend(self, layer: int, x_TD: torch.Tensor, qkv_TC: torch.Tensor) -> torch.Tensor:
        """See LayerOps: out_TNH of the buffers."""
        out_TNH = self._finish.buffers.out_TNH[: len(x_TD)]
        self._attend(layer, self.weights.layers[layer], qkv_TC, x_TD, out_TNH)
        return out_TNH


def finish_of(weights: GpuWeights, buffers: LayerBuffers) -> PlainFinish:
    """The operations after attention that these weights need."""
    plain = PlainFinish(weights, buffers)
    finish = plain if weights.products is None else QuantizedFinish(weights, buffers, weights.products)
    return finish if weights.addends is None else AddendFinish(finish)


def embed_tokens(
    weights: GpuWeights, ids_T: torch.Tensor, rows_T: torch.Tensor, last_token_R: torch.Tensor, x_TD: torch.Tensor
) -> None:
    """Fill x_TD with the embedding of each id (int32), or of the row's last token where the id is negative."""
    ranks, embed_VD = weights.ranks, weights.embed_VD
    if ranks.size == 1:
        embed(ids_T, rows_T, last_token_R, embed_VD, x_TD)
    else:
        partial_TD = ranks.room(x_TD, plain=x_TD)
        embed(ids_T, rows_T, last_token_R, embed_VD, partial_TD, first=ranks.rank * len(embed_VD))
        ranks.sum(partial_TD, out=x_TD)


def run_layers(weights: GpuWeights, ops: LayerOps, x_TD: torch.Tensor, take: TakeHidden | None = None) -> torch.Tensor:
    """Run x_TD through every layer in place, by the family's program, and return it. take: called with the hidden
    states after each layer; must copy them on the device, since x_TD changes afterwards."""
    attended, last = attend_layers(weights, ops, x_TD, take), len(weights.layers) - 1
    finished: torch.Tensor = weights.config.family.finish(ops, last, x_TD, attended)
    weights.ranks.await_arrivals(finished)
    if take is not None:
        take(last, finished)
    return finished


def attend_layers(
    weights: GpuWeights, ops: LayerOps, x_TD: torch.Tensor, take: TakeHidden | None = None
) -> torch.Tensor:
    """`run_layers` up to and including the last layer's attention; returns its heads [T, N, H]."""
    family = weights.config.family
    attended = family.attend(ops, 0, x_TD)
    for index in range(1, len(weights.layers)):
        x_TD = family.finish(ops, index - 1, x_TD, attended)
        if take is not None:
            weights.ranks.await_arrivals(x_TD)
            take(index - 1, x_TD)
        attended = family.attend(ops, index, x_TD)
    heads_TNH: torch.Tensor = attended
    return heads_TNH
