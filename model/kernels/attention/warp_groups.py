"""The kernel of prefill_hopper.py in Gluon: Triton with explicit layouts, copies and barriers.

FlashAttention-3's form (arXiv:2407.08608) over paged keys and values. A program has three warp groups, which
synchronise by barriers in shared memory: `full` (copied) and `free` (read) for each buffer, `clean` (no value of the
last tile lies beyond the context) and `judged` (it is known which turns are repeated).

    producer      | K0 Q V0 | K1 V1 | K2 V2 | ...        copies into shared memory, block by block of the table
    consumer 0    | QK0 | exp 0 | QK1, PV0 | exp 1 | QK2, PV1 | exp 2 | ...        64 queries of one head
    consumer 1          | QK0 | exp 0 | QK1, PV0 | exp 1 | QK2, PV1 | exp 2 | ...  64 others

Matrix products and exponentials take about the same time at a head dim of 64. A consumer's exponentials overlap with
the other consumer's products and with its own product of the previous tile with the values. Tiles of keys are taken
from the last one backwards, so that only those taken first need a mask. Programs are persistent, one per
multiprocessor, and go from one tile of queries and head to the next, whose inputs are loaded while this one ends.

After the masked tiles a query's maximum is kept (kept_maxima.py; KEPT: tiles of such a round, 0: every tile has its
own). If that fails, the program repeats the tile of queries at its end, with the maximum of every tile.

In deterministic mode a context is split at absolute positions into chunks (CHUNK tokens; 0: none), whose results are
merged from the last one backwards, as decodes in that mode do (invariant_ring.py). A token's bits then depend on its
position alone: tiles of keys are at absolute positions, and those after it change nothing. A query's weights are added
up in SUMS partial sums, by the column of the tile.

Legend: T tokens · N query heads · K kv heads · H head dim · R rows of the state · M table width · S block size · W
tiles. smem: shared memory. Must not know: when this is used.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from octavo.model.kernels.attention.invariant_math import exp2, for_rows_of, merge
from octavo.model.kernels.attention.kept_maxima import HALF, KEYS, QUERIES, in_columns, is_too_heavy, stream_kept
from octavo.model.kernels.gluon import async_load, thread_barrier
from octavo.model.kernels.overlap import start_next, wait_for_previous

CONSUMERS = gl.constexpr(2)
EIGHT = gl.constexpr(8)  # columns that one instruction's threads share: scores are first reduced to this many maxima
COLUMNS = gl.constexpr(64)  # of one copy: as wide as a swizzle pattern in shared memory
SMEM = gl.constexpr(gl.NVMMASharedLayout(128, 16))
SMEM_OF_QUERIES = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=3))


@gluon.jit
def _item(turn):
    # Items are sorted by length: every other round goes backwards, so that all programs have about the same work.
    programs, program = gl.num_programs(0), gl.program_id(0)
    return turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)


@gluon.jit
def _num_turns(num_items):
    return (num_items + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def _turns_again(judged, again_smem, WARPS: gl.constexpr):
    # Bits of the turns that a consumer has to repeat; turn 32 shares the first one's. Both consumers repeat them.
    mbarrier.wait(judged, 0)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.max(again_smem.index(0).load(layout), 0) | gl.max(again_smem.index(1).load(layout), 0)


@gluon.jit
def _tile_of(item, num_items, tiles_W4, N: gl.constexpr):
    # Row, first token, position, count; a count of 0 beyond the last item.
    at = tiles_W4 + item // N * 4
    has = item < num_items
    return (
        gl.load(at, mask=has, other=0),
        gl.load(at + 1, mask=has, other=0),
        gl.load(at + 2, mask=has, other=0),
        gl.load(at + 3, mask=has, other=0),
    )


@gluon.jit
def _copy_tile(pool_rows, rows, full, smem, buffer, BOXES: gl.constexpr, PARTS: gl.constexpr):
    # In shared memory a product's operand is 64 columns of every token, then the next 64.
    for box in gl.static_range(BOXES):
        for part in gl.static_range(PARTS):
            room = smem.index((buffer * PARTS + part) * BOXES + box)
            async_load(pool_rows, [rows[box], part * COLUMNS], full, room)


@gluon.jit
def _produce(
    work, N: gl.constexpr, K: gl.constexpr, H: gl.constexpr, S: gl.constexpr, BUFFERS: gl.constexpr,
    ATTEMPTS: gl.constexpr,
):  # fmt: skip
    (
        q_cubes, k_rows, v_rows, q_smem, k_smem, v_smem, q_full, q_free, k_full, k_free, v_full, v_free,
        judged, again_smem, table_RM, tiles_W4, table_width, num_items, nowhere,
    ) = work  # fmt: skip
    BOX: gl.constexpr = k_rows.block_type.shape[0]
    BOXES: gl.constexpr = KEYS // BOX
    PARTS: gl.constexpr = H // COLUMNS
    step = 0
    num_done = 0
    turns = -1
    for attempt in range(ATTEMPTS):
        if attempt > 0:
            turns = _turns_again(judged, again_smem, 1)
            num_items = gl.where(turns == 0, 0, num_items)
        for turn in range(_num_turns(num_items)):
            item = _item(turn)
            row, first, position, count = _tile_of(item, num_items, tiles_W4, N)
            if (count > 0) & ((turns >> turn % 32) & 1 != 0):
                table = table_RM + row.to(gl.int64) * table_width
                end = position + count
                num_tiles = (end + KEYS - 1) // KEYS
                for i in range(num_tiles):
                    buffer = step % BUFFERS
                    phase = (step // BUFFERS) & 1
                    rows = ()
                    for box in gl.static_range(BOXES):
                        token = (num_tiles - 1 - i) * KEYS + box * BOX
                        block = gl.load(table + token // S, mask=token < end, other=0)
                        # Rows beyond the pool are copied as zeros.
                        row_of_pool = (block * K + item % N // (N // K)) * S + token % S
                        rows += (gl.where(token < end, row_of_pool, nowhere),)
                    mbarrier.wait(k_free.index(buffer), phase ^ 1)
                    mbarrier.expect(k_full.index(buffer), KEYS * H * 2)
                    _copy_tile(k_rows, rows, k_full.index(buffer), k_smem, buffer, BOXES, PARTS)
                    if i == 0:
                        for consumer in gl.static_range(CONSUMERS):
                            mbarrier.wait(q_free.index(consumer), (num_done & 1) ^ 1)
                            mbarrier.expect(q_full.index(consumer), QUERIES * H * 2)
                            for part in gl.static_range(PARTS):
                                corner = [first + consumer * QUERIES, item % N, part * COLUMNS]
                                room = q_smem.index(consumer * PARTS + part)
                                async_load(q_cubes, corner, q_full.index(consumer), room)
                    mbarrier.wait(v_free.index(buffer), phase ^ 1)
                    mbarrier.expect(v_full.index(buffer), KEYS * H * 2)
                    _copy_tile(v_rows, rows, v_full.index(buffer), v_smem, buffer, BOXES, PARTS)
                    step += 1
                num_done += 1


@gluon.jit
def _weigh(score, most, total, log2_scale, IS_MASKED: gl.constexpr):
    highest = gl.max(gl.max(in_columns(score, EIGHT), 1), 1)
    new_most = gl.maximum(most, gl.convert_layout(highest, most.type.layout) * log2_scale)
    base = new_most
    if IS_MASKED:
        # A query that comes before the tile's keys has seen none yet: no maximum to subtract.
        base = gl.where(new_most == float("-inf"), 0.0, new_most)
    shrink = exp2(most - base)
    zeros = gl.zeros_like(score)
    weight = exp2(gl.fma(score, zeros + log2_scale, zeros - gl.expand_dims(base, 1)))
    added = gl.convert_layout(gl.sum(in_columns(weight, total.shape[1]), 1), total.type.layout)
    total = gl.fma(total, gl.broadcast(for_rows_of(total, shrink), total)[0], added)
    return weight, new_most, total, shrink


@gluon.jit
def _stream(
    acc, weight, most, total, q_smem, k_tiles, v_tiles, k_full, k_free, v_full, v_free, scratch, step, begin, stop,
    position, log2_scale, whole, whole_most, whole_total,
    BUFFERS: gl.constexpr, KEEPS_ORDER: gl.constexpr, CHUNK: gl.constexpr, IS_MASKED: gl.constexpr,
):  # fmt: skip
    # Tiles from that of token `begin` back to that of `stop`, exclusive. The previous tile's weights are carried as
    # float32: as 16-bit numbers the compiler would unpack them from one round to the next.
    score_layout: gl.constexpr = weight.type.layout
    zero = gl.zeros([QUERIES, KEYS], gl.float32, score_layout)
    key = gl.expand_dims(gl.arange(0, KEYS, gl.SliceLayout(0, score_layout)), 0)
    for i in range((begin - stop) // KEYS):
        now, before = step % BUFFERS, (step - 1) % BUFFERS
        operand = gl.convert_layout(weight.to(q_smem.dtype), gl.DotOperandLayout(0, acc.type.layout, 2))
        mbarrier.wait(k_full.index(now), (step // BUFFERS) & 1)
        mbarrier.wait(v_full.index(before), ((step - 1) // BUFFERS) & 1)
        score_to_come = warpgroup_mma(q_smem, k_tiles.index(now).permute((1, 0)), zero, use_acc=False, is_async=True)
        acc_to_come = warpgroup_mma(operand, v_tiles.index(before), acc, is_async=True)
        score = warpgroup_mma_wait(1, deps=[score_to_come])
        if IS_MASKED:
            score = gl.where(begin - i * KEYS + key <= position, score, float("-inf"))
        if CHUNK:
            is_next = (begin - i * KEYS + KEYS) % CHUNK == 0
            c_most, c_total = most, total
            most = gl.where(is_next, float("-inf"), most)
            total = gl.where(is_next, 0.0, total)
        weight, most, total, shrink = _weigh(score, most, total, log2_scale, IS_MASKED)
        if KEEPS_ORDER:
            # Nobody reads this. The store depends on the weights, and what follows cannot be moved before it: otherwise
            # the compiler would wait for the product with the values first, and exponentials would overlap with less.
            scratch.store(total)
            thread_barrier()
            mbarrier.arrive(k_free.index(now))
        acc = warpgroup_mma_wait(0, deps=[acc_to_come])
        thread_barrier()
        if not KEEPS_ORDER:
            mbarrier.arrive(k_free.index(now))
        mbarrier.arrive(v_free.index(before))
        if CHUNK:  # noqa: SIM102 - the one while compiling, the other while running
            if is_next:
                whole, whole_most, whole_total = _merge_chunk(whole, whole_most, whole_total, acc, c_most, c_total)
        acc = acc * for_rows_of(acc, shrink)
        step += 1
    return acc, weight, most, total, step, whole, whole_most, whole_total


@gluon.jit
def _clean(v_tile, v_clean, consumer: gl.constexpr, begin, end, num_cleaned):
    # Beyond the context, the values in its block can be anything, even NaN. Each consumer clears half of the tile.
    H: gl.constexpr = v_tile.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // H, H // 8], [4, 1], [1, 0])
    half = v_tile.slice(consumer * HALF, HALF)
    is_value = begin + consumer * HALF + gl.arange(0, HALF, gl.SliceLayout(1, layout)) < end
    half.store(gl.where(gl.expand_dims(is_value, 1), half.load(layout), 0.0))
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(v_clean)
    mbarrier.wait(v_clean, num_cleaned & 1)


@gluon.jit
def _add_last(acc, weight, v_tiles, v_full, v_free, step, BUFFERS: gl.constexpr):
    # Adds the values of the tile whose weights are pending.
    buffer, phase = step % BUFFERS, (step // BUFFERS) & 1
    operand = gl.convert_layout(weight.to(v_tiles.dtype), gl.DotOperandLayout(0, acc.type.layout, 2))
    mbarrier.wait(v_full.index(buffer), phase)
    acc = warpgroup_mma(operand, v_tiles.index(buffer), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    thread_barrier()
    mbarrier.arrive(v_free.index(buffer))
    return acc


@gluon.jit
def _merge_chunk(whole, whole_most, whole_total, acc, most, total):
    total = gl.convert_layout(gl.sum(total, 1), most.type.layout)
    return merge(whole, whole_most, whole_total, acc, most, total)


@gluon.jit
def _consume(
    consumer: gl.constexpr, work, N: gl.constexpr, H: gl.constexpr, BUFFERS: gl.constexpr, KEEPS_ORDER: gl.constexpr,
    CHUNK: gl.constexpr, SUMS: gl.constexpr, KEPT: gl.constexpr,
):  # fmt: skip
    (
        out_TNH, q_smem, k_smem, v_smem, q_full, q_free, k_full, k_free, v_full, v_free, v_clean, judged,
        again_smem, scratch, tiles_W4, num_items, log2_scale,
    ) = work  # fmt: skip
    element: gl.constexpr = out_TNH.dtype.element_ty
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, H, 16])
    total_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SUMS, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    q_smem = q_smem._reinterpret(element, [CONSUMERS, QUERIES, H], SMEM).index(consumer)
    k_tiles = k_smem._reinterpret(element, [BUFFERS, KEYS, H], SMEM)
    v_tiles = v_smem._reinterpret(element, [BUFFERS, KEYS, H], SMEM)
    scratch = scratch.index(consumer)
    key = gl.expand_dims(gl.arange(0, KEYS, gl.SliceLayout(0, score_layout)), 0)
    query = consumer * QUERIES + gl.arange(0, QUERIES, row_layout)
    m = consumer * QUERIES + gl.arange(0, QUERIES, gl.SliceLayout(1, acc_layout))
    h = gl.arange(0, H, gl.SliceLayout(0, acc_layout))
    step = 0
    num_done = 0
    num_cleaned = 0
    turns = -1
    again = 0
    for attempt in range(2 if KEPT else 1):
        if attempt > 0:
            turns = _turns_again(judged, again_smem, 4)
            num_items = gl.where(turns == 0, 0, num_items)
        item = _item(0)
        _row, first, start, count = _tile_of(item, num_items, tiles_W4, N)
        for turn in range(_num_turns(num_items)):
            n = item % N
            item = _item(turn + 1)
            _row, next_first, next_start, next_count = _tile_of(item, num_items, tiles_W4, N)
            if (count > 0) & ((turns >> turn % 32) & 1 != 0):
                end = start + count
                begin = (end - 1) // KEYS * KEYS
                position = gl.expand_dims(start + query, 1)
                buffer, phase = step % BUFFERS, (step // BUFFERS) & 1

                mbarrier.wait(q_full.index(consumer), num_done & 1)
                mbarrier.wait(k_full.index(buffer), phase)
                zero = gl.zeros([QUERIES, KEYS], gl.float32, score_layout)
                score = warpgroup_mma(q_smem, k_tiles.index(buffer).permute((1, 0)), zero, use_acc=False, is_async=True)
                score = warpgroup_mma_wait(0, deps=[score])
                thread_barrier()
                mbarrier.arrive(k_free.index(buffer))
                token = begin + key
                score = gl.where((token <= position) & (token < end), score, float("-inf"))
                most = gl.full([QUERIES], float("-inf"), gl.float32, row_layout)
                total = gl.zeros([QUERIES, SUMS], gl.float32, total_layout)
                weight, most, total, _shrink = _weigh(score, most, total, log2_scale, True)
                mbarrier.wait(v_full.index(buffer), phase)
                if begin + KEYS > end:
                    _clean(v_tiles.index(buffer), v_clean, consumer, begin, end, num_cleaned)
                    num_cleaned += 1
                acc = gl.zeros([QUERIES, H], gl.float32, acc_layout)
                whole = gl.zeros([QUERIES, H], gl.float32, acc_layout)
                whole_most = gl.full([QUERIES], float("-inf"), gl.float32, row_layout)
                whole_total = gl.zeros([QUERIES], gl.float32, row_layout)
                # All queries see the keys before it; their own tokens come after it. A repeated turn keeps no maxima.
                seen_by_all = start // KEYS * KEYS
                if KEPT:
                    seen_by_all = gl.where(attempt == 0, seen_by_all, 0)
                acc, weight, most, total, step, whole, whole_most, whole_total = _stream(
                    acc, weight, most, total, q_smem, k_tiles, v_tiles, k_full, k_free, v_full, v_free, scratch,
                    step + 1, begin - KEYS, seen_by_all - KEYS, position, log2_scale, whole, whole_most, whole_total,
                    BUFFERS, KEEPS_ORDER, CHUNK, True,
                )  # fmt: skip
                if not KEPT:
                    acc, weight, most, total, step, whole, whole_most, whole_total = _stream(
                        acc, weight, most, total, q_smem, k_tiles, v_tiles, k_full, k_free, v_full, v_free, scratch,
                        step, seen_by_all - KEYS, -KEYS, position, log2_scale, whole, whole_most, whole_total,
                        BUFFERS, KEEPS_ORDER, CHUNK, False,
                    )  # fmt: skip
                    mbarrier.arrive(q_free.index(consumer))
                acc = _add_last(acc, weight, v_tiles, v_full, v_free, step - 1, BUFFERS)
                if KEPT:
                    acc, total, step = stream_kept(
                        acc, total, most, q_smem, k_tiles, v_tiles, k_full, k_free, v_full, v_free, step,
                        seen_by_all // KEYS, log2_scale, BUFFERS, KEPT,
                    )  # fmt: skip
                    mbarrier.arrive(q_free.index(consumer))
                if CHUNK:
                    acc, most, last = _merge_chunk(whole, whole_most, whole_total, acc, most, total)
                    acc = acc * for_rows_of(acc, 1.0 / last)
                else:
                    row_total = gl.sum(total, 1)
                    acc = acc * for_rows_of(acc, 1.0 / row_total)
                    if KEPT:
                        again |= is_too_heavy(row_total, consumer * QUERIES, count) << turn % 32
                at = gl.expand_dims((first.to(gl.int64) + m) * N + n, 1) * H + gl.expand_dims(h, 0)
                gl.store(out_TNH + at, acc.to(element), mask=gl.expand_dims(m < count, 1))
                num_done += 1
            first, start, count = next_first, next_start, next_count
        if KEPT:  # noqa: SIM102 - the one while compiling, the other while running
            if attempt == 0:
                again_smem.index(consumer).store(gl.full([32], again, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
                thread_barrier()
                mbarrier.arrive(judged)


@gluon.jit(do_not_specialize=["num_items"])
def attend_kernel(
    q_cubes, k_rows, v_rows, out_TNH, table_RM, tiles_W4, table_width, num_items, nowhere, log2_scale,
    N: gl.constexpr, K: gl.constexpr, H: gl.constexpr, S: gl.constexpr, BUFFERS: gl.constexpr,
    KEEPS_ORDER: gl.constexpr, CHUNK: gl.constexpr, SUMS: gl.constexpr, KEPT: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    start_next(PDL)
    element: gl.constexpr = out_TNH.dtype.element_ty
    BOX: gl.constexpr = k_rows.block_type.shape[0]
    ROOMS: gl.constexpr = BUFFERS * (KEYS // BOX) * (H // COLUMNS)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    sums_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    q_smem = gl.allocate_shared_memory(element, [CONSUMERS * (H // COLUMNS), QUERIES, 1, COLUMNS], SMEM_OF_QUERIES)
    k_smem = gl.allocate_shared_memory(element, [ROOMS, BOX, COLUMNS], SMEM)
    v_smem = gl.allocate_shared_memory(element, [ROOMS, BOX, COLUMNS], SMEM)
    scratch = gl.allocate_shared_memory(gl.float32, [CONSUMERS, QUERIES, SUMS], sums_layout)
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
    q_free = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], BARRIER)
    k_free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], BARRIER)
    v_free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], BARRIER)
    v_clean = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    judged = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    again_smem = gl.allocate_shared_memory(gl.int32, [CONSUMERS, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    mbarrier.init(v_clean, count=CONSUMERS)
    mbarrier.init(judged, count=CONSUMERS)
    for consumer in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(consumer), count=1)
        mbarrier.init(q_free.index(consumer), count=1)
    for buffer in gl.static_range(BUFFERS):
        mbarrier.init(k_full.index(buffer), count=1)
        mbarrier.init(v_full.index(buffer), count=1)
        mbarrier.init(k_free.index(buffer), count=CONSUMERS)
        mbarrier.init(v_free.index(buffer), count=CONSUMERS)
    fence_async_shared()
    loads = (
        q_cubes, k_rows, v_rows, q_smem, k_smem, v_smem, q_full, q_free, k_full, k_free, v_full, v_free,
        judged, again_smem, table_RM, tiles_W4, table_width, num_items, nowhere,
    )  # fmt: skip
    work = (
        out_TNH, q_smem, k_smem, v_smem, q_full, q_free, k_full, k_free, v_full, v_free, v_clean, judged,
        again_smem, scratch, tiles_W4, num_items, log2_scale,
    )  # fmt: skip
    # The warp groups start after this wait.
    wait_for_previous(PDL)
    gl.warp_specialize(
        [
            (_consume, (0, work, N, H, BUFFERS, KEEPS_ORDER, CHUNK, SUMS, KEPT)),
            (_consume, (1, work, N, H, BUFFERS, KEEPS_ORDER, CHUNK, SUMS, KEPT)),
            (_produce, (loads, N, K, H, S, BUFFERS, 2 if KEPT else 1)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
