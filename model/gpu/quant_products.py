"""Products of a step with quantised matrices.

For a given matrix, how a product is computed depends only on the number of tokens. Few: weights are dequantised in
registers (model/kernels/products/quantized.py), so that fewer bytes are read. Many: integers are unpacked into a matrix
that all layers share, which cuBLAS multiplies; e4m3 weights are multiplied by e4m3 tokens, each with a scale, if the
device has instructions for it: by our kernel up to 64 tokens (model/kernels/products/rounded.py), by the library
beyond. Norms are folded into e4m3 weights before they are rounded; for integers, into the scales of the inputs.

Legend: T tokens · D model dim · O outputs · I inputs.
"""

from dataclasses import dataclass

import torch

from octavo.model.gpu.weights import GpuWeights, LayerWeights, Matrix, QuantMatrices
from octavo.model.kernels.products.quantized import (
    QuantizedWeight,
    QuantScratch,
    can_multiply,
    quant_add_product,
    quant_product,
)
from octavo.model.kernels.products.rounded import (
    MOST_TOKENS,
    RoundedTokens,
    room_of,
    rounded_add_product,
    rounded_product,
)
from octavo.model.kernels.products.split_k import SplitKRoom
from octavo.model.kernels.products.unpack import round_rows, unpack_weight
from octavo.model.quantization.grouped import GroupedWeight
from octavo.model.quantization.rounding import Fp8Weight

FEW_TOKENS, FEW_TOKENS_FP8 = 64, 32
"""Up to this many tokens, weights are dequantised in registers (bench/RESULTS.md)."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantProducts:
    """Scratch for the products of one stream. plain: memory for the largest unpacked matrix; None if none is unpacked.
    room: for products with rounded tokens; None if there are none."""

    scratch: QuantScratch
    plain: torch.Tensor | None
    room: SplitKRoom | None = None
    few_tokens: int = FEW_TOKENS

    @classmethod
    def allocate(cls, weights: GpuWeights) -> "QuantProducts":
        """Scratch for all layers of these weights."""
        held = [matrix for layer in weights.layers for matrix in matrices_of(layer).all()]
        every = [matrix for matrix in held if not isinstance(matrix, torch.Tensor)]
        device = weights.embed_VD.device
        scratch = QuantScratch.allocate(
            max_outputs=max(matrix.num_outputs for matrix in every), max_tokens=FEW_TOKENS, device=device
        )
        sizes = [matrix.num_outputs * matrix.num_inputs for matrix in every if needs_plain(matrix, weights.dtype)]
        plain = torch.empty(max(sizes), dtype=weights.dtype, device=device) if sizes else None
        rounding = [(m.num_outputs, m.num_inputs) for m in every if not needs_plain(m, weights.dtype)]
        return cls(scratch, plain, room_of(sorted(set(rounding)), device) if rounding else None)

    def rounds_tokens(self, num_tokens: int, dtype: torch.dtype, weight: Matrix) -> bool:
        """Whether products of this many tokens with this weight round the tokens to e4m3."""
        if not isinstance(weight, Fp8Weight) or self._are_few(num_tokens, weight):
            return False
        return not needs_plain(weight, dtype)

    def multiply(self, x_TI: torch.Tensor | RoundedTokens, weight: Matrix, out_TO: torch.Tensor) -> None:
        """out_TO = x_TI @ weight^T, without bias. x_TI: may already be rounded if `rounds_tokens`."""
        if isinstance(x_TI, RoundedTokens) or self.rounds_tokens(len(x_TI), x_TI.dtype, weight):
            assert isinstance(weight, Fp8Weight)
            self._multiply_rounded(rounded(x_TI), weight, out_TO)
        elif isinstance(weight, torch.Tensor):
            torch.mm(x_TI, weight.T, out=out_TO)
        elif self._are_few(len(x_TI), weight):
            quant_product(x_TI, weight, out_TO, self.scratch)
        else:
            torch.mm(x_TI, self._unpacked(weight).T, out=out_TO)

    def add_product(self, x_TI: torch.Tensor | RoundedTokens, weight: Matrix, out_TO: torch.Tensor) -> None:
        """out_TO += x_TI @ weight^T; otherwise as `multiply`."""
        if isinstance(x_TI, RoundedTokens) or self.rounds_tokens(len(x_TI), x_TI.dtype, weight):
            assert isinstance(weight, Fp8Weight)
            self._add_rounded(rounded(x_TI), weight, out_TO)
        elif isinstance(weight, torch.Tensor):
            out_TO.addmm_(x_TI, weight.T)
        elif self._are_few(len(x_TI), weight):
            quant_add_product(x_TI, weight, out_TO, self.scratch)
        else:
            out_TO.addmm_(x_TI, self._unpacked(weight).T)

    def _multiply_rounded(self, tokens: RoundedTokens, weight: Fp8Weight, out_TO: torch.Tensor) -> None:
        if len(tokens) <= MOST_TOKENS and self.room is not None:
            rounded_product(tokens, weight, out_TO, self.room)
        else:
            multiply_by_library(tokens, weight, out_TO)

    def _add_rounded(self, tokens: RoundedTokens, weight: Fp8Weight, out_TO: torch.Tensor) -> None:
        if len(tokens) <= MOST_TOKENS and self.room is not None:
            rounded_add_product(tokens, weight, out_TO, self.room)
        else:
            product_TO = torch.empty_like(out_TO)
            multiply_by_library(tokens, weight, product_TO)
            out_TO.add_(product_TO)

    def _are_few(self, num_tokens: int, weight: QuantizedWeight) -> bool:
        few = self.few_tokens if self.plain is not None else min(self.few_tokens, FEW_TOKENS_FP8)
        return num_tokens <= few and can_multiply(weight)

    def _unpacked(self, weight: QuantizedWeight) -> torch.Tensor:
        assert self.plain is not None
        plain_OI = self.plain[: weight.num_outputs * weight.num_inputs].view(weight.num_outputs, weight.num_inputs)
        if isinstance(weight, GroupedWeight):
            unpack_weight(weight, plain_OI)
        else:
            plain_OI.copy_(weight.dequantized())
        return plain_OI


def needs_plain(weight: QuantizedWeight, dtype: torch.dtype) -> bool:
    """Whether products of many tokens need an unpacked matrix: all but e4m3 on a device that can multiply it."""
    if isinstance(weight, GroupedWeight) or dtype != torch.bfloat16 or not weight.code_OI.is_cuda:
        return True
    is_aligned = weight.num_inputs % 16 == 0 and weight.num_outputs % 16 == 0
    return not is_aligned or torch.cuda.get_device_capability(weight.code_OI.device) < (8, 9)


def rounded(x_TI: torch.Tensor | RoundedTokens) -> RoundedTokens:
    """Round each token to e4m3, unless that has been done."""
    if isinstance(x_TI, RoundedTokens):
        return x_TI
    tokens = RoundedTokens.empty(x_TI.shape[0], x_TI.shape[1], x_TI.device)
    round_rows(x_TI, tokens.code_TI, tokens.scale_T)
    return tokens


def multiply_by_library(tokens: RoundedTokens, weight: Fp8Weight, out_TO: torch.Tensor) -> None:
    """out_TO (bf16) = tokens @ weight^T (`Fp8Weight.multiply_rounded`)."""
    torch._scaled_mm(
        tokens.code_TI, weight.code_OI.T, scale_a=tokens.scale_T[:, None], scale_b=weight.scale_O[None, :],
        out_dtype=torch.bfloat16, use_fast_accum=True, out=out_TO,
    )  # fmt: skip


def matrices_of(layer: LayerWeights) -> QuantMatrices:
    """The layer's quantised matrices."""
    assert layer.quantized is not None
    return layer.quantized
