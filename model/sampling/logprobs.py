"""Log-probabilities of the chosen and the most likely tokens, from the raw logits.

Raw: before penalties, masks and temperature, over the ids that can be sampled. Natural logarithms.

Legend: S sampled rows of this step · N those of them that ask · V vocabulary · K most asked for by any.
"""

from dataclasses import dataclass

import numpy as np
import torch

from octavo.model.sampling.filters import largest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Logprobs:
    """index_N: int64 positions in the batch. chosen_N: float32. top_ids_NK: int64 and top_NK: float32, descending; row
    i asked for the first ``count_N[i]`` of them."""

    index_N: np.ndarray
    count_N: np.ndarray
    chosen_N: np.ndarray
    top_ids_NK: np.ndarray
    top_NK: np.ndarray


class RawLogprobs:
    """Log-probabilities computed before the logits are changed, until the token is chosen."""

    def __init__(self, logits_SV: torch.Tensor, index_N: np.ndarray, count_N: np.ndarray) -> None:
        self._index_N = index_N
        self._count_N = count_N
        # log_softmax works row by row; a sum over the vocabulary would be cut differently for other batch sizes.
        self._logprobs_NV = logits_SV[torch.from_numpy(index_N).to(logits_SV.device)].log_softmax(dim=-1)

    def choose(self, tokens_S: torch.Tensor) -> Logprobs:
        """The result, now that each row's token (int64) is known."""
        tokens_N = tokens_S[torch.from_numpy(self._index_N).to(tokens_S.device)]
        chosen_N1 = self._logprobs_NV.gather(1, tokens_N.unsqueeze(1))
        top_NK, top_ids_NK = largest(self._logprobs_NV, int(self._count_N.max()))
        return Logprobs(
            index_N=self._index_N,
            count_N=self._count_N,
            chosen_N=chosen_N1.squeeze(1).cpu().numpy(),
            top_ids_NK=top_ids_NK.cpu().numpy(),
            top_NK=top_NK.cpu().numpy(),
        )
