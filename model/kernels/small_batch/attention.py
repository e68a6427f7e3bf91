"""Attention of a few rows over their paged context, split into many short parts, so that few rows fill the device.

Queries and the new key and value come from model/kernels/small_batch/qkv.py. Each row's context is split into at most
MAX_SPLITS parts of equal length; each program writes its part's weighted average of values and the logarithm of its
weight, and `combine` adds them up. The first tile of keys and values, all of it from earlier steps, is loaded before
the kernel waits for the queries; into registers, since the kernels that follow load their weights into shared memory
meanwhile.

    cached tokens   |-- part 0 --|-- part 1 --|-- part 2 |new|         the last part also has the new token

Legend: B sequences · R rows of the state · M table width · N query heads · K kv heads · H head dim · P blocks ·
S block size · W parts at most.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from octavo.model.kernels.attention.paged_tile import add_tile, load_tile
from octavo.model.kernels.checks import check_pools, check_tensor, next_power_of_2
from octavo.model.kernels.overlap import Overlap, start_next, wait_for_previous

MAX_SPLITS = 64
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCut:
    """grain: parts are whole multiples of this many tokens, which is also the tile of the shortest parts. tile: tokens
    of a tile of longer parts. warps: of a program. stages: of the loop over the tiles after the first; 1 has no buffer,
    3 have one (model/kernels/attention/paged_tile.py)."""

    grain: int = 64
    tile: int = 64
    warps: int = 4
    stages: int = 3


def split_buffers(
    max_batch: int, num_heads: int, head_dim: int, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """part_BWNH and log_BWN, float32, for up to max_batch rows."""
    shape = (max_batch, MAX_SPLITS, num_heads)
    return (
        torch.empty(*shape, head_dim, dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
    )


def cut_context(position: int, grain: int) -> tuple[int, int]:
    """(tokens of a part, number of parts) of a row with this many cached tokens."""
    grains = -(-position // grain)
    chunk = max(1, -(-grains // MAX_SPLITS)) * grain
    return chunk, max(1, -(-position // chunk))


def small_batch_attention_reference(
    q_BNH: torch.Tensor,
    k_pool_PKSH: torch.Tensor,
    v_pool_PKSH: torch.Tensor,
    rows_B: torch.Tensor,
    position_R: torch.Tensor,
    table_RM: torch.Tensor,
    scale: float,
    grain: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The obvious reference in float32: part_BWNH and log_BWN (base 2), NaN for parts that a row does not have."""
    B, N, H = q_BNH.shape
    K, S = k_pool_PKSH.shape[1:3]
    parts, logs = torch.full((B, MAX_SPLITS, N, H), float("nan")), torch.full((B, MAX_SPLITS, N), float("nan"))
    for b, row in enumerate(rows_B.tolist()):
        position = int(position_R[row])
        chunk, count = cut_context(position, grain)
        blocks = table_RM[row, : position // S + 1].long()
        for w in range(count):
            part = slice(w * chunk, (w + 1) * chunk if w + 1 < count else position + 1)
            for n in range(N):
                keys = k_pool_PKSH[blocks, n // (N // K)].reshape(-1, H)[part].float()
                values = v_pool_PKSH[blocks, n // (N // K)].reshape(-1, H)[part].float()
                scores = keys @ q_BNH[b, n].float() * scale
                parts[b, w, n] = torch.softmax(scores, dim=0) @ values
                logs[b, w, n] = torch.logsumexp(scores, dim=0) * LOG2_E
    return parts, logs


@triton.jit
def num_parts(position, SPLITS: tl.constexpr, GRAIN: tl.constexpr):
    """(tokens of a part, number of parts), as `cut_context`."""
    chunk = tl.maximum(tl.cdiv(tl.cdiv(position, GRAIN), SPLITS), 1) * GRAIN
    return chunk, tl.maximum(tl.cdiv(position, chunk), 1)


@triton.jit
def _attend_part(
    q_BNH, k_pool, v_pool, part_BWNH, log_BWN, table, position, log2_scale, b, split, kv_head, chunk, count,
    N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, S: tl.constexpr, GROUP: tl.constexpr,
    SPLITS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Waits for the queries once the first tile has been requested."""
    G: tl.constexpr = N // K
    start = split * chunk
    end = tl.minimum(start + chunk, position)
    keys, values, has = load_tile(k_pool, v_pool, table, start, end, kv_head, K, H, S, TILE)
    m = tl.arange(0, GROUP)
    h = tl.arange(0, H)
    head = kv_head * G + m
    is_head = m < G
    q_mask = is_head[:, None] & (h >= 0)[None, :]
    new_at = (tl.load(table + position // S).to(tl.int64) * K + kv_head) * S + position % S
    wait_for_previous(PDL)
    q = tl.load(q_BNH + (b * N + head)[:, None] * H + h[None, :], mask=q_mask, other=0.0).to(tl.float32) * log2_scale
    q = q.to(q_BNH.dtype.element_ty)
    most = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    acc = tl.zeros([GROUP, H], tl.float32)
    if split == count - 1:
        key = tl.load(k_pool + new_at * H + h).to(tl.float32)
        value = tl.load(v_pool + new_at * H + h).to(tl.float32)
        most = tl.sum(q.to(tl.float32) * key[None, :], 1)
        total = tl.full([GROUP], 1.0, tl.float32)
        acc += value[None, :]
    acc, most, total = add_tile(acc, most, total, q, keys, values, has)
    for begin_at in tl.range(start + TILE, end, TILE, num_stages=STAGES):
        keys, values, has = load_tile(k_pool, v_pool, table, begin_at, end, kv_head, K, H, S, TILE)
        acc, most, total = add_tile(acc, most, total, q, keys, values, has)
    at = (b * SPLITS + split) * N + head
    tl.store(part_BWNH + at[:, None] * H + h[None, :], acc / total[:, None], mask=q_mask)
    tl.store(log_BWN + at, most + tl.log2(total), mask=is_head)


@triton.jit
def _small_batch_attention_kernel(
    q_BNH, k_pool, v_pool, part_BWNH, log_BWN, rows_B, position_R, table_RM, table_width, log2_scale,
    N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, S: tl.constexpr, GROUP: tl.constexpr,
    SPLITS: tl.constexpr, GRAIN: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    b = tl.program_id(2)
    row = tl.load(rows_B + b)
    position = tl.load(position_R + row)
    chunk, count = num_parts(position, SPLITS, GRAIN)
    if split >= count:
        return  # without waiting, which would occupy resources that later kernels need; part 0 waits instead
    table = table_RM + row.to(tl.int64) * table_width
    if GRAIN < TILE and chunk == GRAIN:  # a short context does not need a longer tile, which would only take time
        _attend_part(
            q_BNH, k_pool, v_pool, part_BWNH, log_BWN, table, position, log2_scale, b, split, kv_head, chunk, count,
            N, K, H, S, GROUP, SPLITS, GRAIN, STAGES, PDL,
        )  # fmt: skip
    else:
        _attend_part(
            q_BNH, k_pool, v_pool, part_BWNH, log_BWN, table, position, log2_scale, b, split, kv_head, chunk, count,
            N, K, H, S, GROUP, SPLITS, TILE, STAGES, PDL,
        )  # fmt: skip


def small_batch_attention(
    q_BNH: torch.Tensor,
    k_pool_PKSH: torch.Tensor,
    v_pool_PKSH: torch.Tensor,
    part_BWNH: torch.Tensor,
    log_BWN: torch.Tensor,
    rows_B: torch.Tensor,
    position_R: torch.Tensor,
    table_RM: torch.Tensor,
    scale: float,
    *,
    cut: AttentionCut,
    overlap: Overlap,
) -> None:
    """Attention of each row's parts; position_R is the new token's position, whose key and value are in the pools.

    q and pools of one dtype, rows_B, position_R, table_RM int32, part_BWNH and log_BWN float32 (`split_buffers`).
    Raises ValueError if a tensor does not fit.
    """
    B, N, H = q_BNH.shape
    K, S, dtype = k_pool_PKSH.shape[1], k_pool_PKSH.shape[2], q_BNH.dtype
    check_tensor("q_BNH", q_BNH, shape=(B, N, H), dtype=dtype)
    check_pools(k_pool_PKSH, v_pool_PKSH, shape=(None, K, S, H), dtype=dtype)
    check_tensor("part_BWNH", part_BWNH, shape=(None, MAX_SPLITS, N, H), dtype=torch.float32)
    check_tensor("log_BWN", log_BWN, shape=(len(part_BWNH), MAX_SPLITS, N), dtype=torch.float32)
    check_tensor("rows_B", rows_B, shape=(B,), dtype=torch.int32)
    check_tensor("table_RM", table_RM, shape=(len(position_R), None), dtype=torch.int32)
    if N % K or H & (H - 1) or H < 16 or len(part_BWNH) < B:
        raise ValueError(f"{B} rows of {N} heads over {K} KV heads of {H} do not fit the kernel or its buffers")
    most_parts = min(MAX_SPLITS, triton.cdiv(table_RM.shape[1] * S, cut.grain))
    # Heads vary faster than parts in the grid, so that the parts that a context has are started first.
    _small_batch_attention_kernel[(K, most_parts, B)](
        q_BNH, k_pool_PKSH, v_pool_PKSH, part_BWNH, log_BWN, rows_B, position_R, table_RM, table_RM.shape[1],
        scale * LOG2_E,
        N=N, K=K, H=H, S=S, GROUP=max(16, next_power_of_2(N // K)), SPLITS=MAX_SPLITS, GRAIN=cut.grain,
        TILE=cut.tile, STAGES=cut.stages, PDL=overlap.value, num_warps=cut.warps, launch_pdl=overlap.value,
    )  # fmt: skip


# Adds up the parts of attention: one program per head of a row.
#
# It is a kernel of its own, since adding up in every program of the output product cost more at any context
# (bench/RESULTS.md).
#
# Legend: B sequences · R rows of the state · W parts at most · N query heads · H head dim.


def combine_reference(
    part_BWNH: torch.Tensor, log_BWN: torch.Tensor, rows_B: torch.Tensor, position_R: torch.Tensor, grain: int
) -> torch.Tensor:
    """The obvious reference of `combine`: float32 [B, N, H]."""
    rows = []
    for b, row in enumerate(rows_B.tolist()):
        count = cut_context(int(position_R[row]), grain)[1]
        weight_WN = torch.softmax(log_BWN[b, :count] / 1.4426950408889634, dim=0)
        rows.append((weight_WN[:, :, None] * part_BWNH[b, :count]).sum(dim=0))
    return torch.stack(rows)


@triton.jit
def _combine_kernel(
    part_BWNH, log_BWN, out_BNH, rows_B, position_R,
    N: tl.constexpr, H: tl.constexpr, SPLITS: tl.constexpr, GRAIN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    n = tl.program_id(0)
    b = tl.program_id(1)
    w = tl.arange(0, SPLITS)
    h = tl.arange(0, H)
    _, count = num_parts(tl.load(position_R + tl.load(rows_B + b)), SPLITS, GRAIN)
    at = (b * SPLITS + w) * N + n
    wait_for_previous(PDL)
    log = tl.load(log_BWN + at, mask=w < count, other=float("-inf"))
    part = tl.load(part_BWNH + at[:, None] * H + h[None, :], mask=(w < count)[:, None], other=0.0)
    weight = tl.exp2(log - tl.max(log, 0))
    out = tl.sum(weight[:, None] * part, 0) / tl.sum(weight, 0)
    tl.store(out_BNH + (b * N + n) * H + h, out.to(out_BNH.dtype.element_ty))


def combine(
    part_BWNH: torch.Tensor,
    log_BWN: torch.Tensor,
    out_BNH: torch.Tensor,
    rows_B: torch.Tensor,
    position_R: torch.Tensor,
    *,
    grain: int,
    overlap: Overlap,
) -> None:
    """out_BNH = the sum of the parts of each row's attention. grain: parts are whole multiples of this many tokens.

    Raises ValueError if a tensor does not fit.
    """
    B, N, H = out_BNH.shape
    check_tensor("part_BWNH", part_BWNH, shape=(None, MAX_SPLITS, N, H), dtype=torch.float32)
    check_tensor("log_BWN", log_BWN, shape=(len(part_BWNH), MAX_SPLITS, N), dtype=torch.float32)
    check_tensor("rows_B", rows_B, shape=(B,), dtype=torch.int32)
    check_tensor("position_R", position_R, shape=(None,), dtype=torch.int32)
    if len(part_BWNH) < B:
        raise ValueError(f"part_BWNH is for {len(part_BWNH)} rows, not {B}")
    check_tensor("out_BNH", out_BNH, shape=(B, N, H), dtype=out_BNH.dtype)
    _combine_kernel[(N, B)](
        part_BWNH, log_BWN, out_BNH, rows_B, position_R,
        N=N, H=H, SPLITS=MAX_SPLITS, GRAIN=grain, PDL=overlap.value,
        num_warps=4, launch_pdl=overlap.value,
    )  # fmt: skip
