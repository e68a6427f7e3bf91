"""Checked launcher of the kernel in `prefill.c`, attention of a chunk; its slow twin: model.attention_reference.

Legend: Q tokens of a chunk · N query heads · K kv heads · H head dim · P blocks · B block size · M table width.
Must not know: layers, requests.
"""

import torch

from model.cpu.checks import require
from model.cpu.native import loaded_library
from model.cpu.ops import takes, threads_for

MOST_DIM = 256
"""Of a head, as in prefill.c."""


def takes_chunks(pool_PKBH: torch.Tensor) -> bool:
    """Whether `chunk_attention` reads this cache."""
    head_dim = pool_PKBH.shape[3]
    return takes(pool_PKBH, width=head_dim) and head_dim <= MOST_DIM


def chunk_attention(
    q_QNH: torch.Tensor,
    k_pool_PKBH: torch.Tensor,
    v_pool_PKBH: torch.Tensor,
    table_M: torch.Tensor,
    scale: float,
    *,
    context_len: int,
) -> torch.Tensor:
    """The last Q tokens of a context, each over all before it and itself; [Q, N, H]. table_M: int32, the blocks of the
    context in order. bf16. Raises ValueError, MemoryError."""
    q_QNH, table_M = q_QNH.contiguous(), table_M.contiguous()
    num_tokens, num_heads, head_dim = q_QNH.shape
    num_kv_heads, block_size = k_pool_PKBH.shape[1], k_pool_PKBH.shape[2]
    require(takes_chunks(k_pool_PKBH) and k_pool_PKBH.shape[3] == head_dim, "k_pool_PKBH")
    require(num_heads % num_kv_heads == 0 and v_pool_PKBH.shape == k_pool_PKBH.shape, "v_pool_PKBH")
    require(table_M.dtype == torch.int32 and table_M.numel() * block_size >= context_len, "table_M")
    require(0 < num_tokens <= context_len, "context_len")
    require(q_QNH.dtype == v_pool_PKBH.dtype == torch.bfloat16, "dtype")
    require(k_pool_PKBH.is_contiguous() and v_pool_PKBH.is_contiguous(), "strides")
    out_QNH = torch.empty_like(q_QNH)
    failed = loaded_library().octavo_chunk_attention(
        q_QNH.data_ptr(),
        k_pool_PKBH.data_ptr(),
        v_pool_PKBH.data_ptr(),
        table_M.data_ptr(),
        out_QNH.data_ptr(),
        num_tokens,
        context_len,
        num_heads,
        num_kv_heads,
        head_dim,
        block_size,
        scale,
        threads_for(2 * num_tokens * num_heads * context_len),
    )
    if failed:
        raise MemoryError("no memory for the keys and values of a prompt")
    return out_QNH
