"""Checked launchers of the kernels in `kernels.c`, `prefill.c` and `largest.c`, and of norm and SiLU in `invariant.c`;
when they can be used.

Each has a slow reference in torch: of model.layers.decoder, `rms_norm` has RmsNorm, `rope_write` has `rotate` with
KvPool's write, `silu_mul` the expression in Mlp; `decode_attention` and `chunk_attention` have
model.attention.reference; `largest` has ``max``.

Legend: T tokens in this step · S sequences, or rows of logits · Q tokens of a chunk · N query heads · K kv heads ·
H head dim · D model dim · I intermediate · P blocks · B block size · M table width · V vocabulary · E = 2 I · C columns
of QKV.
Must not know: layers, requests.
"""

import ctypes

import torch

from octavo.model.cpu.native import native_library

_ENOUGH_BYTES = 128 * 1024
"""One thread reads them in some five microseconds. Below it, sharing costs as much as it saves even with threads that
spin, and to wake one that sleeps takes ten times as long."""

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
    """Raises ValueError unless there is one query per sequence over paged keys and values of this dtype, and head_dim
    is a multiple of `multiple`."""
    num_rows, num_heads, head_dim = q_SNH.shape
    require(k_pool_PKBH.shape[3] == head_dim and head_dim % multiple == 0, "head_dim")
    require(num_heads % k_pool_PKBH.shape[1] == 0 and v_pool_PKBH.shape == k_pool_PKBH.shape, "v_pool_PKBH")
    require(table_SM.dtype == context_S.dtype == torch.int32, "table_SM")
    require(table_SM.shape[0] == num_rows and context_S.shape == (num_rows,), "context_S")
    require(q_SNH.dtype == k_pool_PKBH.dtype == v_pool_PKBH.dtype == dtype, "dtype")
    for tensor in (q_SNH, k_pool_PKBH, v_pool_PKBH, table_SM, context_S):
        require(tensor.is_contiguous(), "strides")


def loaded_library() -> ctypes.CDLL:
    """The kernels, for callers that know they are available. Raises RuntimeError if they are not."""
    library = native_library()
    if library is None:
        raise RuntimeError("the native kernels are not there: ask `native_library` first")
    return library


def takes(x: torch.Tensor, *, width: int) -> bool:
    """Whether the kernels support this tensor, in rows of this width: bf16 on a CPU with the kernels."""
    return x.dtype is torch.bfloat16 and x.is_cpu and not width % (2 * LANES) and native_library() is not None


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, epsilon: float) -> torch.Tensor:
    """See model.layers.decoder.RmsNorm; bf16 or fp32, D a multiple of LANES."""
    x_TD = x_TD.contiguous()
    num_rows, dim = x_TD.shape
    require(weight_D.shape == (dim,) and dim % LANES == 0, "weight_D")
    require(x_TD.dtype == weight_D.dtype and x_TD.dtype in (torch.bfloat16, torch.float32), "dtype")
    library, num_bytes = loaded_library(), x_TD.nbytes
    kernel = library.octavo_rms_norm if x_TD.dtype == torch.bfloat16 else library.octavo_rms_norm_f32
    out_TD = torch.empty_like(x_TD)
    kernel(x_TD.data_ptr(), weight_D.data_ptr(), out_TD.data_ptr(), num_rows, dim, epsilon, threads_for(num_bytes))
    return out_TD


def silu_mul(gate_up_TE: torch.Tensor) -> torch.Tensor:
    """silu of the first half of each row times its second half: [T, 2 I] to [T, I]; bf16 or fp32, I a multiple of
    LANES."""
    gate_up_TE = gate_up_TE.contiguous()
    num_rows, dim = gate_up_TE.shape[0], gate_up_TE.shape[1] // 2
    require(gate_up_TE.dtype in (torch.bfloat16, torch.float32) and dim % LANES == 0, "gate_up_TE")
    library, num_bytes = loaded_library(), gate_up_TE.nbytes
    kernel = library.octavo_silu_mul if gate_up_TE.dtype == torch.bfloat16 else library.octavo_silu_mul_f32
    out_TI = gate_up_TE.new_empty(num_rows, dim)
    kernel(gate_up_TE.data_ptr(), out_TI.data_ptr(), num_rows, dim, threads_for(num_bytes))
    return out_TI


def rope_write(
    qkv_TC: torch.Tensor,
    cos_TH: torch.Tensor,
    sin_TH: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    k_pool_PKBH: torch.Tensor,
    v_pool_PKBH: torch.Tensor,
) -> torch.Tensor:
    """qkv_TC: rows of N query heads, K keys, K values. Writes rotated keys and values to their slots (int64; -1 is
    skipped), and returns the rotated queries [T, N, H]. bf16."""
    qkv_TC = qkv_TC.contiguous()
    num_rows, width = qkv_TC.shape
    num_kv_heads, block_size, head_dim = k_pool_PKBH.shape[1:]
    num_heads = width // head_dim - 2 * num_kv_heads
    require(cos_TH.shape == sin_TH.shape == (num_rows, head_dim), "cos_TH")
    require(slot_mapping_T.shape == (num_rows,) and slot_mapping_T.dtype == torch.int64, "slot_mapping_T")
    require(v_pool_PKBH.shape == k_pool_PKBH.shape and num_heads > 0, "v_pool_PKBH")
    for tensor in (cos_TH, sin_TH, slot_mapping_T, k_pool_PKBH, v_pool_PKBH):
        require(tensor.is_contiguous(), "strides")
    for tensor in (qkv_TC, cos_TH, sin_TH, k_pool_PKBH, v_pool_PKBH):
        require(tensor.dtype == torch.bfloat16, "dtype")
    q_TNH = qkv_TC.new_empty(num_rows, num_heads, head_dim)
    loaded_library().octavo_rope_write(
        qkv_TC.data_ptr(),
        cos_TH.data_ptr(),
        sin_TH.data_ptr(),
        slot_mapping_T.data_ptr(),
        q_TNH.data_ptr(),
        k_pool_PKBH.data_ptr(),
        v_pool_PKBH.data_ptr(),
        num_rows,
        num_heads,
        num_kv_heads,
        head_dim,
        block_size,
        threads_for(2 * num_rows * width),
    )
    return q_TNH


def decode_attention(
    q_SNH: torch.Tensor,
    k_pool_PKBH: torch.Tensor,
    v_pool_PKBH: torch.Tensor,
    table_SM: torch.Tensor,
    context_S: torch.Tensor,
    scale: float,
    *,
    max_context_len: int,
) -> torch.Tensor:
    """One new token per sequence, reading the blocks of its table row in place: nothing is gathered or padded.

    q_SNH, pools: bf16. table_SM, context_S: int32, contexts of at least 1. Raises MemoryError.
    """
    q_SNH, table_SM = q_SNH.contiguous(), table_SM.contiguous()
    num_rows, num_heads, head_dim = q_SNH.shape
    num_kv_heads, block_size = k_pool_PKBH.shape[1], k_pool_PKBH.shape[2]
    require_attention(q_SNH, k_pool_PKBH, v_pool_PKBH, table_SM, context_S, dtype=torch.bfloat16, multiple=2 * LANES)
    out_SNH = torch.empty_like(q_SNH)
    failed = loaded_library().octavo_decode_attention(
        q_SNH.data_ptr(),
        num_heads * head_dim,
        k_pool_PKBH.data_ptr(),
        v_pool_PKBH.data_ptr(),
        table_SM.data_ptr(),
        table_SM.shape[1],
        context_S.data_ptr(),
        out_SNH.data_ptr(),
        num_rows,
        num_heads,
        num_kv_heads,
        head_dim,
        block_size,
        scale,
        threads_for(4 * num_rows * num_kv_heads * head_dim * max_context_len),
    )
    if failed:
        raise MemoryError("no memory for the scores of a decode")
    return out_SNH


def threads_for(num_bytes: int) -> int:
    """How many threads are worthwhile for a pass over this many bytes."""
    return torch.get_num_threads() if num_bytes >= _ENOUGH_BYTES else 1


def threads_for_product(num_rows: int, num_bytes: int) -> int:
    """How many threads are worthwhile for a product of num_rows with weights of num_bytes: up to about eight rows, it
    takes as long as reading the weights."""
    return threads_for(num_bytes * (1 + num_rows // 8))


def largest(logits_SV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``max(dim=-1)``, by a kernel if there is one: the maxima most_S, and the lowest index_S (int64) of each. If a row
    has a NaN, most_S is NaN and index_S some valid index."""
    fits = logits_SV.is_cpu and logits_SV.dtype == torch.float32 and logits_SV.stride(1) == 1
    library = native_library() if fits else None  # compiling it takes seconds, in vain on a GPU
    if library is None:
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


MOST_DIM = 256
"""Of a head, in `chunk_attention`: as in prefill.c."""


def takes_chunks(pool_PKBH: torch.Tensor) -> bool:
    """Whether `chunk_attention` supports this cache."""
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
    """The last Q tokens of a context, each attending to all before it and itself; [Q, N, H]. table_M: int32, the
    context's blocks in order. bf16. Raises ValueError, MemoryError."""
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
