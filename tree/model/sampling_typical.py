"""Locally typical sampling: keep the tokens whose information content is nearest to the expected one.

Source: Meister et al., "Locally typical sampling", arXiv:2202.00666. As in transformers' TypicalLogitsWarper, the
distribution is the one that earlier filters left, and tokens at the same distance survive or fall together.

Legend: N rows · V vocabulary.
"""

import torch


def keep_typical(x_NV: torch.Tensor, typical_p_N: torch.Tensor) -> torch.Tensor:
    """The logits with everything that is not typical at -inf. x_NV: float32, at least one finite entry a row.
    typical_p_N: float64, in (0, 1)."""
    logprob_NV = x_NV.log_softmax(dim=-1)
    p_NV = logprob_NV.exp()
    entropy_N1 = -(logprob_NV * p_NV).nan_to_num_(nan=0.0).sum(dim=-1, keepdim=True)
    distance_NV = (-logprob_NV - entropy_N1).abs()
    sorted_NV, order_NV = distance_NV.sort(dim=-1)
    mass_NV = p_NV.gather(1, order_NV).cumsum(dim=-1, dtype=torch.float64)
    last_N1 = (mass_NV < typical_p_N.unsqueeze(1)).sum(dim=-1, keepdim=True).clamp_(max=x_NV.shape[1] - 1)
    return x_NV.masked_fill(distance_NV > sorted_NV.gather(1, last_N1), -torch.inf)
