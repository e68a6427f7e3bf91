"""Sampling row by row: what a row draws is then worked out by the same operations on the same shapes in any batch.

A library's elementwise functions may round the rest of a vector otherwise than its body, and where a row's numbers lie
in a batch decides which of them are the rest. Greedy rows are safe together: a maximum rounds nothing.

Legend: S sampled rows · N those that are more than greedy · V vocabulary · K most asked for by any.
"""

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import torch

from octavo.model.sampling.logprobs import Logprobs
from octavo.model.sampling.masks import TokenMasks
from octavo.model.sampling.sampler import Sampled, Sampler


class EachRowSampler(Sampler):
    """A Sampler for deterministic mode."""

    def sample(
        self,
        logits_SV: torch.Tensor,
        rows_S: np.ndarray,
        lengths_S: np.ndarray,
        masks: TokenMasks | None = None,
    ) -> Sampled:
        """See Sampler.sample. Does not overwrite logits_SV for rows that are sampled one by one."""
        is_special_S = self._rows.features_R[rows_S] != 0
        if masks is not None:
            is_special_S[masks.index_N] = True
        plain, special = np.flatnonzero(~is_special_S), np.flatnonzero(is_special_S)
        if not len(special):
            return super().sample(logits_SV, rows_S, lengths_S)
        groups = [plain] if len(plain) else []
        groups += [special[i : i + 1] for i in range(len(special))]
        found = []
        for index in groups:
            # A copy of its own: where a row begins in memory must not matter either.
            logits_NV = logits_SV[torch.from_numpy(index).to(logits_SV.device)]
            own = masks.row(int(index[0])) if masks is not None and len(index) == 1 else None
            found.append(super().sample(logits_NV, rows_S[index], lengths_S[index], own))
        return joined(groups, found)


def joined(groups: Sequence[np.ndarray], found: Sequence[Sampled]) -> Sampled:
    """The results of groups of rows as one, given the rows' places in the batch."""
    order = torch.from_numpy(np.argsort(np.concatenate(groups))).to(found[0].tokens_S.device)
    parts = [(index, each.logprobs) for index, each in zip(groups, found, strict=True) if each.logprobs is not None]
    columns: dict[str, torch.Tensor | None] = {}
    for name in (field.name for field in fields(Sampled) if field.name != "logprobs"):
        values = [getattr(each, name) for each in found]
        if all(value is None for value in values):
            columns[name] = None
            continue
        # None: no row of the group has what the column is about.
        nothing = [torch.zeros_like(each.is_finite_S) for each in found]
        filled = [empty if value is None else value for value, empty in zip(values, nothing, strict=True)]
        columns[name] = torch.cat(filled)[order]
    return Sampled(logprobs=_joined_logprobs(parts) if parts else None, **columns)  # type: ignore[arg-type]


def _joined_logprobs(parts: list[tuple[np.ndarray, Logprobs]]) -> Logprobs:
    """Shorter lists are padded with values that are never read."""
    width = max(logprobs.top_NK.shape[1] for _, logprobs in parts)

    def widened(array_NK: np.ndarray) -> np.ndarray:
        return np.pad(array_NK, ((0, 0), (0, width - array_NK.shape[1])))

    return Logprobs(
        index_N=np.concatenate([index[logprobs.index_N] for index, logprobs in parts]),
        count_N=np.concatenate([logprobs.count_N for _, logprobs in parts]),
        chosen_N=np.concatenate([logprobs.chosen_N for _, logprobs in parts]),
        top_ids_NK=np.concatenate([widened(logprobs.top_ids_NK) for _, logprobs in parts]),
        top_NK=np.concatenate([widened(logprobs.top_NK) for _, logprobs in parts]),
    )
