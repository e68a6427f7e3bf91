"""Root mean square normalisation (Zhang and Sennrich 2019, arXiv 1910.07467).

Must not know: what it normalises.
"""

import torch
from torch import nn

from model.cpu.ops import rms_norm, takes


class RmsNorm(nn.Module):
    """Divides each row by its root mean square, in fp32 whatever the dtype, then multiplies with the weight.

    The row is rounded to its dtype before the weight is applied, as transformers does: bf16 results are the same bits.
    """

    def __init__(self, weight_D: torch.Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_D, requires_grad=False)
        self.epsilon = epsilon

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Returns a new tensor of x's dtype."""
        if x_TD.dim() == 2 and takes(x_TD, width=x_TD.shape[1]):
            return rms_norm(x_TD, self.weight, self.epsilon)
        return plain_rms_norm(x_TD, self.weight, self.epsilon)


def plain_rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, epsilon: float) -> torch.Tensor:
    """By torch's operators, on any device."""
    wide_TD = x_TD.float()
    mean_square_T1 = wide_TD.pow(2).mean(-1, keepdim=True)
    return weight_D * (wide_TD * torch.rsqrt(mean_square_T1 + epsilon)).to(x_TD.dtype)
