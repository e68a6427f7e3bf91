"""Deterministic mode's kernels in Gluon that go with those of warp groups: decode attention over tiles in shared
memory, and queries, keys and values of prompts, with the same bits as a decode has them.

A decoded token gets what warp_groups.py would give it in any tile of a prompt: the same tiles of keys at absolute
positions, from its own one back, chunks that end at absolute positions and are merged from the last one back, and
sums in the same order. The instructions that multiply are others (16 rows, not 64), whose bits are the same; tests
compare them on a device. Who finishes a sequence's last chunk merges all.

    cached tokens   |--- chunk 0 ---|--- chunk 1 ---|- chunk 2 -|new|
                                        <- tile 1 <- tile 0

Legend: B sequences · T tokens · R rows of the state · N query heads · K kv heads · H head dim · S block size ·
C = (N + 2K)·H · D model dim · W items (model/kernels/attention/decode_work.py). Must not know: when this is used.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from octavo.model.kernels.attention.invariant_math import (
    exp2,
    for_rows_of,
    heads_of,
    merge,
    norm_scale,
    normed,
    row_scale,
    turned,
)
from octavo.model.kernels.overlap import start_next, wait_for_previous

SUMS = gl.constexpr(8)  # partial sums of a query's weights, as in warp_groups.py


@gluon.jit
def _copy_tile(
    keys, values, k_pool, v_pool, table, start, end, kv_head,
    K: gl.constexpr, H: gl.constexpr, S: gl.constexpr, TILE: gl.constexpr, COPY: gl.constexpr,
):  # fmt: skip
    # Zeros behind the end: what the pool has there may be no number.
    token = start + gl.arange(0, TILE, gl.SliceLayout(1, COPY))
    h = gl.arange(0, H, gl.SliceLayout(0, COPY))
    block = gl.load(table + token // S, mask=token < end, other=0)
    has = (token < end)[:, None] & (h >= 0)[None, :]
    at = (((block.to(gl.int64) * K + kv_head) * S + token % S) * H)[:, None] + h[None, :]
    async_copy.async_copy_global_to_shared(keys, k_pool + at, has)
    async_copy.async_copy_global_to_shared(values, v_pool + at, has)


@gluon.jit
def _store_merged(
    partial_out, partial_ml, out_NH, first, num_chunks, kv_head,
    N: gl.constexpr, G: gl.constexpr, H: gl.constexpr, FEW: gl.constexpr, AT_ONCE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    # All chunks of a sequence for one KV head's queries, from the last one back. Before the first there are none.
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32 // (H // 4), H // 4], [WARPS, 1], [1, 0])
    m = gl.arange(0, FEW, gl.SliceLayout(1, LAYOUT))
    h = gl.arange(0, H, gl.SliceLayout(0, LAYOUT))
    acc = gl.full([FEW, H], 0.0, gl.float32, LAYOUT)
    most = gl.full([FEW], float("-inf"), gl.float32, gl.SliceLayout(1, LAYOUT))
    total = gl.full([FEW], 0.0, gl.float32, gl.SliceLayout(1, LAYOUT))
    for done in range(0, num_chunks, AT_ONCE):
        for one in gl.static_range(AT_ONCE):
            chunk = num_chunks - 1 - done - one
            has = (m < G) & (chunk >= 0)
            at = (first + chunk).to(gl.int64) * N + kv_head * G + m
            is_number = has[:, None] & (h >= 0)[None, :]
            chunk_most = gl.load(partial_ml + at * 2, mask=has, other=float("-inf"), cache_modifier=".cg")
            chunk_total = gl.load(partial_ml + at * 2 + 1, mask=has, other=0.0, cache_modifier=".cg")
            acc_at = partial_out + (at * H)[:, None] + h[None, :]
            chunk_acc = gl.load(acc_at, mask=is_number, other=0.0, cache_modifier=".cg")
            acc, most, total = merge(acc, most, total, chunk_acc, chunk_most, chunk_total)
    total = gl.where(m < G, total, 1.0)
    out_at = ((kv_head * G + m) * H)[:, None] + h[None, :]
    out = (acc * for_rows_of(acc, 1.0 / total)).to(out_NH.dtype.element_ty)
    gl.store(out_NH + out_at, out, mask=(m < G)[:, None] & (h >= 0)[None, :])


@gluon.jit
def ring_kernel(
    qkv_BC, x_BD, bias_C, qk_norm_2H, k_pool, v_pool, out_BNH,
    table_RM, cos_LH, sin_LH, count_1, item_W8, arrived_BK, partial_out, partial_ml,
    table_width, log2_scale, eps,
    N: gl.constexpr, K: gl.constexpr, H: gl.constexpr, D: gl.constexpr, S: gl.constexpr, WIDTH: gl.constexpr,
    GROUP: gl.constexpr, FEW: gl.constexpr, TILE: gl.constexpr, RING: gl.constexpr, CHUNK: gl.constexpr,
    AT_ONCE: gl.constexpr, WARPS: gl.constexpr, VECTOR: gl.constexpr, PHASE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Items one after the other for one KV head; see `invariant_hopper.attend_decodes`."""
    start_next(PDL)
    kv_head = gl.program_id(1)
    num_items = gl.load(count_1)
    G: gl.constexpr = N // K
    C: gl.constexpr = (N + 2 * K) * H
    element: gl.constexpr = qkv_BC.dtype.element_ty
    COPY: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 // (H // VECTOR), H // VECTOR], [WARPS, 1], [1, 0])
    HEADS: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (H // 8), H // 8], [WARPS, 1], [1, 0])
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    ROWS: gl.constexpr = gl.SliceLayout(1, MMA)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(VECTOR, PHASE, 8 // PHASE, [1, 0])
    keys_ring = gl.allocate_shared_memory(element, [RING, TILE, H], SHARED)
    values_ring = gl.allocate_shared_memory(element, [RING, TILE, H], SHARED)
    for index in range(gl.program_id(0), num_items, gl.num_programs(0)):
        item = item_W8 + index * 8
        b = gl.load(item)
        row = gl.load(item + 1)
        position = gl.load(item + 2)
        begin = gl.load(item + 3)
        end = gl.load(item + 4)
        chunk = gl.load(item + 5)
        num_chunks = gl.load(item + 6)
        first = gl.load(item + 7)
        table = table_RM + row.to(gl.int64) * table_width
        cached = gl.minimum(end, position)
        num_tiles = (end - begin + TILE - 1) // TILE
        gl.thread_barrier()
        for slot in gl.static_range(RING):
            ahead = begin + (num_tiles - 1 - slot) * TILE
            if ahead >= begin:
                keys, values = keys_ring.index(slot), values_ring.index(slot)
                _copy_tile(keys, values, k_pool, v_pool, table, ahead, cached, kv_head, K, H, S, TILE, COPY)
            async_copy.commit_group()

        m = gl.arange(0, GROUP, gl.SliceLayout(1, HEADS))
        h = gl.arange(0, H, gl.SliceLayout(0, HEADS))
        is_h = h >= 0
        other_h = (h + H // 2) % H
        cos = gl.load(cos_LH + position * (H // 2) + h % (H // 2))
        sin = gl.load(sin_LH + position * (H // 2) + h % (H // 2)) * gl.where(h < H // 2, -1.0, 1.0)
        if index == gl.program_id(0):
            wait_for_previous(PDL)
        qkv = qkv_BC + b.to(gl.int64) * C
        scale = row_scale(x_BD, b, eps, D, WIDTH, WARPS)
        q_at = ((kv_head * G + m) * H)[:, None]
        is_q = (m < G)[:, None] & is_h[None, :]
        q = heads_of(qkv, bias_C, q_at + h[None, :], is_q, scale)
        q_other = heads_of(qkv, bias_C, q_at + other_h[None, :], is_q, scale)
        if qk_norm_2H is not None:
            inverse = gl.expand_dims(norm_scale(q, eps, H, 1), 1)
            q = normed(q, inverse, qk_norm_2H + h[None, :], is_h[None, :])
            q_other = normed(q_other, inverse, qk_norm_2H + other_h[None, :], is_h[None, :])
        q_left = gl.convert_layout(turned(q, q_other, cos[None, :], sin[None, :]).to(element), LEFT)
        new_k = gl.full([H], 0.0, element, gl.SliceLayout(0, HEADS))
        new_v = gl.full([H], 0.0, element, gl.SliceLayout(0, HEADS))
        if end > position:
            k_at = (N + kv_head) * H
            k = heads_of(qkv, bias_C, k_at + h, is_h, scale)
            k_other = heads_of(qkv, bias_C, k_at + other_h, is_h, scale)
            if qk_norm_2H is not None:
                k_inverse = gl.full([H], 0.0, gl.float32, gl.SliceLayout(0, HEADS)) + norm_scale(k, eps, H, 0)
                k = normed(k, k_inverse, qk_norm_2H + H + h, is_h)
                k_other = normed(k_other, k_inverse, qk_norm_2H + H + other_h, is_h)
            new_k = turned(k, k_other, cos, sin).to(element)
            new_v = heads_of(qkv, bias_C, (N + K + kv_head) * H + h, is_h, scale).to(element)
            new_block = gl.load(table + position // S).to(gl.int64)
            new_at = ((new_block * K + kv_head) * S + position % S) * H + h
            gl.store(k_pool + new_at, new_k)
            gl.store(v_pool + new_at, new_v)
        new_k = gl.expand_dims(gl.convert_layout(new_k, gl.SliceLayout(1, RIGHT)), 1)
        new_v = gl.expand_dims(gl.convert_layout(new_v, gl.SliceLayout(0, RIGHT)), 0)

        most = gl.full([GROUP], float("-inf"), gl.float32, ROWS)
        sums = gl.full([GROUP, SUMS], 0.0, gl.float32, MMA)
        acc = gl.full([GROUP, H], 0.0, gl.float32, MMA)
        for i in range(num_tiles):
            here = i % RING
            start = begin + (num_tiles - 1 - i) * TILE
            async_copy.wait_group(RING - 1)
            gl.thread_barrier()
            keys_right = keys_ring.index(here).permute([1, 0]).load(RIGHT)
            key = gl.expand_dims(start + gl.arange(0, TILE, gl.SliceLayout(0, RIGHT)), 0)
            keys_right = gl.where(key == position, new_k, keys_right)
            score = mma_v2(q_left, keys_right, gl.full([GROUP, TILE], 0.0, gl.float32, MMA))
            token = start + gl.arange(0, TILE, gl.SliceLayout(0, MMA))
            score = gl.where((token < end)[None, :], score, float("-inf"))
            new_most = gl.maximum(most, gl.max(score, 1) * log2_scale)
            base = gl.where(new_most == float("-inf"), 0.0, new_most)
            shrink = exp2(most - base)
            zeros = gl.full([GROUP, TILE], 0.0, gl.float32, MMA)
            weight = exp2(gl.fma(score, zeros + log2_scale, zeros - base[:, None]))
            # A thread has all the weights of a sum then, as in warp_groups.py.
            weight = gl.convert_layout(weight, LEFT)
            added = gl.convert_layout(gl.sum(gl.reshape(weight, [GROUP, TILE // SUMS, SUMS]), 1), MMA)
            sums = gl.fma(sums, gl.broadcast(for_rows_of(sums, shrink), sums)[0], added)
            most = new_most
            values_right = values_ring.index(here).load(RIGHT)
            value = gl.expand_dims(start + gl.arange(0, TILE, gl.SliceLayout(1, RIGHT)), 1)
            values_right = gl.where(value == position, new_v, values_right)
            acc = mma_v2(weight.to(element), values_right, acc * shrink[:, None])
            if RING * TILE < CHUNK:
                gl.thread_barrier()
                later = start - RING * TILE
                if later >= begin:
                    keys, values = keys_ring.index(here), values_ring.index(here)
                    _copy_tile(keys, values, k_pool, v_pool, table, later, cached, kv_head, K, H, S, TILE, COPY)
            async_copy.commit_group()

        total = gl.convert_layout(gl.sum(sums, 1), ROWS)
        om = gl.arange(0, GROUP, ROWS)
        oh = gl.arange(0, H, gl.SliceLayout(0, MMA))
        out_at = ((kv_head * G + om) * H)[:, None] + oh[None, :]
        is_out = (om < G)[:, None] & (oh >= 0)[None, :]
        out_NH = out_BNH + b.to(gl.int64) * N * H
        if num_chunks == 1:
            nothing = gl.full([GROUP, H], 0.0, gl.float32, MMA)
            acc, most, total = merge(
                nothing, gl.full([GROUP], float("-inf"), gl.float32, ROWS), gl.full([GROUP], 0.0, gl.float32, ROWS),
                acc, most, total,
            )  # fmt: skip
            gl.store(out_NH + out_at, (acc * (1.0 / total)[:, None]).to(element), mask=is_out)
        else:
            part = (first + chunk).to(gl.int64) * N
            ml = partial_ml + (part + kv_head * G + om) * 2
            gl.store(partial_out + part * H + out_at, acc, mask=is_out)
            gl.store(ml, most, mask=om < G)
            gl.store(ml + 1, total, mask=om < G)
            # The barrier orders every thread's stores before the one atomic that releases them.
            gl.thread_barrier()
            if gl.atomic_add(arrived_BK + b * K + kv_head, 1, sem="acq_rel") == num_chunks - 1:
                gl.store(arrived_BK + b * K + kv_head, 0)
                _store_merged(partial_out, partial_ml, out_NH, first, num_chunks, kv_head, N, G, H, FEW, AT_ONCE, WARPS)


@gluon.jit
def write_heads_kernel(
    qkv_TC, x_TD, bias_C, qk_norm_2H, q_TNH, k_pool, v_pool, row_T, position_T, table_RM, cos_LH, sin_LH,
    table_width, eps,
    N: gl.constexpr, K: gl.constexpr, H: gl.constexpr, D: gl.constexpr, S: gl.constexpr, WIDTH: gl.constexpr,
    GROUP: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """One token; see `invariant_hopper.write_heads`."""
    HEADS: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (H // 8), H // 8], [WARPS, 1], [1, 0])
    element: gl.constexpr = qkv_TC.dtype.element_ty
    t = gl.program_id(0).to(gl.int64)
    row = gl.load(row_T + t)
    position = gl.load(position_T + t)
    block = gl.load(table_RM + row.to(gl.int64) * table_width + position // S, mask=row >= 0, other=0).to(gl.int64)
    h = gl.arange(0, H, gl.SliceLayout(0, HEADS))
    other_h = (h + H // 2) % H
    cos = gl.load(cos_LH + position * (H // 2) + h % (H // 2))
    sin = gl.load(sin_LH + position * (H // 2) + h % (H // 2)) * gl.where(h < H // 2, -1.0, 1.0)
    scale = row_scale(x_TD, t, eps, D, WIDTH, WARPS)
    qkv = qkv_TC + t * (N + 2 * K) * H
    for first in gl.static_range(0, N + 2 * K, GROUP):
        a = first + gl.arange(0, GROUP, gl.SliceLayout(1, HEADS))
        is_element = (a < N + 2 * K)[:, None] & (h >= 0)[None, :]
        at = (a * H)[:, None] + h[None, :]
        x = heads_of(qkv, bias_C, at, is_element, scale)
        other = heads_of(qkv, bias_C, (a * H)[:, None] + other_h[None, :], is_element, scale)
        plain = x
        if qk_norm_2H is not None:
            inverse = gl.expand_dims(norm_scale(x, eps, H, 1), 1)
            norm = qk_norm_2H + gl.where(a < N, 0, H)[:, None]
            x = normed(x, inverse, norm + h[None, :], is_element)
            other = normed(other, inverse, norm + other_h[None, :], is_element)
        x = gl.where((a < N + K)[:, None], turned(x, other, cos[None, :], sin[None, :]), plain).to(element)
        gl.store(q_TNH + t * N * H + at, x, mask=is_element & (a < N)[:, None])
        pool_at = (((block * K + (a - N) % K) * S + position % S) * H)[:, None] + h[None, :]
        is_cached = is_element & (row >= 0)
        gl.store(k_pool + pool_at, x, mask=is_cached & ((a >= N) & (a < N + K))[:, None])
        gl.store(v_pool + pool_at, x, mask=is_cached & (a >= N + K)[:, None])
