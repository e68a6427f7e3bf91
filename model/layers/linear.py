"""The one place where the layers of model/layers multiply with weights, so that packing these touches nothing else. The
steps of model/gpu have products of their own.

On a CPU, bf16 weights are packed once: for our own products (model.cpu) where there is a C compiler, else by oneDNN
into its own layout. Both read the few rows of a decode step much faster than ``F.linear`` (bench/RESULTS.md). Ours
multiply by AMX or AVX512-BF16, or in fp32 where the CPU has no bf16 instructions. fp32 weights stay as they are: there,
equality with other implementations is worth more.

Must not know: what the matrices mean.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional as F

from octavo.model.cpu.native import integer_arithmetic, kernels_arithmetic, native_library, why_missing
from octavo.model.cpu.products import (
    Layout,
    PanelWeight,
    can_panel,
    multiplies_integers,
    pack_bf16,
    pack_int8,
    pack_int8_rounding,
)
from octavo.model.quantization.grouped import GroupedWeight
from octavo.model.quantization.rounding import Fp8Weight


class WeightFormat(Enum):
    """How weights are packed. INT8: integers with a scale per output, half the bytes and less exact; on a CPU, inputs
    are rounded too, in groups of 32 with a scale each. INT8_WEIGHTS: the same, with inputs as they are. FP8: e4m3 with
    a scale per output; only supported by the steps of model/gpu."""

    BF16 = "bf16"
    INT8 = "int8"
    INT8_WEIGHTS = "int8-weights"
    FP8 = "fp8"


class FormatUnavailable(ValueError):
    """This CPU, or this weight, has no product for the wanted format."""


class Packed(Protocol):
    """A weight, with its bias, that only its own product can read."""

    @property
    def num_bytes(self) -> int: ...
    def multiply(self, x: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class OneDnnWeight:
    """oneDNN's blocked layout, opaque."""

    blocks: torch.Tensor
    bias: torch.Tensor | None

    @property
    def num_bytes(self) -> int:
        """Of the weight."""
        return self.blocks.numel() * self.blocks.element_size()

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """See `Linear.forward`."""
        return torch.ops.mkldnn._linear_pointwise(x, self.blocks, self.bias, "none", [], "")


Addend = Callable[[torch.Tensor], torch.Tensor]
"""x, [..., in], to what is added to a product with it, [..., out]: an adapter (LoRA, arXiv 2106.09685)."""


class Linear(nn.Module):
    """y = x @ weight.T + bias, plus addend(x) if there is one.

    weight: [out, in]; gone once packed. bias: [out], or None. Tensors are not copied, so two layers can share one (a
    tied head). addend: set by `CausalLM.set_addend`.
    """

    addend: Addend | None = None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.num_outputs, self.num_inputs = weight.shape
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self._packed: Packed | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in] of the weight's dtype. Returns [..., out] of the same dtype."""
        y = F.linear(x, self.weight, self.bias) if self._packed is None else self._packed.multiply(x)
        return y if self.addend is None else y + self.addend(x)

    def forward_float32(self, x: torch.Tensor) -> torch.Tensor:
        """`forward`, in float32."""
        if self.panels is not None and self.addend is None:
            return self.panels.multiply(x, torch.float32)
        return self(x).float()

    def pack(self, wanted: WeightFormat = WeightFormat.BF16) -> None:
        """Convert the weight to the layout that is fastest on its device; does nothing if that is the plain one. Call
        after loading: the weight cannot be read afterwards (a layer that shares it keeps it). Idempotent. Raises
        FormatUnavailable if integers are wanted and not supported."""
        if self._packed is None:
            self._packed = packed(self.weight.data, self.bias, wanted)
            if self._packed is not None:
                del self.weight

    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate a weight that only has a shape (on the meta device)."""
        self.weight = nn.Parameter(torch.empty(self.weight.shape, dtype=dtype, device=device), requires_grad=False)

    def hold(self, weight: GroupedWeight | Fp8Weight) -> None:
        """Replace the weight by a quantised one, with this layer's bias. Packing has no effect then."""
        if self._packed is None:
            del self.weight
        self._packed = weight.with_bias(self.bias)

    @property
    def quantized(self) -> GroupedWeight | Fp8Weight | None:
        """The weight given to `hold`."""
        return self._packed if isinstance(self._packed, GroupedWeight | Fp8Weight) else None

    @property
    def panels(self) -> PanelWeight | None:
        """The packed weight, if it is packed in panels."""
        return self._packed if isinstance(self._packed, PanelWeight) else None

    @property
    def arithmetic(self) -> str:
        """For people: what computes the product; empty if there is nothing to say."""
        if self.panels is not None and self.panels.layout is Layout.INTEGER_FOURS:
            return f"own kernels (integers by {integer_arithmetic()}, inputs rounded)"
        if self.panels is not None:
            return f"own kernels ({kernels_arithmetic()})"
        if isinstance(self._packed, OneDnnWeight):
            return f"oneDNN, slower: {why_missing() or 'OCTAVO_NATIVE is off'}"
        return ""

    @property
    def packed_bytes(self) -> int:
        """Size of the packed copy; 0 if there is none."""
        return 0 if self._packed is None else self._packed.num_bytes


def _wanting(weight: torch.Tensor) -> str:
    """What is missing for the compiled products to support this weight."""
    if weight.dtype != torch.bfloat16:
        return f"a bf16 model, and this one computes in {str(weight.dtype).removeprefix('torch.')}: --dtype bfloat16"
    if native_library() is None:
        return f"compiled kernels: {why_missing() or 'OCTAVO_NATIVE is off'}"
    return f"even numbers of inputs, and a matrix has {weight.shape[1]}"


def packed(weight: torch.Tensor, bias: torch.Tensor | None, wanted: WeightFormat) -> Packed | None:
    """The weight in the best layout; None if that is the plain one."""
    if wanted is WeightFormat.FP8:
        raise FormatUnavailable("fp8 weights need a CUDA device of compute capability 8.9 or more; a CPU has int8")
    if wanted is not WeightFormat.BF16:
        if not can_panel(weight):
            raise FormatUnavailable(f"int8 weights on a CPU need {_wanting(weight)}")
        if wanted is WeightFormat.INT8 and multiplies_integers():
            return pack_int8_rounding(weight, bias)
        return pack_int8(weight, bias)
    if can_panel(weight):
        return pack_bf16(weight, bias)
    if can_pack(weight):
        return OneDnnWeight(torch.ops.mkldnn._reorder_linear_weight(weight), bias)
    return None


def can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN can pack this weight: bf16, on a CPU where oneDNN computes bf16."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return False
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
