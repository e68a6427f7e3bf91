"""The one place where matrices are multiplied with weights, so that packing them for a device touches nothing else.

Must not know: what the matrices mean.
"""

import torch
from torch import nn
from torch.nn import functional as F


class Linear(nn.Module):
    """y = x @ weight.T + bias.

    weight: [out, in]. bias: [out], or None. The tensors are taken as they are: two layers can share one (a tied head).
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in] of the weight's dtype. Returns [..., out] of the same dtype."""
        return F.linear(x, self.weight, self.bias)

    def pack(self) -> None:
        """Lay the weight out as the device likes it best. Called once, after loading."""
