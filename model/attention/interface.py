"""The inputs of attention in a step, and the interface that every backend has.

A step holds S sequences, each with one or more new tokens (a decode has one, a prefill chunk has many), laid out one
after the other: the tokens of sequence s are rows cu_query_lens_S1[s] to cu_query_lens_S1[s + 1]. Their keys and values
are in the pool already when `attend` is called; they are the last ones of the context.

    context of a sequence   |------ in the cache before this step ------|--- this step's tokens ---|
    positions               0                       context_len - query_len                context_len

Legend: T tokens in this step · S sequences · N query heads · K kv heads · H head dim · P blocks · B block size ·
M table width.
Must not know: the model's other layers, who owns a block.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionInputs:
    """Where this step's tokens are and where their context is. All tensors are on the model's device.

    slot_mapping_T: int64, where each token's key and value are written; -1 is skipped.
    table_SM: int32 block ids; entries behind the context are never read (they may be -1).
    cu_query_lens_S1: int32, cumulative number of new tokens per sequence, starting at 0.
    context_lens_S: int32, tokens in the cache after this step.
    max_*: the maximum of each, for sizing.
    derived: values computed once per step and reused in every layer, by who computed them.
    """

    slot_mapping_T: torch.Tensor
    table_SM: torch.Tensor
    cu_query_lens_S1: torch.Tensor
    context_lens_S: torch.Tensor
    max_query_len: int
    max_context_len: int
    derived: dict[str, Any] = field(default_factory=dict, init=False, repr=False)


class AttentionBackend(Protocol):
    """One way to compute causal attention over the block table."""

    name: str

    def attend(
        self,
        q_TNH: torch.Tensor,
        k_pool_PKBH: torch.Tensor,
        v_pool_PKBH: torch.Tensor,
        inputs: AttentionInputs,
        scale: float,
    ) -> torch.Tensor:
        """Returns out_TNH in q's dtype. Query head h reads KV head h // (N / K); a token attends to its own position
        and all before it. The pool is only read."""


class BackendName(ValueError):
    """There is no attention backend of that name."""


BACKENDS = ("reference", "sdpa")
"""Names for `get_backend`, for any model. "invariant" is for models of model/invariant.py alone."""


def get_backend(name: str) -> AttentionBackend:
    """The backend of that name. Raises BackendName."""
    # Imported here, since the backends need the types above.
    from octavo.model.attention.invariant import InvariantAttention
    from octavo.model.attention.reference import ReferenceAttention
    from octavo.model.attention.sdpa import SdpaAttention

    known: tuple[AttentionBackend, ...] = (ReferenceAttention(), SdpaAttention(), InvariantAttention())
    backends = {backend.name: backend for backend in known}
    if name not in backends:
        raise BackendName(f"no attention backend {name!r}: there are {', '.join(BACKENDS)}")
    return backends[name]


def make_inputs(
    tables: Sequence[Sequence[int]],
    starts_S: Sequence[int],
    query_lens_S: Sequence[int],
    *,
    block_size: int,
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, AttentionInputs]:
    """Positions and inputs of a step from lists: for the examples, for `verify`, for tests.

    tables: block ids of each sequence. starts_S: tokens that it has in the cache. query_lens_S: its new tokens. Returns
    positions_T (int64) and the inputs. Raises IndexError if a table is too short.
    """
    positions = [np.arange(start, start + length) for start, length in zip(starts_S, query_lens_S, strict=True)]
    slots = [
        np.asarray(table, np.int64)[position // block_size] * block_size + position % block_size
        for table, position in zip(tables, positions, strict=True)
    ]
    width = max(len(table) for table in tables)
    table_SM = np.full((len(tables), width), -1, np.int32)
    for row, table in zip(table_SM, tables, strict=True):
        row[: len(table)] = table
    contexts = np.asarray(starts_S) + np.asarray(query_lens_S)
    inputs = AttentionInputs(
        slot_mapping_T=torch.from_numpy(np.concatenate(slots)).to(device),
        table_SM=torch.from_numpy(table_SM).to(device),
        cu_query_lens_S1=torch.from_numpy(np.cumsum([0, *query_lens_S], dtype=np.int32)).to(device),
        context_lens_S=torch.from_numpy(contexts.astype(np.int32)).to(device),
        max_query_len=max(query_lens_S),
        max_context_len=int(contexts.max()),
    )
    return torch.from_numpy(np.concatenate(positions)).to(device), inputs
