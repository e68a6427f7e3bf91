"""Causal attention of prompt chunks over their paged context: cached prefix and chunk alike, through the block table.

FlashAttention-2's loop (arXiv:2307.08691): a program takes one tile of queries of one head and streams the keys and
values of its context, which are all in the cache already. Tiles are listed by the host, which knows every chunk.

    context of a tile   |------ all queries see these ------|-- each query sees up to itself --|
    positions           0                                   position                   position + count

Hopper GPUs have another kernel for most cases (prefill_hopper.py).

Legend: T tokens · N query heads · K kv heads · H head dim · R rows of the state · M table width · P blocks · S block
size · W tiles.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from octavo.model.kernels.attention import prefill_hopper
from octavo.model.kernels.checks import check_pools, check_tensor
from octavo.model.kernels.overlap import Overlap, start_next, wait_for_previous

QUERY_TILE = 128
MAX_INT = 2**31
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTiles:
    """keys: of a tile. warps: of a program. stages: how many tiles are in flight at once."""

    keys: int = 64
    warps: int
    stages: int = 3

    @classmethod
    def of(cls, head_dim: int, number_bytes: int = 2) -> "PrefillTiles":
        """The fastest tiles of this kernel on an H100 (bench/RESULTS.md); for the widest heads and float32, those that
        fit into a device's memory. number_bytes: bytes of a query's number."""
        if number_bytes > 2:
            return cls(keys=32, warps=4) if head_dim <= 64 else cls(keys=16, warps=8, stages=2)
        return cls(keys=64 if head_dim <= 128 else 32, warps=8) if head_dim > 64 else cls(keys=128, warps=4)


def list_tiles(chunks: Iterable[tuple[int, int, int, int]]) -> np.ndarray:
    """int32 [W, 4] tiles (row, first token, position of that token, count) from chunks of the same form.

    Longest contexts come first, so that the device's last wave is short.
    """
    tiles = [
        (row, token + done, position + done, min(QUERY_TILE, count - done))
        for row, token, position, count in chunks
        for done in range(0, count, QUERY_TILE)
    ]
    tiles.sort(key=lambda tile: -(tile[2] + tile[3]))
    return np.asarray(tiles, np.int32).reshape(-1, 4)


def list_last_tiles(chunks: Iterable[tuple[int, int, int, int]]) -> np.ndarray:
    """Of `list_tiles`, the tile of each chunk's last token: the same tile, so the same bits."""
    return list_tiles(
        (row, token + done, position + done, count - done)
        for row, token, position, count in chunks
        for done in [(count - 1) // QUERY_TILE * QUERY_TILE]
    )


def prefill_attention_reference(
    q_TNH: torch.Tensor,
    k_pool_PKSH: torch.Tensor,
    v_pool_PKSH: torch.Tensor,
    table_RM: torch.Tensor,
    tiles_W4: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """The obvious reference in float32, query by query; rows of q without a tile stay NaN."""
    T, N, H = q_TNH.shape
    K, S = k_pool_PKSH.shape[1:3]
    out_TNH = torch.full((T, N, H), float("nan"))
    for row, first, position, count in tiles_W4.tolist():
        blocks = table_RM[row, : (position + count - 1) // S + 1].long()
        for i in range(count):
            for n in range(N):
                keys = k_pool_PKSH[blocks, n // (N // K)].reshape(-1, H)[: position + i + 1].float()
                values = v_pool_PKSH[blocks, n // (N // K)].reshape(-1, H)[: position + i + 1].float()
                out_TNH[first + i, n] = torch.softmax(keys @ q_TNH[first + i, n].float() * scale, dim=0) @ values
    return out_TNH


@triton.jit
def _stream(
    acc, most, total, q, table, k_pool, v_pool, kv_head, begin, end, query_position,
    K: tl.constexpr, H: tl.constexpr, S: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    OFFSET: tl.constexpr, IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    # Blocks are looked up one tile ahead: loads that depend on a load of the same round would cost the compiler's
    # pipeline one of its buffers. Without the causal mask there are only whole tiles.
    h = tl.arange(0, H)
    key = tl.arange(0, KEYS)
    block = tl.load(table + (begin + key) // S, mask=begin + key < end, other=0).to(OFFSET)
    for start in tl.range(begin, end, KEYS, num_stages=STAGES):
        token = start + key
        has = token < end
        at = (block * K + kv_head) * (S * H) + token % S * H
        ahead = token + KEYS
        block = tl.load(table + ahead // S, mask=ahead < end, other=0).to(OFFSET)
        if IS_CAUSAL:
            keys = tl.load(k_pool + at[:, None] + h[None, :], mask=has[:, None], other=0.0)
            values = tl.load(v_pool + at[:, None] + h[None, :], mask=has[:, None], other=0.0)
        else:
            keys = tl.load(k_pool + at[:, None] + h[None, :])
            values = tl.load(v_pool + at[:, None] + h[None, :])
        score = tl.dot(q, tl.trans(keys.to(q.dtype)), input_precision="ieee")
        if IS_CAUSAL:
            score = tl.where(has[None, :] & (token[None, :] <= query_position[:, None]), score, float("-inf"))
        new_most = tl.maximum(most, tl.max(score, 1))
        # A query that comes before the tile's keys has seen none yet: no maximum to subtract.
        base = tl.where(new_most == float("-inf"), 0.0, new_most)
        shrink = tl.exp2(most - base)
        weight = tl.exp2(score - base[:, None])
        total = total * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None] + tl.dot(weight.to(q.dtype), values.to(q.dtype), input_precision="ieee")
        most = new_most
    return acc, most, total


@triton.jit
def _prefill_attention_kernel(
    q_TNH, k_pool, v_pool, out_TNH, table_RM, tiles_W4, table_width, log2_scale,
    N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, S: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    STAGES: tl.constexpr, OFFSET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    wait_for_previous(PDL)
    n = tl.program_id(0)
    tile = tiles_W4 + tl.program_id(1) * 4
    row = tl.load(tile)
    first = tl.load(tile + 1).to(tl.int64)
    position = tl.load(tile + 2)
    count = tl.load(tile + 3)
    table = table_RM + row.to(tl.int64) * table_width
    m = tl.arange(0, QUERIES)
    h = tl.arange(0, H)
    at = ((first + m) * N + n)[:, None] * H + h[None, :]
    is_query = (m < count)[:, None] & (h >= 0)[None, :]
    element = q_TNH.dtype.element_ty
    q = (tl.load(q_TNH + at, mask=is_query, other=0.0).to(tl.float32) * log2_scale).to(element)
    most = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, H], tl.float32)
    seen_by_all = position // KEYS * KEYS
    acc, most, total = _stream(
        acc, most, total, q, table, k_pool, v_pool, n // (N // K), 0, seen_by_all, position + m,
        K, H, S, KEYS, STAGES, OFFSET, False,
    )  # fmt: skip
    acc, most, total = _stream(
        acc, most, total, q, table, k_pool, v_pool, n // (N // K), seen_by_all, position + count, position + m,
        K, H, S, KEYS, STAGES, OFFSET, True,
    )  # fmt: skip
    tl.store(out_TNH + at, (acc / total[:, None]).to(element), mask=is_query)


def prefill_attention(
    q_TNH: torch.Tensor,
    k_pool_PKSH: torch.Tensor,
    v_pool_PKSH: torch.Tensor,
    out_TNH: torch.Tensor,
    table_RM: torch.Tensor,
    tiles_W4: torch.Tensor,
    scale: float,
    *,
    overlap: Overlap = Overlap.NONE,
) -> None:
    """Write the attention of every token that a tile covers to out_TNH; other rows are left as they are.

    q, pools, out of one dtype, or pools of e4m3; table_RM and tiles_W4 int32 (`list_tiles`). Raises ValueError if a
    tensor does not fit.
    """
    T, N, H = q_TNH.shape
    K, S, dtype = k_pool_PKSH.shape[1], k_pool_PKSH.shape[2], q_TNH.dtype
    check_tensor("q_TNH", q_TNH, shape=(T, N, H), dtype=dtype)
    check_tensor("out_TNH", out_TNH, shape=(T, N, H), dtype=dtype)
    check_pools(k_pool_PKSH, v_pool_PKSH, shape=(None, K, S, H), dtype=dtype)
    check_tensor("tiles_W4", tiles_W4, shape=(None, 4), dtype=torch.int32)
    check_tensor("table_RM", table_RM, shape=(None, None), dtype=torch.int32)
    if not len(tiles_W4):
        return
    if prefill_hopper.attend(
        q_TNH, k_pool_PKSH, v_pool_PKSH, out_TNH, table_RM, tiles_W4, scale * LOG2_E, overlap=overlap
    ):
        return
    tiles = PrefillTiles.of(H, q_TNH.element_size())
    _prefill_attention_kernel[(N, len(tiles_W4))](
        q_TNH, k_pool_PKSH, v_pool_PKSH, out_TNH, table_RM, tiles_W4, table_RM.shape[1], scale * LOG2_E,
        N=N, K=K, H=H, S=S, QUERIES=QUERY_TILE, KEYS=tiles.keys, STAGES=tiles.stages,
        OFFSET=tl.int32 if k_pool_PKSH.numel() < MAX_INT else tl.int64, PDL=overlap.value, launch_pdl=overlap.value,
        num_warps=tiles.warps,
    )  # fmt: skip
