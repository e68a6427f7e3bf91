"""The one place where matrices are multiplied with weights, so that packing them for a device touches nothing else.

On a CPU with bf16 instructions, oneDNN multiplies from its own blocked layout: about twice as fast as ``F.linear`` for
the few rows of a decode step, and as fast for a prefill (bench/RESULTS.md). fp32 stays as it is: there, equality with
other implementations is worth more.

Must not know: what the matrices mean.
"""

import torch
from torch import nn
from torch.nn import functional as F


class Linear(nn.Module):
    """y = x @ weight.T + bias.

    weight: [out, in]; gone once packed. bias: [out], or None. The tensors are taken as they are: two layers can share
    one (a tied head).
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self._packed: torch.Tensor | None = None  # opaque: only oneDNN can read it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in] of the weight's dtype. Returns [..., out] of the same dtype."""
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)

    def pack(self) -> None:
        """Lay the weight out as the device likes it best. Called once, after loading; the weight cannot be read any
        more (another layer that shares it keeps it). Idempotent, and nothing where plain is best."""
        if self._packed is None and can_pack(self.weight):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.data)
            del self.weight

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed copy; 0 where there is none."""
        return 0 if self._packed is None else self._packed.numel() * self._packed.element_size()


def can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN multiplies this weight faster from its own layout: bf16 on a CPU that has it."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return False
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
