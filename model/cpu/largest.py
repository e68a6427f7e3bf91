"""The largest logit of each row and its id: the kernel of `largest.c`, or torch's own ``max`` where there is none.

Legend: S rows · V columns. Must not know: what is chosen from.
"""

import torch

from model.cpu.native import native_library
from model.cpu.ops import threads_for


def largest(logits_SV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``max(dim=-1)``: most_S of the dtype, the lowest index_S (int64) where there are several. Where a row has a
    NaN, most_S is NaN and index_S some valid index."""
    library = native_library()
    if library is None or not logits_SV.is_cpu or logits_SV.dtype != torch.float32 or logits_SV.stride(1) != 1:
        return logits_SV.max(dim=-1)
    num_rows, width = logits_SV.shape
    most_S = logits_SV.new_empty(num_rows)
    index_S = torch.empty(num_rows, dtype=torch.int64)
    library.octavo_largest(
        logits_SV.data_ptr(),
        logits_SV.stride(0),
        most_S.data_ptr(),
        index_S.data_ptr(),
        num_rows,
        width,
        threads_for(logits_SV.numel() * logits_SV.element_size()),
    )
    return most_S, index_S
