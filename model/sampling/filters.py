"""top-n-sigma, min-p, top-k and top-p as one number per row: the smallest logit that survives.

Each of them keeps a prefix of the logits in falling order, so that together they keep the shortest of the prefixes.
Equal logits survive or fall together: nothing depends on how a sort breaks ties (transformers' top-p cuts between equal
logits; elsewhere the results are the same). Order: top-n-sigma and min-p (the floor), then top-k, then top-p over what
is left.

top-n-sigma keeps what is at most n standard deviations of a row's logits below the largest; masked tokens do not count,
and the sum of squares is divided by their number. That is llama.cpp's `top-n-sigma`, which stands there too behind the
penalties and before all other filters; Aphrodite's `nsigma` divides by one less. The temperature stretches logits and
deviation alike, so that it changes nothing about what is kept.

Sources: Holtzman et al. (top-p, arXiv:1904.09751), Fan et al. (top-k, arXiv:1805.04833), Nguyen et al. (min-p,
arXiv:2407.01082), Tang et al. (top-n-sigma, arXiv:2411.07641). Every operation works on one row alone, in an order that
does not depend on the batch.

Legend: S rows · V vocabulary · K candidates, the K largest of a row in falling order · G groups of the vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

_GROUP = 64


TOP_K_OFF = 2**31 - 1


# Locally typical sampling: keep the tokens whose information content is nearest to the expected one.
#
# Source: Meister et al., "Locally typical sampling", arXiv:2202.00666. As in transformers' TypicalLogitsWarper, the
# distribution is the one that earlier filters left, and tokens at the same distance survive or fall together.
#
# Legend: N rows · V vocabulary.


def keep_typical(x_NV: torch.Tensor, typical_p_N: torch.Tensor) -> torch.Tensor:
    """The logits with everything atypical at -inf. x_NV: float32, at least one finite entry per row. typical_p_N:
    float64, in (0, 1)."""
    logprob_NV = x_NV.log_softmax(dim=-1)
    p_NV = logprob_NV.exp()
    entropy_N1 = -(logprob_NV * p_NV).nan_to_num_(nan=0.0).sum(dim=-1, keepdim=True)
    distance_NV = (-logprob_NV - entropy_N1).abs()
    sorted_NV, order_NV = distance_NV.sort(dim=-1)
    mass_NV = p_NV.gather(1, order_NV).cumsum(dim=-1, dtype=torch.float64)
    last_N1 = (mass_NV < typical_p_N.unsqueeze(1)).sum(dim=-1, keepdim=True).clamp_(max=x_NV.shape[1] - 1)
    return x_NV.masked_fill(distance_NV > sorted_NV.gather(1, last_N1), -torch.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """The rows' filter parameters, on the logits' device.

    top_k_S: int64, TOP_K_OFF if off. top_p_S: float64, 1 if off. floor_S: float32, the least logit that top-n-sigma and
    min-p keep, -inf if off. typical_p_S: float64, 1 if off.
    """

    top_k_S: torch.Tensor
    top_p_S: torch.Tensor
    floor_S: torch.Tensor
    typical_p_S: torch.Tensor

    @classmethod
    def of(cls, logits_SV: torch.Tensor, columns: Mapping[str, torch.Tensor]) -> "Filters":
        """For rows with these logits, before the temperature. columns: by name in `model.sampling.params.COLUMNS`, [S]
        each."""
        return cls(
            top_k_S=columns["top_k"].masked_fill(columns["top_k"] == 0, TOP_K_OFF),
            top_p_S=columns["top_p"],
            floor_S=torch.maximum(columns["log_min_p"], sigma_floor(logits_SV, columns)),
            typical_p_S=columns["typical_p"],
        )

    @property
    def has_top_p_only_S(self) -> torch.Tensor:
        """bool: rows where top-p sees the whole distribution."""
        return (self.top_k_S == TOP_K_OFF) & (self.floor_S == -torch.inf)

    def rows(self, index: torch.Tensor) -> "Filters":
        """The filters of some of the rows."""
        return Filters(
            top_k_S=self.top_k_S[index],
            top_p_S=self.top_p_S[index],
            floor_S=self.floor_S[index],
            typical_p_S=self.typical_p_S[index],
        )


def sigma_floor(logits_SV: torch.Tensor, columns: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The least logit that top-n-sigma keeps, float32 [S], after scaling (row maximum at 0, divided by the
    temperature); -inf if off. Computed row by row: a sum over several rows would be split differently for other batch
    sizes."""
    n_S = columns["top_n_sigma"]
    floor_S = torch.full_like(n_S, -torch.inf)
    for row in torch.nonzero(n_S > 0).flatten().tolist():
        left_V = logits_SV[row][logits_SV[row] > -torch.inf].double()
        floor_S[row] = -n_S[row] * left_V.std(correction=0) / columns["temperature"][row]
    return floor_S


def largest(x_SV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` largest entries of each row, in descending order: values [S, K] and ids int64 [S, K].

    Reads twice as much as a maximum does, but does not sort the vocabulary: the K largest entries are in the K groups
    with the largest maxima.
    """
    num_rows, width = x_SV.shape
    num_groups = width // _GROUP
    if num_groups <= 2 * count:
        return x_SV.topk(min(count, width), dim=-1)
    whole = num_groups * _GROUP
    x_SGC = x_SV[:, :whole].unflatten(1, (num_groups, _GROUP))
    groups_SK = x_SGC.amax(dim=-1).topk(count, dim=-1, sorted=False).indices
    offsets_C = torch.arange(_GROUP, device=x_SV.device)
    ids_SC = (groups_SK[:, :, None] * _GROUP + offsets_C).flatten(1)
    if whole < width:
        tail = torch.arange(whole, width, device=x_SV.device).expand(num_rows, -1)
        ids_SC = torch.cat([ids_SC, tail], dim=1)
    values_SK, picks_SK = x_SV.gather(1, ids_SC).topk(count, dim=-1)
    return values_SK, ids_SC.gather(1, picks_SK)


def masses(x_SV: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Sum of exp(x) over the vocabulary, float32 [S], for rows where top-p needs it; 1 for others.

    Computed with softmax, which works row by row: a plain sum would be split differently for other batch sizes.
    """
    mass_S = torch.ones(len(x_SV), device=x_SV.device)
    index = torch.nonzero(filters.has_top_p_only_S & (filters.top_p_S < 1)).squeeze(1)
    if len(index):
        mass_S[index] = x_SV[index].softmax(dim=-1).amax(dim=-1).reciprocal()
    return mass_S


def thresholds(
    sorted_SK: torch.Tensor, mass_S: torch.Tensor, filters: Filters, *, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest surviving logit of each row, float32 [S], and whether it is exact, bool [S].

    sorted_SK: float32, descending, with each row's maximum at 0. mass_S: from `masses`. A threshold is exact if the
    candidates extend beyond it; otherwise more of them are needed.
    """
    width = sorted_SK.shape[1]
    last_S1 = (filters.top_k_S.clamp(max=width) - 1).unsqueeze(1)
    least_S1 = torch.maximum(sorted_SK.gather(1, last_S1), filters.floor_S.unsqueeze(1))
    is_kept_SK = sorted_SK >= least_S1
    mass_SK = torch.where(is_kept_SK, sorted_SK.exp(), 0.0).cumsum(dim=-1, dtype=torch.float64)
    is_free_S1 = filters.has_top_p_only_S.unsqueeze(1)
    total_S1 = torch.where(is_free_S1, mass_S.unsqueeze(1).to(torch.float64), mass_SK[:, -1:])
    before_SK = torch.cat([torch.zeros_like(total_S1), mass_SK[:, :-1]], dim=1)
    top_p_S1 = filters.top_p_S.unsqueeze(1)
    is_wanted_SK = (before_SK < top_p_S1 * total_S1) | (top_p_S1 >= 1)
    count_S1 = (is_kept_SK & is_wanted_SK).sum(dim=-1, keepdim=True).clamp(min=1)
    least_S1 = sorted_SK.gather(1, count_S1 - 1)
    is_total_known_S1 = is_free_S1 | ~is_kept_SK[:, -1:] | (top_p_S1 >= 1)
    is_right_S1 = (is_total_known_S1 & (least_S1 > sorted_SK[:, -1:])) | (width == vocab_size)
    return least_S1.squeeze(1), is_right_S1.squeeze(1)
