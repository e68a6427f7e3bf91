"""The kernel of decode attention for Hopper devices: its programs keep a ring of tiles in flight.

It does what the kernel in model/kernels/attention/decode.py does, item for item, with the same arguments. But Triton
compiles that kernel's loop with a single buffer, and the compiler decides when to wait for a copy. Here tiles of keys
and values are copied into a ring in shared memory ahead of the tile being processed, and a sequence's parts are loaded
many at a time. Written in Gluon, with explicit layouts; tests run it by tests/support/model/gluon.py.

Legend: as in model/kernels/attention/decode.py.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from octavo.model.kernels.checks import is_hopper, next_power_of_2
from octavo.model.kernels.gluon import KNOWN_VERSIONS, thread_barrier
from octavo.model.kernels.overlap import start_next, wait_for_previous

WARPS = 4
REGISTERS = 128
"""The most of a thread, so that four programs fit on a multiprocessor."""
MOST_QUERY = gl.constexpr(1024.0)
"""Maximum to which queries are scaled for float16: a sum of 64 products with the largest e4m3 still fits float32."""
GROUP = 16
"""Query heads of a KV head, padded to the rows of the matrix instruction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """tokens: of a tile. tiles: of the ring. parts: of a sequence that are loaded together, for groups of eight."""

    tokens: int
    tiles: int
    parts: int


RINGS = {64: Ring(tokens=64, tiles=2, parts=16), 128: Ring(tokens=32, tiles=3, parts=4)}
"""The fastest rings, by head dim (bench/RESULTS.md)."""
SMALL_RINGS = {128: Ring(tokens=64, tiles=3, parts=4)}
"""The same for e4m3, with which heads of 64 have not been measured."""


def is_faster(qkv_BC: torch.Tensor, k_pool_PKSH: torch.Tensor, num_heads: int) -> bool:
    """Whether this kernel should be used: for 16-bit numbers with a cache of the same dtype or of e4m3, and heads with
    which it was measured, on a Hopper device."""
    _, K, _, H = k_pool_PKSH.shape
    return (
        qkv_BC.is_cuda
        and qkv_BC.element_size() == 2
        and k_pool_PKSH.dtype in (qkv_BC.dtype, torch.float8_e4m3fn)
        and H in (RINGS if k_pool_PKSH.dtype == qkv_BC.dtype else SMALL_RINGS)
        and num_heads // K <= GROUP
        and triton.__version__.startswith(KNOWN_VERSIONS)
        and is_hopper(qkv_BC.device)
    )


def settings_of(num_heads: int, num_kv_heads: int, head_dim: int, element_size: int) -> dict[str, Any]:
    """The kernel's settings other than the shape, and its launch options. element_size: bytes, of the cache."""
    rings = SMALL_RINGS if element_size == 1 else RINGS
    ring, row_bytes, few = rings[head_dim], head_dim * element_size, next_power_of_2(num_heads // num_kv_heads)
    return {
        "GROUP": GROUP, "FEW": few, "TILE": ring.tokens, "RING": ring.tiles, "PARTS": ring.parts * 8 // max(8, few),
        "WARPS": WARPS, "VECTOR": 16 // element_size, "PHASE": max(1, 128 // row_bytes),
        "num_warps": WARPS, "maxnreg": REGISTERS,
    }  # fmt: skip


@gluon.jit
def _load_item(item):
    """An item's eight numbers (model/kernels/attention/decode_work.py)."""
    b = gl.load(item)
    row = gl.load(item + 1)
    position = gl.load(item + 2)
    begin = gl.load(item + 3)
    end = gl.load(item + 4)
    chunk = gl.load(item + 5)
    num_chunks = gl.load(item + 6)
    first = gl.load(item + 7)
    return b, row, position, begin, end, chunk, num_chunks, first


@gluon.jit
def _row_scale(x_BD, b, eps, D: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr):
    d = gl.arange(0, WIDTH, gl.BlockedLayout([8], [32], [WARPS], [0]))
    x = gl.load(x_BD + b * D + d, mask=d < D, other=0.0).to(gl.float32)
    return 1.0 / gl.sqrt(gl.sum(x * x, 0) / D + eps)


@gluon.jit
def _blocks_of_tile(table, start, end, S: gl.constexpr, TILE: gl.constexpr, COPY: gl.constexpr):
    token = start + gl.arange(0, TILE, gl.SliceLayout(1, COPY))
    return gl.load(table + token // S, mask=token < end, other=0)


@gluon.jit
def _copy_tile(
    keys, values, k_pool, v_pool, block, start, end, kv_head,
    K: gl.constexpr, H: gl.constexpr, S: gl.constexpr, TILE: gl.constexpr, COPY: gl.constexpr,
):  # fmt: skip
    # Zeros beyond the end, where the pool may contain NaN.
    token = start + gl.arange(0, TILE, gl.SliceLayout(1, COPY))
    h = gl.arange(0, H, gl.SliceLayout(0, COPY))
    has = (token < end)[:, None] & (h >= 0)[None, :]
    at = (((block.to(gl.int64) * K + kv_head) * S + token % S) * H)[:, None] + h[None, :]
    async_copy.async_copy_global_to_shared(keys, k_pool + at, has)
    async_copy.async_copy_global_to_shared(values, v_pool + at, has)


@gluon.jit
def _copy_next(
    keys_ring, values_ring, slot, k_pool, v_pool, table, block, copied, end, kv_head,
    K: gl.constexpr, S: gl.constexpr, COPY: gl.constexpr,
):  # fmt: skip
    """Requests the tile that begins at token `copied` and has these blocks. Returns the next one's token and blocks."""
    TILE: gl.constexpr = keys_ring.shape[1]
    H: gl.constexpr = keys_ring.shape[2]
    keys, values = keys_ring.index(slot), values_ring.index(slot)
    _copy_tile(keys, values, k_pool, v_pool, block, copied, end, kv_head, K, H, S, TILE, COPY)
    copied += TILE
    return copied, _blocks_of_tile(table, copied, end, S, TILE, COPY)


@gluon.jit
def _copy_first(
    keys_ring, values_ring, k_pool, v_pool, table, begin, end, kv_head,
    K: gl.constexpr, S: gl.constexpr, COPY: gl.constexpr,
):  # fmt: skip
    """Requests tiles for all slots of the ring but one. Returns the next tile's token and blocks."""
    copied = begin
    block = _blocks_of_tile(table, copied, end, S, keys_ring.shape[1], COPY)
    for slot in gl.static_range(keys_ring.shape[0] - 1):
        if copied < end:
            copied, block = _copy_next(
                keys_ring, values_ring, slot, k_pool, v_pool, table, block, copied, end, kv_head, K, S, COPY
            )
        async_copy.commit_group()
    return copied, block


@gluon.jit
def _store_combined(
    partial_out, partial_ml, out_NH, first, num_chunks, kv_head,
    N: gl.constexpr, G: gl.constexpr, H: gl.constexpr, FEW: gl.constexpr, PARTS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    # Combines all chunks of a sequence for one KV head's queries, in order. A thread has all parts of its numbers.
    LANES: gl.constexpr = H // 4
    BOX: gl.constexpr = gl.BlockedLayout([PARTS, 1, 4], [1, 32 // LANES, LANES], [1, WARPS, 1], [2, 1, 0])
    PARTS_BY_HEADS: gl.constexpr = gl.SliceLayout(2, BOX)
    HEADS_BY_DIM: gl.constexpr = gl.SliceLayout(0, BOX)
    part = gl.arange(0, PARTS, gl.SliceLayout(1, PARTS_BY_HEADS))
    m = gl.arange(0, FEW, gl.SliceLayout(0, PARTS_BY_HEADS))
    h = gl.arange(0, H, gl.SliceLayout(0, gl.SliceLayout(1, BOX)))
    h_11H = gl.expand_dims(gl.expand_dims(h, 0), 1)
    most = gl.full([FEW], float("-inf"), gl.float32, gl.SliceLayout(0, PARTS_BY_HEADS))
    total = gl.full([FEW], 0.0, gl.float32, gl.SliceLayout(0, PARTS_BY_HEADS))
    acc = gl.full([FEW, H], 0.0, gl.float32, HEADS_BY_DIM)
    for c in range(0, num_chunks, PARTS):
        is_part = (c + part < num_chunks)[:, None] & (m < G)[None, :]
        at = (first + c + part).to(gl.int64)[:, None] * N + (kv_head * G + m)[None, :]
        chunk_most = gl.load(partial_ml + at * 2, mask=is_part, other=float("-inf"), cache_modifier=".cg")
        chunk_total = gl.load(partial_ml + at * 2 + 1, mask=is_part, other=0.0, cache_modifier=".cg")
        is_number = gl.expand_dims(is_part, 2) & (h_11H >= 0)
        acc_at = partial_out + gl.expand_dims(at * H, 2) + h_11H
        chunk_acc = gl.load(acc_at, mask=is_number, other=0.0, cache_modifier=".cg")
        new_most = gl.maximum(most, gl.max(chunk_most, 0))
        base = gl.where(new_most == float("-inf"), 0.0, new_most)
        shrink = gl.exp2(most - base)
        weight = gl.exp2(chunk_most - base[None, :])
        total = total * shrink + gl.sum(gl.where(is_part, chunk_total * weight, 0.0), 0)
        added = gl.sum(gl.where(is_number, chunk_acc * gl.expand_dims(weight, 2), 0.0), 0)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, HEADS_BY_DIM))[:, None] + added
        most = new_most
    om = gl.arange(0, FEW, gl.SliceLayout(1, HEADS_BY_DIM))
    oh = gl.arange(0, H, gl.SliceLayout(0, HEADS_BY_DIM))
    sums = gl.convert_layout(gl.where(m < G, total, 1.0), gl.SliceLayout(1, HEADS_BY_DIM))
    out_at = out_NH + ((kv_head * G + om) * H)[:, None] + oh[None, :]
    is_out = (om < G)[:, None] & (oh >= 0)[None, :]
    gl.store(out_at, (acc / sums[:, None]).to(out_NH.dtype.element_ty), mask=is_out)


@gluon.jit
def _finished_queries(
    qkv, x_BD, b, bias_C, qk_norm_2H, cos, sin, log2_scale, eps, kv_head,
    G: gl.constexpr, H: gl.constexpr, D: gl.constexpr, WIDTH: gl.constexpr, GROUP: gl.constexpr, WARPS: gl.constexpr,
    HEADS: gl.constexpr,
):  # fmt: skip
    # Those of one KV head, in float32 and scaled for exp2; and the row's scale, which keys and values need too.
    m = gl.arange(0, GROUP, gl.SliceLayout(1, HEADS))
    h = gl.arange(0, H, gl.SliceLayout(0, HEADS))
    other_h = (h + H // 2) % H
    q_at = ((kv_head * G + m) * H)[:, None]
    is_q = (m < G)[:, None] & (h >= 0)[None, :]
    q = gl.load(qkv + q_at + h[None, :], mask=is_q, other=0.0).to(gl.float32)
    q_other = gl.load(qkv + q_at + other_h[None, :], mask=is_q, other=0.0).to(gl.float32)
    scale = _row_scale(x_BD, b, eps, D, WIDTH, WARPS)
    q = q * scale
    q_other = q_other * scale
    if bias_C is not None:
        q += gl.load(bias_C + q_at + h[None, :], mask=is_q, other=0.0).to(gl.float32)
        q_other += gl.load(bias_C + q_at + other_h[None, :], mask=is_q, other=0.0).to(gl.float32)
    if qk_norm_2H is not None:
        q_inverse = (1.0 / gl.sqrt(gl.sum(q * q, 1) / H + eps))[:, None]
        q = q * q_inverse * gl.load(qk_norm_2H + h).to(gl.float32)[None, :]
        q_other = q_other * q_inverse * gl.load(qk_norm_2H + other_h).to(gl.float32)[None, :]
    return (q * cos[None, :] + q_other * sin[None, :]) * log2_scale, scale


@gluon.jit
def _in_units(q):
    """Queries and their unit: they may exceed float16's range, since they contain the cache's scales."""
    most = gl.max(gl.max(gl.abs(q), 1), 0)
    unit = gl.where(most > 0.0, most / MOST_QUERY, 1.0)
    return q / unit, unit


@gluon.jit
def _new_key_and_value(
    qkv, bias_C, qk_norm_2H, cos, sin, scale, eps, kv_head,
    N: gl.constexpr, K: gl.constexpr, H: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    # The row's own, in float32.
    h = gl.arange(0, H, gl.SliceLayout(0, HEADS))
    other_h = (h + H // 2) % H
    k_at = (N + kv_head) * H
    v_at = (N + K + kv_head) * H
    k = gl.load(qkv + k_at + h).to(gl.float32) * scale
    k_other = gl.load(qkv + k_at + other_h).to(gl.float32) * scale
    v = gl.load(qkv + v_at + h).to(gl.float32) * scale
    if bias_C is not None:
        k += gl.load(bias_C + k_at + h).to(gl.float32)
        k_other += gl.load(bias_C + k_at + other_h).to(gl.float32)
        v += gl.load(bias_C + v_at + h).to(gl.float32)
    if qk_norm_2H is not None:
        k_inverse = 1.0 / gl.sqrt(gl.sum(k * k, 0) / H + eps)
        k = k * k_inverse * gl.load(qk_norm_2H + H + h).to(gl.float32)
        k_other = k_other * k_inverse * gl.load(qk_norm_2H + H + other_h).to(gl.float32)
    return k * cos + k_other * sin, v


@gluon.jit
def _attend_new(
    q, q_unit, acc, qkv, bias_C, qk_norm_2H, cos, sin, scale, eps, k_pool, v_pool, table, position, kv_head,
    N: gl.constexpr, K: gl.constexpr, S: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """Caches the row's own key and value, and begins the online softmax with them: its maxima, totals and values, which
    are added to `acc`, zeros."""
    SUMS: gl.constexpr = acc.type.layout
    H: gl.constexpr = q.shape[1]
    cached: gl.constexpr = k_pool.dtype.element_ty
    h = gl.arange(0, H, gl.SliceLayout(0, HEADS))
    k, v = _new_key_and_value(qkv, bias_C, qk_norm_2H, cos, sin, scale, eps, kv_head, N, K, H, HEADS)
    new_k = k.to(cached)
    new_v = v.to(cached)
    new_block = gl.load(table + position // S).to(gl.int64)
    new_at = ((new_block * K + kv_head) * S + position % S) * H + h
    gl.store(k_pool + new_at, new_k)
    gl.store(v_pool + new_at, new_v)
    new_score = gl.sum(q.to(gl.float32) * new_k.to(gl.float32)[None, :], 1) * q_unit
    most = gl.convert_layout(new_score, gl.SliceLayout(1, SUMS))
    total = gl.full([q.shape[0]], 1.0, gl.float32, gl.SliceLayout(1, SUMS))
    acc += gl.convert_layout(new_v.to(gl.float32), gl.SliceLayout(0, SUMS))[None, :]
    return most, total, acc


@gluon.jit
def _attend_tile(
    q_left, q_unit, keys_ring, values_ring, slot, start, end, most, total, acc, HAS_UNIT: gl.constexpr,
):  # fmt: skip
    # One step of the online softmax: the tile in this slot of the ring.
    SUMS: gl.constexpr = acc.type.layout
    LEFT: gl.constexpr = q_left.type.layout
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    TILE: gl.constexpr = keys_ring.shape[1]
    keys_right = keys_ring.index(slot).permute([1, 0]).load(RIGHT).to(q_left.dtype)
    score = mma_v2(q_left, keys_right, gl.full([q_left.shape[0], TILE], 0.0, gl.float32, SUMS))
    if HAS_UNIT:
        score = score * q_unit
    token = start + gl.arange(0, TILE, gl.SliceLayout(0, SUMS))
    score = gl.where((token < end)[None, :], score, float("-inf"))
    new_most = gl.maximum(most, gl.max(score, 1))
    base = gl.where(new_most == float("-inf"), 0.0, new_most)
    shrink = gl.exp2(most - base)
    weight = gl.exp2(score - base[:, None])
    total = total * shrink + gl.sum(weight, 1)
    weight = gl.convert_layout(weight.to(q_left.dtype), LEFT)
    acc = mma_v2(weight, values_ring.index(slot).load(RIGHT).to(q_left.dtype), acc * shrink[:, None])
    return new_most, total, acc


@gluon.jit
def _store_item(
    acc, most, total, out_NH, partial_out, partial_ml, arrived, first, chunk, num_chunks, kv_head,
    N: gl.constexpr, G: gl.constexpr, FEW: gl.constexpr, PARTS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    # The output if it is the sequence's only item; otherwise its part, and all parts combined by the last to arrive.
    GROUP: gl.constexpr = acc.shape[0]
    H: gl.constexpr = acc.shape[1]
    m = gl.arange(0, GROUP, gl.SliceLayout(1, acc.type.layout))
    h = gl.arange(0, H, gl.SliceLayout(0, acc.type.layout))
    out_at = ((kv_head * G + m) * H)[:, None] + h[None, :]
    is_out = (m < G)[:, None] & (h >= 0)[None, :]
    if num_chunks == 1:
        gl.store(out_NH + out_at, (acc / total[:, None]).to(out_NH.dtype.element_ty), mask=is_out)
    else:
        part = (first + chunk).to(gl.int64) * N
        ml = partial_ml + (part + kv_head * G + m) * 2
        gl.store(partial_out + part * H + out_at, acc, mask=is_out)
        gl.store(ml, most, mask=m < G)
        gl.store(ml + 1, total, mask=m < G)
        # The barrier orders every thread's stores before the one atomic that releases them.
        thread_barrier()
        if gl.atomic_add(arrived, 1, sem="acq_rel") == num_chunks - 1:
            gl.store(arrived, 0)
            _store_combined(partial_out, partial_ml, out_NH, first, num_chunks, kv_head, N, G, H, FEW, PARTS, WARPS)


@gluon.jit
def ring_attention_kernel(
    qkv_BC, x_BD, bias_C, qk_norm_2H, k_pool, v_pool, out_BNH,
    table_RM, cos_LH, sin_LH, count_1, item_W8, arrived_BK, partial_out, partial_ml,
    table_width, log2_scale, eps,
    N: gl.constexpr, K: gl.constexpr, H: gl.constexpr, D: gl.constexpr, S: gl.constexpr, WIDTH: gl.constexpr,
    GROUP: gl.constexpr, FEW: gl.constexpr, TILE: gl.constexpr, RING: gl.constexpr, PARTS: gl.constexpr,
    WARPS: gl.constexpr, VECTOR: gl.constexpr, PHASE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One item for one KV head; see `decode_attention`."""
    start_next(PDL)
    kv_head = gl.program_id(1)
    item = item_W8 + gl.program_id(0) * 8
    num_items = gl.load(count_1)
    b, row, position, begin, end, chunk, num_chunks, first = _load_item(item)
    if gl.program_id(0) >= num_items:
        return
    G: gl.constexpr = N // K
    element: gl.constexpr = qkv_BC.dtype.element_ty
    cached: gl.constexpr = k_pool.dtype.element_ty
    # e4m3 is exact in float16, to which one instruction converts two at once.
    factor: gl.constexpr = element if cached == element else gl.float16
    COPY: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 // (H // VECTOR), H // VECTOR], [WARPS, 1], [1, 0])
    HEADS: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (H // 8), H // 8], [WARPS, 1], [1, 0])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(VECTOR, PHASE, 8 // PHASE, [1, 0])

    # The first tiles are requested before anything else: they do not depend on the QKV product.
    keys_ring = gl.allocate_shared_memory(cached, [RING, TILE, H], SHARED)
    values_ring = gl.allocate_shared_memory(cached, [RING, TILE, H], SHARED)
    table = table_RM + row.to(gl.int64) * table_width
    copied, block = _copy_first(keys_ring, values_ring, k_pool, v_pool, table, begin, end, kv_head, K, S, COPY)

    h = gl.arange(0, H, gl.SliceLayout(0, HEADS))
    cos = gl.load(cos_LH + position * (H // 2) + h % (H // 2))
    sin = gl.load(sin_LH + position * (H // 2) + h % (H // 2)) * gl.where(h < H // 2, -1.0, 1.0)
    wait_for_previous(PDL)
    qkv = qkv_BC + b.to(gl.int64) * ((N + 2 * K) * H)
    q, scale = _finished_queries(
        qkv, x_BD, b, bias_C, qk_norm_2H, cos, sin, log2_scale, eps, kv_head, G, H, D, WIDTH, GROUP, WARPS, HEADS
    )
    q_unit = 1.0
    if cached != element:
        q, q_unit = _in_units(q)
    q = q.to(factor)
    most = gl.full([GROUP], float("-inf"), gl.float32, gl.SliceLayout(1, SUMS))
    total = gl.full([GROUP], 0.0, gl.float32, gl.SliceLayout(1, SUMS))
    acc = gl.full([GROUP, H], 0.0, gl.float32, SUMS)

    if chunk == num_chunks - 1:
        most, total, acc = _attend_new(
            q, q_unit, acc, qkv, bias_C, qk_norm_2H, cos, sin, scale, eps, k_pool, v_pool, table, position, kv_head,
            N, K, S, HEADS,
        )  # fmt: skip

    q_left = gl.convert_layout(q, gl.DotOperandLayout(0, SUMS, 2))
    slot = 0
    for start in range(begin, end, TILE):
        async_copy.wait_group(RING - 2)
        # After this barrier all threads' copies have arrived, and all are done with the tile that the next copy
        # overwrites.
        thread_barrier()
        if copied < end:
            free = gl.where(slot == 0, RING - 1, slot - 1)
            copied, block = _copy_next(
                keys_ring, values_ring, free, k_pool, v_pool, table, block, copied, end, kv_head, K, S, COPY
            )
        async_copy.commit_group()
        most, total, acc = _attend_tile(
            q_left, q_unit, keys_ring, values_ring, slot, start, end, most, total, acc, cached != element
        )
        slot = gl.where(slot == RING - 1, 0, slot + 1)

    _store_item(
        acc, most, total, out_BNH + b.to(gl.int64) * N * H, partial_out, partial_ml, arrived_BK + b * K + kv_head,
        first, chunk, num_chunks, kv_head, N, G, FEW, PARTS, WARPS,
    )  # fmt: skip
