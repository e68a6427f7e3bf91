"""Attention of deterministic mode on Hopper GPUs: prompts by warp groups (warp_groups.py), decodes by a kernel of their
own (invariant_ring.py), with the same bits for a token either way.

If these do not fit or do not compile, one kernel does both (invariant.py), with different bits: a worker uses one of
the two for all its tokens.

Legend: T tokens · B sequences · N query heads · K kv heads · H head dim · C = (N + 2K)·H · D model dim · R rows of the
state · M table width · P blocks · S block size · W tiles. Must not know: layers.
"""

import warnings
from functools import cache
from typing import Any

import torch

from octavo.model.kernels.attention import prefill_hopper
from octavo.model.kernels.attention.decode import LOG2_E, DecodeArgs
from octavo.model.kernels.attention.decode_work import DecodeWork, FixedChunks
from octavo.model.kernels.attention.invariant_ring import ring_kernel, write_heads_kernel
from octavo.model.kernels.checks import check_pools, check_tensor, next_power_of_2
from octavo.model.kernels.precompile import is_compiling

CHUNK_TOKENS = 256
"""Tokens of a chunk of a context."""
TILE = 128
ROOMS = 3
"""Buffers in shared memory, each for a tile's keys or its values."""
GROUP = 16
"""Query heads of a KV head, padded to the rows of the matrix instruction."""
WARPS = 4
REGISTERS = {64: 128, 128: 255}
"""The most of a thread, by head dim: for four programs on a multiprocessor, or for two."""
TARGET_PROGRAMS, PROGRAMS_OF_SEQUENCE = 396, 2
"""The least programs of a launch, and those per sequence and KV head; there are about as many items."""
MERGED_AT_ONCE = 8


def fits(q_TNH: torch.Tensor, k_pool_PKSH: torch.Tensor) -> bool:
    """Whether a worker with queries and pools like these should use these kernels: both compile there."""
    num_heads, num_kv_heads = q_TNH.shape[1], k_pool_PKSH.shape[1]
    work = _works_on.__wrapped__ if is_compiling() else _works_on  # not cached while the answer is provisional
    return (
        prefill_hopper.fits(q_TNH, k_pool_PKSH)
        and num_heads // num_kv_heads <= GROUP
        and work(q_TNH.device, q_TNH.dtype, num_heads, num_kv_heads, k_pool_PKSH.shape[2], k_pool_PKSH.shape[3])
    )


def chunks_of(num_kv_heads: int, max_context: int) -> FixedChunks:
    """How contexts of up to max_context tokens are split."""
    return FixedChunks(
        tokens=CHUNK_TOKENS, max_context=max_context, target_items=max(1, TARGET_PROGRAMS // num_kv_heads)
    )


@cache
def _works_on(device: torch.device, dtype: torch.dtype, N: int, K: int, S: int, H: int) -> bool:
    """Whether the kernels compile: Gluon is experimental. The decodes' kernel is compiled here by a launch without
    work."""
    q, pool = torch.zeros(1, N, H, dtype=dtype, device=device), torch.zeros(2, K, S, H, dtype=dtype, device=device)
    nobody, table = (
        torch.zeros(1, 4, dtype=torch.int32, device=device),
        torch.zeros(1, 1, dtype=torch.int32, device=device),
    )
    position, row = torch.zeros(1, dtype=torch.int32, device=device), -torch.ones(1, dtype=torch.int32, device=device)
    qkv, x = q.new_zeros(1, (N + 2 * K) * H), q.new_zeros(1, H)
    angle, none = torch.zeros(1, H // 2, device=device), torch.zeros(1, device=device)
    args = DecodeArgs(
        rows_B=position, position_R=position, table_RM=table, cos_LH=angle, sin_LH=angle,
        work=DecodeWork.allocate(1, K, device, chunks_of(K, 1)),
        partial_out=none, partial_ml=none, num_heads=N, num_kv_heads=K, head_dim=H, scale=1.0, eps=1.0,
    )  # fmt: skip
    try:
        attend_decodes(qkv, x, None, pool, pool, q, args)
        write_heads(qkv, x, None, q, pool, pool, row, position, table, angle, angle, 1.0)
    except Exception as error:  # whatever the compiler raises
        warnings.warn(f"deterministic mode takes its plain attention: a kernel failed: {error!r}", stacklevel=2)
        return False
    return prefill_hopper.attend(q, pool, pool, q, table, nobody, 1.0, chunk_tokens=CHUNK_TOKENS)


def attend_decodes(
    qkv_BC: torch.Tensor,
    x_BD: torch.Tensor,
    bias_C: torch.Tensor | None,
    k_pool_PKSH: torch.Tensor,
    v_pool_PKSH: torch.Tensor,
    out_BNH: torch.Tensor,
    args: DecodeArgs,
    qk_norm_2H: torch.Tensor | None = None,
) -> None:
    """`decode.decode_attention` with contexts split at absolute positions: args.work must have `FixedChunks` of
    CHUNK_TOKENS. All of one 16-bit dtype. Raises ValueError if a tensor does not fit."""
    (B,), N, K, H = args.rows_B.shape, args.num_heads, args.num_kv_heads, args.head_dim
    dtype, S, D = qkv_BC.dtype, k_pool_PKSH.shape[2], x_BD.shape[1]
    check_tensor("qkv_BC", qkv_BC, shape=(B, (N + 2 * K) * H), dtype=dtype)
    check_tensor("x_BD", x_BD, shape=(B, None), dtype=dtype)
    _check_heads(bias_C, qk_norm_2H, (N + 2 * K) * H, H, dtype)
    check_tensor("k_pool_PKSH", k_pool_PKSH, shape=(None, K, S, H), dtype=dtype)
    check_tensor("v_pool_PKSH", v_pool_PKSH, shape=tuple(k_pool_PKSH.shape), dtype=dtype)
    check_tensor("out_BNH", out_BNH, shape=(B, N, H), dtype=dtype)
    work, limits = args.work, args.work.limits
    if not isinstance(limits, FixedChunks) or limits.tokens != CHUNK_TOKENS:
        raise ValueError(f"args.work is planned by {limits}, not in chunks of {CHUNK_TOKENS} tokens")
    programs = min(limits.capacity(B), max(TARGET_PROGRAMS // K, PROGRAMS_OF_SEQUENCE * B))
    ring_kernel[(programs, K)](
        qkv_BC, x_BD, bias_C, qk_norm_2H, k_pool_PKSH, v_pool_PKSH, out_BNH,
        args.table_RM, args.cos_LH, args.sin_LH,
        work.count_1, work.item_W8, work.arrived_BK, args.partial_out, args.partial_ml,
        args.table_RM.shape[1], args.scale * LOG2_E, args.eps,
        D=D, S=S, WIDTH=next_power_of_2(D), PDL=args.overlap.value, launch_pdl=args.overlap.value,
        **settings_of(N, K, H, dtype.itemsize),
    )  # fmt: skip


def settings_of(num_heads: int, num_kv_heads: int, head_dim: int, element_size: int) -> dict[str, Any]:
    """The constants of the decodes' kernel other than the step's, and its launch options."""
    return {
        "N": num_heads, "K": num_kv_heads, "H": head_dim, "GROUP": GROUP,
        "FEW": next_power_of_2(num_heads // num_kv_heads), "TILE": TILE,
        "ROOMS": ROOMS, "SUMS": prefill_hopper.FORMS[head_dim].sums,
        "CHUNK": CHUNK_TOKENS, "AT_ONCE": MERGED_AT_ONCE,
        "WARPS": WARPS, "VECTOR": 16 // element_size, "PHASE": max(1, 128 // (head_dim * element_size)),
        "num_warps": WARPS, "maxnreg": REGISTERS[head_dim],
    }  # fmt: skip


def attend_prompts(
    q_TNH: torch.Tensor,
    k_pool_PKSH: torch.Tensor,
    v_pool_PKSH: torch.Tensor,
    out_TNH: torch.Tensor,
    table_RM: torch.Tensor,
    tiles_W4: torch.Tensor,
    scale: float,
) -> None:
    """`prefill.prefill_attention` for checked tensors that fit, in chunks at absolute positions."""
    if not prefill_hopper.attend(
        q_TNH, k_pool_PKSH, v_pool_PKSH, out_TNH, table_RM, tiles_W4, scale * LOG2_E, chunk_tokens=CHUNK_TOKENS
    ):
        raise ValueError("the kernel of warp groups does not take these tensors, though it did at start")


def write_heads(
    qkv_TC: torch.Tensor,
    x_TD: torch.Tensor,
    bias_C: torch.Tensor | None,
    q_TNH: torch.Tensor,
    k_pool_PKSH: torch.Tensor,
    v_pool_PKSH: torch.Tensor,
    row_T: torch.Tensor,
    position_T: torch.Tensor,
    table_RM: torch.Tensor,
    cos_LH: torch.Tensor,
    sin_LH: torch.Tensor,
    eps: float,
    qk_norm_2H: torch.Tensor | None = None,
) -> None:
    """`rope_write.rope_write` with the same bits as decodes. All of one 16-bit dtype.

    Raises ValueError if a tensor does not fit.
    """
    T, N, H = q_TNH.shape
    K, S, dtype, D = k_pool_PKSH.shape[1], k_pool_PKSH.shape[2], q_TNH.dtype, x_TD.shape[1]
    check_tensor("qkv_TC", qkv_TC, shape=(T, (N + 2 * K) * H), dtype=dtype)
    check_tensor("x_TD", x_TD, shape=(T, None), dtype=dtype)
    _check_heads(bias_C, qk_norm_2H, (N + 2 * K) * H, H, dtype)
    check_pools(k_pool_PKSH, v_pool_PKSH, shape=(None, K, S, H), dtype=dtype)
    check_tensor("row_T", row_T, shape=(T,), dtype=torch.int32)
    check_tensor("position_T", position_T, shape=(T,), dtype=torch.int32)
    write_heads_kernel[(T,)](
        qkv_TC, x_TD, bias_C, qk_norm_2H, q_TNH, k_pool_PKSH, v_pool_PKSH, row_T, position_T, table_RM, cos_LH, sin_LH,
        table_RM.shape[1], eps,
        N=N, K=K, H=H, D=D, S=S, WIDTH=next_power_of_2(D), GROUP=GROUP, WARPS=WARPS, num_warps=WARPS,
    )  # fmt: skip


def _check_heads(
    bias_C: torch.Tensor | None, qk_norm_2H: torch.Tensor | None, num_columns: int, H: int, dtype: torch.dtype
) -> None:
    if bias_C is not None:
        check_tensor("bias_C", bias_C, shape=(num_columns,), dtype=dtype)
    if qk_norm_2H is not None:
        check_tensor("qk_norm_2H", qk_norm_2H, shape=(2, H), dtype=dtype)
