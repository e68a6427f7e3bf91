"""Masks of grammars: which tokens may come next, a bit for each.

The layout is that of xgrammar and llguidance. Must not know grammars.

Legend: N masked rows of a batch · W words of 32 tokens · S rows of the batch · V vocabulary.
"""

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenMasks:
    """index_N: int64, distinct rows of the batch, ascending. bits_NW: int32 [N, ceil(V / 32)]; token v is allowed if
    bit v % 32 of word v // 32 is set, lowest bit first."""

    index_N: np.ndarray
    bits_NW: np.ndarray

    def apply(self, logits_SV: torch.Tensor) -> None:
        """Set the logits of forbidden tokens to -inf, in place. logits_SV: float32, on any device."""
        index = torch.from_numpy(self.index_N).to(logits_SV.device)
        is_allowed_NV = self.is_allowed(logits_SV.shape[1], logits_SV.device)
        logits_SV[index] = logits_SV[index].masked_fill_(~is_allowed_NV, -torch.inf)

    def is_allowed(self, vocab_size: int, device: torch.device) -> torch.Tensor:
        """bool [N, V]."""
        if device.type == "cpu":
            bytes_NB = np.ascontiguousarray(self.bits_NW).view(np.uint8)
            bits_NV = np.unpackbits(bytes_NB, axis=1, count=vocab_size, bitorder="little")
            return torch.from_numpy(bits_NV).view(torch.bool)
        words_NW = torch.from_numpy(self.bits_NW).to(device, non_blocking=True)
        shift_32 = torch.arange(32, dtype=torch.int32, device=device)
        bits_NWB = (words_NW.unsqueeze(-1) >> shift_32) & 1
        return bits_NWB.flatten(1)[:, :vocab_size].bool()

    def row(self, index: int) -> "TokenMasks | None":
        """The mask of one row of the batch, as a batch of one; None if the row has none."""
        found = np.flatnonzero(self.index_N == index)
        if not len(found):
            return None
        return TokenMasks(index_N=np.zeros(1, np.int64), bits_NW=self.bits_NW[found])
