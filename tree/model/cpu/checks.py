"""What the launchers of the kernels in C require of their arguments. Must not know: which kernel is launched.

Legend: S sequences · N query heads · K kv heads · H head dim · P blocks · B block size · M table width.
"""

import torch

LANES = 16
"""Rows that the kernels work on are multiples of it."""


def require(condition: bool, argument: str) -> None:
    """Raises ValueError."""
    if not condition:
        raise ValueError(f"{argument}: shape, dtype or layout that the kernel does not take")


def require_attention(
    q_SNH: torch.Tensor,
    k_pool_PKBH: torch.Tensor,
    v_pool_PKBH: torch.Tensor,
    table_SM: torch.Tensor,
    context_S: torch.Tensor,
    *,
    dtype: torch.dtype,
    multiple: int,
) -> None:
    """One query per sequence over paged keys and values of this dtype, the head dim a multiple. Raises ValueError."""
    num_rows, num_heads, head_dim = q_SNH.shape
    require(k_pool_PKBH.shape[3] == head_dim and head_dim % multiple == 0, "head_dim")
    require(num_heads % k_pool_PKBH.shape[1] == 0 and v_pool_PKBH.shape == k_pool_PKBH.shape, "v_pool_PKBH")
    require(table_SM.dtype == context_S.dtype == torch.int32, "table_SM")
    require(table_SM.shape[0] == num_rows and context_S.shape == (num_rows,), "context_S")
    require(q_SNH.dtype == k_pool_PKBH.dtype == v_pool_PKBH.dtype == dtype, "dtype")
    for tensor in (q_SNH, k_pool_PKBH, v_pool_PKBH, table_SM, context_S):
        require(tensor.is_contiguous(), "strides")
