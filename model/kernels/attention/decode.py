"""Attention of one new token per sequence over its paged context, from the raw QKV product.

One kernel does everything after the QKV product: scale of the RMSNorm (its weight is folded into the matrix), bias and
norm of each query and key head (for families that have them: model/families), RoPE, the write of the new key and value
to the cache, and attention of all query heads of a KV head together (GQA, arXiv:2305.13245). Contexts are split into
chunks (model/kernels/attention/decode_work.py, split-KV as in Flash-Decoding); the program that finishes a sequence's
last chunk combines them, in chunk order, so that the sum does not depend on timing. Hopper devices use the kernel in
model/kernels/attention/decode_ring.py.

    cached tokens   |--- chunk 0 ---|--- chunk 1 ---|- chunk 2 -|new|      the last chunk also has the new token
    positions       0                                           p

Legend: B sequences of the batch · R rows of the state · M table width · N query heads · K kv heads · H head dim ·
C = (N + 2K)·H columns of the product · D model dim · P blocks · S block size · L positions of the RoPE table · W items.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from octavo.model.kernels.attention import decode_ring
from octavo.model.kernels.attention.decode_work import DecodeWork, FixedChunks, WorkLimits
from octavo.model.kernels.attention.paged_tile import add_tile, load_tile
from octavo.model.kernels.attention.rope_write import finished_heads
from octavo.model.kernels.checks import check_pools, check_tensor, next_power_of_2
from octavo.model.kernels.overlap import Overlap, start_next, wait_for_previous

COMBINED_ELEMENTS = 2048  # of partial results loaded at once: twice as many would double the registers
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTiles:
    """tokens: of a tile of keys and values. warps: of a program. stages: of its loop
    (model/kernels/attention/paged_tile.py)."""

    tokens: int = 64
    warps: int = 4
    stages: int = 3


DEFAULT_TILES = DecodeTiles()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeArgs:
    """Arguments that are the same for all layers of a step. position_R is the position of the new token: the number of
    cached tokens.

    cos_LH, sin_LH: float32 [L, H / 2]. overlap: with the kernels before and after it; the first cached keys and values
    are requested before the wait. partial_out: float32 [W, N, H]; partial_ml: float32 [W, N, 2] (maximum, sum).
    """

    rows_B: torch.Tensor
    position_R: torch.Tensor
    table_RM: torch.Tensor
    cos_LH: torch.Tensor
    sin_LH: torch.Tensor
    work: DecodeWork
    partial_out: torch.Tensor
    partial_ml: torch.Tensor
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    eps: float
    tiles: DecodeTiles = DEFAULT_TILES
    overlap: Overlap = Overlap.NONE


def partial_buffers(
    max_batch: int, num_heads: int, head_dim: int, device: torch.device | str, limits: WorkLimits | FixedChunks
) -> tuple[torch.Tensor, torch.Tensor]:
    """partial_out and partial_ml for up to max_batch sequences."""
    items = limits.capacity(max_batch)
    return (
        torch.empty(items, num_heads, head_dim, dtype=torch.float32, device=device),
        torch.empty(items, num_heads, 2, dtype=torch.float32, device=device),
    )


def decode_attention_reference(
    qkv_BC: torch.Tensor,
    x_BD: torch.Tensor,
    bias_C: torch.Tensor | None,
    k_pool_PKSH: torch.Tensor,
    v_pool_PKSH: torch.Tensor,
    args: DecodeArgs,
    qk_norm_2H: torch.Tensor | None = None,
) -> torch.Tensor:
    """The obvious reference in float32, one sequence after another. Writes the pools too; returns out_BNH, float32."""
    N, K, H = args.num_heads, args.num_kv_heads, args.head_dim
    out_BNH = torch.empty(len(qkv_BC), N, H)
    for b, row in enumerate(args.rows_B.tolist()):
        position = int(args.position_R[row])
        scale = torch.rsqrt(x_BD[b].float().square().mean() + args.eps)
        heads = finished_heads(qkv_BC[b].float() * scale, bias_C, qk_norm_2H, K, H, args.eps)
        q_NH, k_KH, v_KH = heads[:N], heads[N : N + K], heads[N + K :]
        cos_H, sin_H = args.cos_LH[position].repeat(2), args.sin_LH[position].repeat(2)

        def turn(h: torch.Tensor, cos_H: torch.Tensor = cos_H, sin_H: torch.Tensor = sin_H) -> torch.Tensor:
            first, second = h.chunk(2, dim=-1)
            return h * cos_H + torch.cat([-second, first], dim=-1) * sin_H

        block, offset = divmod(position, k_pool_PKSH.shape[2])
        k_pool_PKSH[args.table_RM[row, block], :, offset] = turn(k_KH).to(k_pool_PKSH.dtype)
        v_pool_PKSH[args.table_RM[row, block], :, offset] = v_KH.to(v_pool_PKSH.dtype)
        blocks = args.table_RM[row, : block + 1].long()
        for n in range(N):
            keys = k_pool_PKSH[blocks, n // (N // K)].reshape(-1, H)[: position + 1].float()
            values = v_pool_PKSH[blocks, n // (N // K)].reshape(-1, H)[: position + 1].float()
            weights = torch.softmax(keys @ turn(q_NH)[n] * args.scale, dim=0)
            out_BNH[b, n] = weights @ values
    return out_BNH


@triton.jit
def _row_scale(x_BD, b, eps, D: tl.constexpr, WIDTH: tl.constexpr):
    d = tl.arange(0, WIDTH)
    x = tl.load(x_BD + b * D + d, mask=d < D, other=0.0).to(tl.float32)
    return 1.0 / tl.sqrt(tl.sum(x * x, 0) / D + eps)


@triton.jit
def _turned(heads, partner, cos, sin):
    # partner holds the other half of each head; sin carries the sign of the first half.
    return heads * cos + partner * sin


@triton.jit
def _combined(
    partial_out, partial_ml, first, num_chunks, kv_head, is_head,
    N: tl.constexpr, G: tl.constexpr, H: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    # Combines all chunks of a sequence for one KV head's queries, in order: the weighted values and the sum of weights.
    m = tl.arange(0, GROUP)
    h = tl.arange(0, H)
    most = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    acc = tl.zeros([GROUP, H], tl.float32)
    step = tl.arange(0, STEP)
    for c in range(0, num_chunks, STEP):
        is_part = (c + step < num_chunks)[:, None] & is_head[None, :]
        parts = (first + c + step).to(tl.int64)[:, None] * N + (kv_head * G + m)[None, :]
        chunk_most = tl.load(partial_ml + parts * 2, mask=is_part, other=float("-inf"), cache_modifier=".cg")
        chunk_total = tl.load(partial_ml + parts * 2 + 1, mask=is_part, other=0.0, cache_modifier=".cg")
        acc_at = partial_out + parts[:, :, None] * H + h[None, None, :]
        chunk_acc = tl.load(acc_at, mask=is_part[:, :, None], other=0.0, cache_modifier=".cg")
        new_most = tl.maximum(most, tl.max(chunk_most, 0))
        base = tl.where(is_head, new_most, 0.0)
        shrink = tl.exp2(most - base)
        weight = tl.exp2(chunk_most - base[None, :])
        # Without the `where`, the product would be fused with the sum over lanes: rounded on one lane but not on the
        # other, so that the last bit would depend on which lane's copy of the sum is stored.
        total = total * shrink + tl.sum(tl.where(is_part, chunk_total * weight, 0.0), 0)
        parts_acc = tl.where(is_part[:, :, None], chunk_acc * weight[:, :, None], 0.0)
        acc = acc * shrink[:, None] + tl.sum(parts_acc, 0)
        most = new_most
    return acc, total


@triton.jit
def _loaded_item(item):
    # Row of the batch, row of the state, position of the new token; the chunk's begin, end and number, the number of
    # chunks of the sequence, and where its partial results begin.
    b = tl.load(item)
    row = tl.load(item + 1)
    position = tl.load(item + 2)
    begin = tl.load(item + 3)
    end = tl.load(item + 4)
    chunk = tl.load(item + 5)
    num_chunks = tl.load(item + 6)
    first = tl.load(item + 7)
    return b, row, position, begin, end, chunk, num_chunks, first


@triton.jit
def _query(
    qkv_BC, x_BD, bias_C, qk_norm_2H, b, q_at, q_mask, h, other_h, cos, sin, eps,
    C: tl.constexpr, D: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    # The group's query heads with bias, norm and RoPE, and the RMSNorm's scale. Biases are loaded first: they do not
    # depend on the product.
    if bias_C is not None:
        q_bias = tl.load(bias_C + q_at + h[None, :], mask=q_mask, other=0.0).to(tl.float32)
        q_other_bias = tl.load(bias_C + q_at + other_h[None, :], mask=q_mask, other=0.0).to(tl.float32)
    scale = _row_scale(x_BD, b, eps, D, WIDTH)
    qkv = qkv_BC + b.to(tl.int64) * C
    q = tl.load(qkv + q_at + h[None, :], mask=q_mask, other=0.0).to(tl.float32) * scale
    if bias_C is not None:
        q += q_bias
    q_other = tl.load(qkv + q_at + other_h[None, :], mask=q_mask, other=0.0).to(tl.float32) * scale
    if bias_C is not None:
        q_other += q_other_bias
    if qk_norm_2H is not None:
        q_inverse = (1.0 / tl.sqrt(tl.sum(q * q, 1) / H + eps))[:, None]
        q = q * q_inverse * tl.load(qk_norm_2H + h).to(tl.float32)[None, :]
        q_other = q_other * q_inverse * tl.load(qk_norm_2H + other_h).to(tl.float32)[None, :]
    return _turned(q, q_other, cos[None, :], sin[None, :]), scale, qkv


@triton.jit
def _new_key_and_value(qkv, bias_C, qk_norm_2H, k_at, v_at, h, other_h, cos, sin, scale, eps, k_pool, H: tl.constexpr):
    # The new token's, in the cache's dtype.
    k = tl.load(qkv + k_at + h).to(tl.float32) * scale
    if bias_C is not None:
        k += tl.load(bias_C + k_at + h).to(tl.float32)
    k_other = tl.load(qkv + k_at + other_h).to(tl.float32) * scale
    if bias_C is not None:
        k_other += tl.load(bias_C + k_at + other_h).to(tl.float32)
    if qk_norm_2H is not None:
        k_inverse = 1.0 / tl.sqrt(tl.sum(k * k, 0) / H + eps)
        k = k * k_inverse * tl.load(qk_norm_2H + H + h).to(tl.float32)
        k_other = k_other * k_inverse * tl.load(qk_norm_2H + H + other_h).to(tl.float32)
    k = _turned(k, k_other, cos, sin).to(k_pool.dtype.element_ty)
    new_value = tl.load(qkv + v_at + h).to(tl.float32) * scale
    if bias_C is not None:
        new_value += tl.load(bias_C + v_at + h).to(tl.float32)
    return k, new_value.to(k_pool.dtype.element_ty)


@triton.jit
def _decode_attention_kernel(
    qkv_BC, x_BD, bias_C, qk_norm_2H, k_pool, v_pool, out_BNH,
    table_RM, cos_LH, sin_LH, count_1, item_W8, arrived_BK, partial_out, partial_ml,
    table_width, log2_scale, eps,
    N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, S: tl.constexpr,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, STEP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    kv_head = tl.program_id(1)
    item = item_W8 + tl.program_id(0) * 8
    num_items = tl.load(count_1)
    b, row, position, begin, end, chunk, num_chunks, first = _loaded_item(item)
    if tl.program_id(0) >= num_items:
        return
    G: tl.constexpr = N // K
    C: tl.constexpr = (N + 2 * K) * H
    table = table_RM + row.to(tl.int64) * table_width
    element = qkv_BC.dtype.element_ty

    m = tl.arange(0, GROUP)
    h = tl.arange(0, H)
    is_head = m < G
    other_h = (h + H // 2) % H
    cos = tl.load(cos_LH + position * (H // 2) + h % (H // 2))
    sin = tl.load(sin_LH + position * (H // 2) + h % (H // 2)) * tl.where(h < H // 2, -1.0, 1.0)

    q_at = ((kv_head * G + m) * H)[:, None]
    q_mask = is_head[:, None] & (h >= 0)[None, :]
    keys, values, has = load_tile(k_pool, v_pool, table, begin, end, kv_head, K, H, S, TILE)
    wait_for_previous(PDL)
    q, scale, qkv = _query(qkv_BC, x_BD, bias_C, qk_norm_2H, b, q_at, q_mask, h, other_h, cos, sin, eps, C, D, H, WIDTH)
    q = (q * log2_scale).to(element)
    most = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    acc = tl.zeros([GROUP, H], tl.float32)

    if chunk == num_chunks - 1:
        k, v = _new_key_and_value(
            qkv, bias_C, qk_norm_2H, (N + kv_head) * H, (N + K + kv_head) * H, h, other_h, cos, sin, scale, eps,
            k_pool, H,
        )  # fmt: skip
        block = tl.load(table + position // S).to(tl.int64)
        at = ((block * K + kv_head) * S + position % S) * H + h
        tl.store(k_pool + at, k)
        tl.store(v_pool + at, v)
        most = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], 1)
        total = tl.full([GROUP], 1.0, tl.float32)
        acc += v.to(tl.float32)[None, :]

    acc, most, total = add_tile(acc, most, total, q, keys, values, has)
    for start in tl.range(begin + TILE, end, TILE, num_stages=STAGES):
        keys, values, has = load_tile(k_pool, v_pool, table, start, end, kv_head, K, H, S, TILE)
        acc, most, total = add_tile(acc, most, total, q, keys, values, has)

    out_at = b.to(tl.int64) * N * H + q_at + h[None, :]
    if num_chunks == 1:
        tl.store(out_BNH + out_at, (acc / total[:, None]).to(out_BNH.dtype.element_ty), mask=q_mask)
        return
    head = (first + chunk).to(tl.int64) * N + kv_head * G + m
    tl.store(partial_out + head[:, None] * H + h[None, :], acc, mask=q_mask)
    tl.store(partial_ml + head * 2, most, mask=is_head)
    tl.store(partial_ml + head * 2 + 1, total, mask=is_head)
    # The barrier orders every thread's stores before the one atomic that releases them.
    tl.debug_barrier()
    if tl.atomic_add(arrived_BK + b * K + kv_head, 1, sem="acq_rel") < num_chunks - 1:
        return
    tl.store(arrived_BK + b * K + kv_head, 0)
    acc, total = _combined(partial_out, partial_ml, first, num_chunks, kv_head, is_head, N, G, H, GROUP, STEP)
    total = tl.where(is_head, total, 1.0)
    tl.store(out_BNH + out_at, (acc / total[:, None]).to(out_BNH.dtype.element_ty), mask=q_mask)


def decode_attention(
    qkv_BC: torch.Tensor,
    x_BD: torch.Tensor,
    bias_C: torch.Tensor | None,
    k_pool_PKSH: torch.Tensor,
    v_pool_PKSH: torch.Tensor,
    out_BNH: torch.Tensor,
    args: DecodeArgs,
    qk_norm_2H: torch.Tensor | None = None,
) -> None:
    """Write the new keys and values, and the attention of each sequence's new token to out_BNH.

    qkv_BC: x_BD @ W^T with the norm's weight in W, without scale and bias. bias_C, qk_norm_2H: None if the family has
    none; the norm's weights are those of queries, then of keys. args.work must be planned for these rows. All of one
    dtype (float32, float16, bfloat16), except that pools may be e4m3. Raises ValueError if a tensor does not fit.
    """
    (B,) = args.rows_B.shape
    N, K, H = args.num_heads, args.num_kv_heads, args.head_dim
    dtype, S = qkv_BC.dtype, k_pool_PKSH.shape[2]
    check_tensor("qkv_BC", qkv_BC, shape=(B, (N + 2 * K) * H), dtype=dtype)
    check_tensor("x_BD", x_BD, shape=(B, None), dtype=dtype)
    if bias_C is not None:
        check_tensor("bias_C", bias_C, shape=((N + 2 * K) * H,), dtype=dtype)
    if qk_norm_2H is not None:
        check_tensor("qk_norm_2H", qk_norm_2H, shape=(2, H), dtype=dtype)
    check_pools(k_pool_PKSH, v_pool_PKSH, shape=(None, K, S, H), dtype=dtype)
    check_tensor("out_BNH", out_BNH, shape=(B, N, H), dtype=dtype)
    if N % K or H & (H - 1) or H < 16:
        raise ValueError(f"{N} heads over {K} KV heads of {H}: need whole groups and a power of two from 16")
    work, D, tiles, group = args.work, x_BD.shape[1], args.tiles, max(16, next_power_of_2(N // K))
    kernel: Any = _decode_attention_kernel
    settings: dict[str, Any] = {
        "GROUP": group, "TILE": tiles.tokens, "STAGES": tiles.stages, "STEP": max(1, COMBINED_ELEMENTS // (group * H)),
        "num_warps": tiles.warps,
    }  # fmt: skip
    if decode_ring.is_faster(qkv_BC, k_pool_PKSH, N):
        kernel = decode_ring.ring_attention_kernel
        settings = decode_ring.settings_of(N, K, H, k_pool_PKSH.element_size())
    kernel[(work.limits.capacity(B), K)](
        qkv_BC, x_BD, bias_C, qk_norm_2H, k_pool_PKSH, v_pool_PKSH, out_BNH,
        args.table_RM, args.cos_LH, args.sin_LH,
        work.count_1, work.item_W8, work.arrived_BK, args.partial_out, args.partial_ml,
        args.table_RM.shape[1], args.scale * LOG2_E, args.eps,
        N=N, K=K, H=H, D=D, S=S, WIDTH=next_power_of_2(D), PDL=args.overlap.value, launch_pdl=args.overlap.value,
        **settings,
    )  # fmt: skip
