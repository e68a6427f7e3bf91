"""The Gluon kernels of deterministic mode that complement warp_groups.py: decode attention over tiles in shared memory,
and queries, keys and values of prompts, with the same bits as in a decode.

A decoded token gets what warp_groups.py would give it in any tile of a prompt: the same tiles of keys at absolute
positions, from its own tile backwards, chunks that end at absolute positions and are merged from the last one
backwards, and sums in the same order. The matrix instructions differ (16 rows, not 64), but their bits are the same;
tests compare them on a device. An item is one or more chunks, from its last one backwards: a sequence's last item
merges its own at once, the others write each to memory, and the item that finishes last merges all. That gives the same
bits however chunks are divided into items.

    cached tokens   |--- chunk 0 ---|--- chunk 1 ---|- chunk 2 -|new|
                                        <- tile 1 <- tile 0

Shared memory has three rooms, each for a tile's keys or its values: while one is read, the next two are being loaded.

    rooms   K0 V0 K1   |QK0|  V1 V0 K1   |PV0|  V1 K2 K1   |QK1|  V1 K2 V2   ...

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
from octavo.model.kernels.gluon import thread_barrier
from octavo.model.kernels.overlap import start_next, wait_for_previous


@gluon.jit
def _rows_of_tile(
    table, start, end, kv_head, K: gl.constexpr, S: gl.constexpr, TILE: gl.constexpr, COPY: gl.constexpr
):  # fmt: skip
    # Rows of the pool; -1 beyond the end, where the pool may contain NaN.
    token = start + gl.arange(0, TILE, gl.SliceLayout(1, COPY))
    has = (token >= 0) & (token < end)
    block = gl.load(table + token // S, mask=has, other=0)
    return gl.where(has, (block * K + kv_head) * S + token % S, -1)


@gluon.jit
def _copy_rows(room, pool, rows, H: gl.constexpr, COPY: gl.constexpr):
    h = gl.arange(0, H, gl.SliceLayout(0, COPY))
    at = (rows.to(gl.int64) * H)[:, None] + h[None, :]
    async_copy.async_copy_global_to_shared(room, pool + at, (rows >= 0)[:, None] & (h >= 0)[None, :])


@gluon.jit
def _put_row(rows_of_8, first_row, row, new, H: gl.constexpr, HEADS: gl.constexpr):
    # Writes a new row to shared memory, among the copied ones.
    eight = rows_of_8.index((first_row + row) // 8)
    one = gl.arange(0, 8, gl.SliceLayout(1, HEADS))
    mask = (one == row % 8)[:, None] & (gl.arange(0, H, gl.SliceLayout(0, HEADS)) >= 0)[None, :]
    eight.store(gl.where(mask, new[None, :], eight.load(HEADS)))


@gluon.jit
def _store_merged(
    partial_out, partial_ml, out_NH, first, num_chunks, kv_head,
    N: gl.constexpr, G: gl.constexpr, H: gl.constexpr, FEW: gl.constexpr, AT_ONCE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    # Merges all chunks of a sequence for one KV head's queries, from the last one backwards. A chunk before the first
    # is empty.
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
def _finished_queries(
    qkv, bias_C, qk_norm_2H, cos, sin, scale, eps, kv_head,
    G: gl.constexpr, H: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    # Those of one KV head, in float32.
    m = gl.arange(0, GROUP, gl.SliceLayout(1, HEADS))
    h = gl.arange(0, H, gl.SliceLayout(0, HEADS))
    is_h = h >= 0
    other_h = (h + H // 2) % H
    q_at = ((kv_head * G + m) * H)[:, None]
    is_q = (m < G)[:, None] & is_h[None, :]
    q = heads_of(qkv, bias_C, q_at + h[None, :], is_q, scale)
    q_other = heads_of(qkv, bias_C, q_at + other_h[None, :], is_q, scale)
    if qk_norm_2H is not None:
        inverse = gl.expand_dims(norm_scale(q, eps, H, 1), 1)
        q = normed(q, inverse, qk_norm_2H + h[None, :], is_h[None, :])
        q_other = normed(q_other, inverse, qk_norm_2H + other_h[None, :], is_h[None, :])
    return turned(q, q_other, cos[None, :], sin[None, :])


@gluon.jit
def _new_key_and_value(
    qkv, bias_C, qk_norm_2H, cos, sin, scale, eps, kv_head,
    N: gl.constexpr, K: gl.constexpr, H: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    # The row's own, in float32.
    h = gl.arange(0, H, gl.SliceLayout(0, HEADS))
    is_h = h >= 0
    other_h = (h + H // 2) % H
    k_at = (N + kv_head) * H
    k = heads_of(qkv, bias_C, k_at + h, is_h, scale)
    k_other = heads_of(qkv, bias_C, k_at + other_h, is_h, scale)
    if qk_norm_2H is not None:
        k_inverse = gl.full([H], 0.0, gl.float32, gl.SliceLayout(0, HEADS)) + norm_scale(k, eps, H, 0)
        k = normed(k, k_inverse, qk_norm_2H + H + h, is_h)
        k_other = normed(k_other, k_inverse, qk_norm_2H + H + other_h, is_h)
    return turned(k, k_other, cos, sin), heads_of(qkv, bias_C, (N + K + kv_head) * H + h, is_h, scale)


@gluon.jit
def _weigh(score, most, sums, log2_scale, WARPS: gl.constexpr):
    # One step of the online softmax: a tile's weights, the new maximum and sums, and by how much the sums shrank.
    GROUP: gl.constexpr = score.shape[0]
    TILE: gl.constexpr = score.shape[1]
    SUMS: gl.constexpr = sums.shape[1]
    MMA: gl.constexpr = score.type.layout
    new_most = gl.maximum(most, gl.max(score, 1) * log2_scale)
    base = gl.where(new_most == float("-inf"), 0.0, new_most)
    shrink = exp2(most - base)
    zeros = gl.full([GROUP, TILE], 0.0, gl.float32, MMA)
    weight = exp2(gl.fma(score, zeros + log2_scale, zeros - base[:, None]))
    # A thread has all weights of a sum, as in warp_groups.py; with few sums, it has all weights of a query.
    summed = weight if SUMS == 8 * WARPS else gl.convert_layout(weight, gl.DotOperandLayout(0, MMA, 2))
    added = gl.convert_layout(gl.sum(gl.reshape(summed, [GROUP, TILE // SUMS, SUMS]), 1), MMA)
    return weight, new_most, gl.fma(sums, gl.broadcast(for_rows_of(sums, shrink), sums)[0], added), shrink


@gluon.jit
def _store_heads(out_NH, heads, kv_head, G: gl.constexpr):
    H: gl.constexpr = heads.shape[1]
    m = gl.arange(0, heads.shape[0], gl.SliceLayout(1, heads.type.layout))
    h = gl.arange(0, H, gl.SliceLayout(0, heads.type.layout))
    out_at = ((kv_head * G + m) * H)[:, None] + h[None, :]
    gl.store(out_NH + out_at, heads.to(out_NH.dtype.element_ty), mask=(m < G)[:, None] & (h >= 0)[None, :])


@gluon.jit
def _store_part(acc, most, total, partial_out, partial_ml, chunk, kv_head, N: gl.constexpr, G: gl.constexpr):
    part = chunk.to(gl.int64) * N
    m = gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
    ml = partial_ml + (part + kv_head * G + m) * 2
    _store_heads(partial_out + part * acc.shape[1], acc, kv_head, G)
    gl.store(ml, most, mask=m < G)
    gl.store(ml + 1, total, mask=m < G)


@gluon.jit
def _store_new(
    k, v, k_pool, v_pool, rows_of_8, table, position, first_row, kv_head,
    K: gl.constexpr, S: gl.constexpr, TILE: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """Caches a token's own key and value, and puts them into the last tile in shared memory. first_row: its first
    token."""
    H: gl.constexpr = k.shape[0]
    element: gl.constexpr = k_pool.dtype.element_ty
    h = gl.arange(0, H, gl.SliceLayout(0, HEADS))
    new_k, new_v = k.to(element), v.to(element)
    new_block = gl.load(table + position // S).to(gl.int64)
    new_at = ((new_block * K + kv_head) * S + position % S) * H + h
    gl.store(k_pool + new_at, new_k)
    gl.store(v_pool + new_at, new_v)
    async_copy.wait_group(0)
    thread_barrier()
    _put_row(rows_of_8, 0, position - first_row, new_k, H, HEADS)
    _put_row(rows_of_8, TILE, position - first_row, new_v, H, HEADS)


@gluon.jit
def _attend_chunks(
    q_left, rooms, rows, k_pool, v_pool, table, begin, end, last, cached, is_end, first, partial_out, partial_ml,
    kv_head, log2_scale,
    N: gl.constexpr, K: gl.constexpr, S: gl.constexpr, SUMS: gl.constexpr, CHUNK: gl.constexpr, WARPS: gl.constexpr,
    COPY: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """An item's tiles, from the last one, of token `last`, backwards. Merges the chunks of a sequence's last item, and
    returns values, maxima and totals; otherwise each chunk is written to memory."""
    LEFT: gl.constexpr = q_left.type.layout
    ALONE: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    ROWS: gl.constexpr = gl.SliceLayout(1, MMA)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    GROUP: gl.constexpr = q_left.shape[0]
    H: gl.constexpr = q_left.shape[1]
    TILE: gl.constexpr = rooms.shape[1]
    element: gl.constexpr = q_left.dtype
    G: gl.constexpr = N // K
    most = gl.full([GROUP], float("-inf"), gl.float32, ROWS)
    sums = gl.full([GROUP, SUMS], 0.0, gl.float32, MMA)
    acc = gl.full([GROUP, H], 0.0, gl.float32, MMA)
    whole = gl.full([GROUP, H], 0.0, gl.float32, MMA)
    whole_most = gl.full([GROUP], float("-inf"), gl.float32, ROWS)
    whole_total = gl.full([GROUP], 0.0, gl.float32, ROWS)
    here = 0
    for start in range(last, begin - 1, -TILE):
        behind = gl.where(here == 0, 2, here - 1)
        async_copy.wait_group(1)
        # After this barrier all threads' copies have arrived, and all are done with the room that the next copy
        # overwrites.
        thread_barrier()
        if start > begin:
            _copy_rows(rooms.index(behind), k_pool, rows, H, COPY)
        async_copy.commit_group()
        keys_right = rooms.index(here).permute([1, 0]).load(RIGHT)
        score = mma_v2(q_left, keys_right, gl.full([GROUP, TILE], 0.0, gl.float32, MMA))
        token = start + gl.arange(0, TILE, gl.SliceLayout(0, MMA))
        score = gl.where((token < end)[None, :], score, float("-inf"))
        weight, most, sums, shrink = _weigh(score, most, sums, log2_scale, WARPS)
        weight_left = gl.convert_layout(weight.to(element), LEFT)
        async_copy.wait_group(1)
        thread_barrier()
        if start > begin:
            _copy_rows(rooms.index(here), v_pool, rows, H, COPY)
            rows = _rows_of_tile(table, start - 2 * TILE, cached, kv_head, K, S, TILE, COPY)
        async_copy.commit_group()
        here = gl.where(here == 2, 0, here + 1)
        acc = mma_v2(weight_left, rooms.index(here).load(RIGHT), acc * shrink[:, None])
        here = gl.where(here == 2, 0, here + 1)
        if start % CHUNK == 0:
            # In the order of warp_groups.py, where a thread has all columns of its eighths.
            total = gl.convert_layout(gl.sum(gl.convert_layout(sums, ALONE), 1), ROWS)
            if is_end:
                whole, whole_most, whole_total = merge(whole, whole_most, whole_total, acc, most, total)
            else:
                _store_part(acc, most, total, partial_out, partial_ml, first + start // CHUNK, kv_head, N, G)
            most = gl.full([GROUP], float("-inf"), gl.float32, ROWS)
            sums = gl.full([GROUP, SUMS], 0.0, gl.float32, MMA)
            acc = gl.full([GROUP, H], 0.0, gl.float32, MMA)
    return whole, whole_most, whole_total


@gluon.jit
def ring_kernel(
    qkv_BC, x_BD, bias_C, qk_norm_2H, k_pool, v_pool, out_BNH,
    table_RM, cos_LH, sin_LH, count_1, item_W8, arrived_BK, partial_out, partial_ml,
    table_width, log2_scale, eps,
    N: gl.constexpr, K: gl.constexpr, H: gl.constexpr, D: gl.constexpr, S: gl.constexpr, WIDTH: gl.constexpr,
    GROUP: gl.constexpr, FEW: gl.constexpr, TILE: gl.constexpr, ROOMS: gl.constexpr, SUMS: gl.constexpr,
    CHUNK: gl.constexpr, AT_ONCE: gl.constexpr, WARPS: gl.constexpr, VECTOR: gl.constexpr, PHASE: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Items, one after another, for one KV head; see `invariant_hopper.attend_decodes`."""
    start_next(PDL)
    kv_head = gl.program_id(1)
    num_items = gl.load(count_1)
    G: gl.constexpr = N // K
    C: gl.constexpr = (N + 2 * K) * H
    element: gl.constexpr = qkv_BC.dtype.element_ty
    COPY: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 // (H // VECTOR), H // VECTOR], [WARPS, 1], [1, 0])
    HEADS: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (H // 8), H // 8], [WARPS, 1], [1, 0])
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(VECTOR, PHASE, 8 // PHASE, [1, 0])
    rooms = gl.allocate_shared_memory(element, [ROOMS, TILE, H], SHARED)
    rows_of_8 = rooms._reinterpret(element, [ROOMS * TILE // 8, 8, H], SHARED)
    for index in range(gl.program_id(0), num_items, gl.num_programs(0)):
        item = item_W8 + index * 8
        b = gl.load(item)
        row = gl.load(item + 1)
        position = gl.load(item + 2)
        begin = gl.load(item + 3)
        end = gl.load(item + 4)
        num_items_of_sequence = gl.load(item + 6)
        first = gl.load(item + 7)
        is_end = end > position
        table = table_RM + row.to(gl.int64) * table_width
        cached = gl.minimum(end, position)
        num_tiles = (end - begin + TILE - 1) // TILE
        thread_barrier()
        last = begin + (num_tiles - 1) * TILE
        rows = _rows_of_tile(table, last, cached, kv_head, K, S, TILE, COPY)
        _copy_rows(rooms.index(0), k_pool, rows, H, COPY)
        async_copy.commit_group()
        _copy_rows(rooms.index(1), v_pool, rows, H, COPY)
        async_copy.commit_group()
        rows = _rows_of_tile(table, last - TILE, cached, kv_head, K, S, TILE, COPY)

        h = gl.arange(0, H, gl.SliceLayout(0, HEADS))
        cos = gl.load(cos_LH + position * (H // 2) + h % (H // 2))
        sin = gl.load(sin_LH + position * (H // 2) + h % (H // 2)) * gl.where(h < H // 2, -1.0, 1.0)
        if index == gl.program_id(0):
            wait_for_previous(PDL)
        qkv = qkv_BC + b.to(gl.int64) * C
        scale = row_scale(x_BD, b, eps, D, WIDTH, WARPS)
        q = _finished_queries(qkv, bias_C, qk_norm_2H, cos, sin, scale, eps, kv_head, G, H, GROUP, HEADS)
        q_left = gl.convert_layout(q.to(element), gl.DotOperandLayout(0, MMA, 2))
        if is_end:
            k, v = _new_key_and_value(qkv, bias_C, qk_norm_2H, cos, sin, scale, eps, kv_head, N, K, H, HEADS)
            _store_new(k, v, k_pool, v_pool, rows_of_8, table, position, last, kv_head, K, S, TILE, HEADS)

        whole, whole_most, whole_total = _attend_chunks(
            q_left, rooms, rows, k_pool, v_pool, table, begin, end, last, cached, is_end, first, partial_out,
            partial_ml, kv_head, log2_scale, N, K, S, SUMS, CHUNK, WARPS, COPY, MMA,
        )  # fmt: skip

        out_NH = out_BNH + b.to(gl.int64) * N * H
        if num_items_of_sequence == 1:
            _store_heads(out_NH, whole * (1.0 / whole_total)[:, None], kv_head, G)
        else:
            num_before = gl.where(is_end, begin, (num_items_of_sequence - 1) * (end - begin)) // CHUNK
            if is_end:
                _store_part(whole, whole_most, whole_total, partial_out, partial_ml, first + num_before, kv_head, N, G)
            # The barrier orders every thread's stores before the one atomic that releases them.
            thread_barrier()
            if gl.atomic_add(arrived_BK + b * K + kv_head, 1, sem="acq_rel") == num_items_of_sequence - 1:
                gl.store(arrived_BK + b * K + kv_head, 0)
                _store_merged(
                    partial_out, partial_ml, out_NH, first, num_before + 1, kv_head, N, G, H, FEW, AT_ONCE, WARPS
                )


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
