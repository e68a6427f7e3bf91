"""The kernel of model/kernels/products/overlapping.py, which describes it. A module of its own, since Gluon is
experimental and may fail to import; steps then do without.

Legend: T tokens · O outputs · K inputs. Must not know: layers.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from octavo.model.kernels.gluon import async_load, thread_barrier
from octavo.model.kernels.overlap import start_next, wait_for_previous

BLOCK = 64
"""Inputs of a block: 128 bytes, which the copy engine can swizzle over the banks."""
SHARED_NUMBERS = gl.constexpr(8192)
"""Numbers of a tile from which on its programs add up its splits together; of a smaller tile, the last to arrive
does."""
EARLY_TOKENS, EARLY_INPUTS = gl.constexpr(16), gl.constexpr(1024)
"""Most tokens of a tile, and most inputs of a row, that registers hold: their squares are summed before the first
product."""


@gluon.jit
def _corner_of(tile, T, O: gl.constexpr, RESULTS: gl.constexpr, TOKENS: gl.constexpr, GROUP: gl.constexpr):
    # A tile's first token and output. Token tiles vary fastest, within groups of them, so that a tile of weights is
    # read while it is in the cache.
    token_tiles = (T + TOKENS - 1) // TOKENS
    in_group = GROUP * ((O + RESULTS - 1) // RESULTS)
    width = gl.minimum(token_tiles - tile // in_group * GROUP, GROUP)
    return (tile // in_group * GROUP + tile % in_group % width) * TOKENS, tile % in_group // width * RESULTS


@gluon.jit
def _fetch_weights(w_desc, block, output, bar, w_smem, has, IS_GATE: gl.constexpr):
    if IS_GATE:
        async_load(w_desc, [block, 0, output, 0], bar, w_smem, pred=has)
    else:
        async_load(w_desc, [block, output, 0], bar, w_smem, pred=has)


@gluon.jit
def _fetch_first(
    w_desc, x_desc, w_smem, x_smem, bars, first, rounds, token, output,
    BYTES: gl.constexpr, IS_GATE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Fills every stage for the first time: weights at once, inputs when the previous kernel has written them."""
    STAGES: gl.constexpr = w_smem.shape[0]
    BLOCKS: gl.constexpr = w_smem.shape[1]
    for s in gl.static_range(STAGES):
        mbarrier.init(bars.index(s), count=1)
    fence_async_shared()
    thread_barrier()
    for s in gl.static_range(STAGES):
        mbarrier.expect(bars.index(s), BYTES, pred=s < rounds)
        _fetch_weights(w_desc, (first + s) * BLOCKS, output, bars.index(s), w_smem.index(s), s < rounds, IS_GATE)
    wait_for_previous(PDL)
    for s in gl.static_range(STAGES):
        at = [(first + s) * BLOCKS, token, 0]
        async_load(x_desc, at, bars.index(s), x_smem.index(s), pred=s < rounds)


@gluon.jit
def _fetch_again(
    w_desc, x_desc, w_smem, x_smem, bars, i, first, rounds, token, output,
    BYTES: gl.constexpr, IS_GATE: gl.constexpr,
):  # fmt: skip
    """In round i: refills the stage of the round before it, if a later round needs it."""
    STAGES: gl.constexpr = w_smem.shape[0]
    BLOCKS: gl.constexpr = w_smem.shape[1]
    # After this barrier all warps are done with the previous round's stage, which is refilled.
    thread_barrier()
    free = (i + STAGES - 1) % STAGES
    ahead = i + STAGES - 1
    has = (i > 0) & (ahead < rounds)
    block_at = (first + ahead) * BLOCKS
    mbarrier.expect(bars.index(free), BYTES, pred=has)
    _fetch_weights(w_desc, block_at, output, bars.index(free), w_smem.index(free), has, IS_GATE)
    corner = [block_at, token, 0]
    async_load(x_desc, corner, bars.index(free), x_smem.index(free), pred=has)


@gluon.jit
def _squares_of(x_TK, token, T, K: gl.constexpr, TOKENS: gl.constexpr, LAYOUT: gl.constexpr):
    # Summed by column of a block, block after block.
    t = token + gl.arange(0, TOKENS, gl.SliceLayout(1, LAYOUT))
    k = gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    is_in = (t < T)[:, None] & (k >= 0)[None, :]
    squares = gl.zeros([TOKENS, 64], gl.float32, LAYOUT)
    for block in gl.static_range(K // 64):
        at = x_TK + t.to(gl.int64)[:, None] * K + block * 64 + k[None, :]
        x = gl.load(at, mask=is_in, other=0.0).to(gl.float32)
        squares += x * x
    return squares


@gluon.jit
def _sum_products(
    squares, w_desc, x_desc, w_smem, x_smem, bars, first, rounds, token, output,
    BYTES: gl.constexpr, EACH: gl.constexpr, TURNS: gl.constexpr, PENDING: gl.constexpr, IS_GATE: gl.constexpr,
    HAS_SQUARES: gl.constexpr, ACC: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Multiplies a split's rounds, while later ones are fetched, and adds up the products turn by turn; to the squares,
    those of its inputs are added if HAS_SQUARES. PENDING: products that may run into the next round."""
    STAGES: gl.constexpr = w_smem.shape[0]
    BLOCKS: gl.constexpr = x_smem.shape[1]
    TOKENS: gl.constexpr = x_smem.shape[2]
    OUTPUTS: gl.constexpr = w_smem.shape[2] * w_smem.shape[3] if IS_GATE else w_smem.shape[2]
    acc = gl.zeros([OUTPUTS, TOKENS], gl.float32, ACC)
    if TURNS > 1:
        total = gl.zeros([OUTPUTS, TOKENS], gl.float32, ACC)
    OF_TURN: gl.constexpr = (EACH + TURNS - 1) // TURNS
    for turn in range(TURNS):
        if TURNS > 1:
            acc = gl.zeros([OUTPUTS, TOKENS], gl.float32, ACC)
        for i in range(turn * OF_TURN, gl.minimum((turn + 1) * OF_TURN, rounds)):
            stage = i % STAGES
            mbarrier.wait(bars.index(stage), (i // STAGES) & 1)
            w = w_smem.index(stage).reshape([BLOCKS * OUTPUTS, 64])
            x = x_smem.index(stage).reshape([BLOCKS * TOKENS, 64])
            for b in gl.static_range(BLOCKS):
                acc = warpgroup_mma(
                    w.slice(b * OUTPUTS, OUTPUTS), x.slice(b * TOKENS, TOKENS).permute((1, 0)), acc, is_async=True
                )
            if HAS_SQUARES:
                for b in gl.static_range(BLOCKS):
                    block = x.slice(b * TOKENS, TOKENS).load(ROWS).to(gl.float32)
                    squares += block * block
            acc = warpgroup_mma_wait(PENDING, deps=(acc,))
            if EACH > STAGES:
                _fetch_again(w_desc, x_desc, w_smem, x_smem, bars, i, first, rounds, token, output, BYTES, IS_GATE)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        if TURNS > 1:
            total += acc
    if TURNS > 1:
        acc = total
    return acc, squares


@gluon.jit
def _activated(acc, scale, RESULTS: gl.constexpr, TOKENS: gl.constexpr, WARPS: gl.constexpr, LAYOUT: gl.constexpr):
    # silu(gate) * up, from gate's rows and up's.
    pair_layout: gl.constexpr = gl.BlockedLayout([4, 1, 2], [8, 4, 1], [1, WARPS, 1], [0, 1, 2])
    pairs = gl.convert_layout(acc.reshape([2, RESULTS, TOKENS]).permute([1, 2, 0]), pair_layout)
    gate, up = gl.split(pairs)
    gate = gl.convert_layout(gate, LAYOUT) * scale
    up = gl.convert_layout(up, LAYOUT) * scale
    return gate / (1.0 + gl.exp(-gate)) * up


@gluon.jit
def _arrive(out, places, arrived, split, SPLITS: gl.constexpr):
    # Leaves a split's part; whether it is the last of its tile, and then the sum of all, in the order of the splits.
    RESULTS: gl.constexpr = out.shape[0]
    TOKENS: gl.constexpr = out.shape[1]
    LAYOUT: gl.constexpr = out.type.layout
    gl.store(places + split * (RESULTS * TOKENS), out)
    # The barrier orders every thread's stores before the one atomic that releases them.
    thread_barrier()
    is_last = gl.atomic_add(arrived, 1, sem="acq_rel") == SPLITS - 1
    if is_last:
        gl.store(arrived, 0)
        out = gl.zeros([RESULTS, TOKENS], gl.float32, LAYOUT)
        for s in gl.static_range(SPLITS):
            out += gl.load(places + s * (RESULTS * TOKENS), cache_modifier=".cg")
    return is_last, out


@gluon.jit
def _add_parts(
    out_TO, tile_parts, arrived, token, output, split, T,
    O: gl.constexpr, RESULTS: gl.constexpr, TOKENS: gl.constexpr, SPLITS: gl.constexpr, ADD: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    # Each program of the tile adds up a share of it, in the order of the splits. The barrier orders every thread's
    # stores before the one atomic that releases them.
    thread_barrier()
    gl.atomic_add(arrived, 1, sem="acq_rel")
    while gl.atomic_add(arrived, 0, sem="acq_rel") < SPLITS:
        pass
    SHARES: gl.constexpr = 2 if SPLITS == 2 else 4 if SPLITS <= 4 else 8 if SPLITS <= 8 else 16 if SPLITS <= 16 else 32
    SHARE: gl.constexpr = RESULTS * TOKENS // SHARES
    flat: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    for share in range(split, SHARES, SPLITS):
        inner = share * SHARE + gl.arange(0, SHARE, flat)
        total = gl.zeros([SHARE], gl.float32, flat)
        for s in gl.static_range(SPLITS):
            total += gl.load(tile_parts + s * (RESULTS * TOKENS) + inner, cache_modifier=".cg")
        t, o = token + inner // RESULTS, output + inner % RESULTS
        out_at = out_TO + t.to(gl.int64) * O + o
        if ADD:
            total += gl.load(out_at, mask=(t < T) & (o < O), other=0.0).to(gl.float32)
            if SHARE < 128 * WARPS:
                thread_barrier()  # several threads have each number: all must have read it before one writes
        gl.store(out_at, total.to(out_TO.dtype.element_ty), mask=(t < T) & (o < O))
    if gl.atomic_add(arrived, 1, sem="acq_rel") == 2 * SPLITS - 1:
        gl.store(arrived, 0)


@gluon.jit
def _store_activated(
    acc, squares, scale_T, out_at, mask, token, T, eps,
    K: gl.constexpr, TOKENS: gl.constexpr, HAS_SCALE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Ends a tile of gate and up, whose tokens are scaled first: by scale_T if HAS_SCALE, otherwise by the squares of
    their inputs."""
    LAYOUT: gl.constexpr = out_at.type.layout
    RESULTS: gl.constexpr = out_at.shape[0]
    if HAS_SCALE:
        inner_t = gl.arange(0, TOKENS, gl.SliceLayout(0, LAYOUT))
        scale = gl.load(scale_T + token + inner_t, mask=token + inner_t < T, other=0.0)[None, :]
    else:
        scale = 1.0 / gl.sqrt(gl.sum(squares, 1) / K + eps)
        scale = gl.convert_layout(scale, gl.SliceLayout(0, LAYOUT))[None, :]
    out = _activated(acc, scale, RESULTS, TOKENS, WARPS, LAYOUT)
    gl.store(out_at, out.to(out_at.dtype.element_ty), mask=mask)


@gluon.jit
def _store_sums(
    out, before, out_TO, out_at, mask, tile_parts, inner, arrived, tile, split, token, output, T,
    O: gl.constexpr, SPLITS: gl.constexpr, IS_SHARED: gl.constexpr, ADD: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Ends a tile of plain sums: adds up its splits, and what is there if ADD. before: that, if it is loaded already.
    inner: where a split's part has each number. IS_SHARED: all programs of the tile add it up."""
    RESULTS: gl.constexpr = out.shape[0]
    TOKENS: gl.constexpr = out.shape[1]
    if IS_SHARED:
        gl.store(tile_parts + split * (RESULTS * TOKENS) + inner, out)
        _add_parts(
            out_TO, tile_parts, arrived + tile, token, output, split, T,
            O=O, RESULTS=RESULTS, TOKENS=TOKENS, SPLITS=SPLITS, ADD=ADD, WARPS=WARPS,
        )  # fmt: skip
    else:
        is_last = True
        if SPLITS > 1:
            is_last, out = _arrive(out, tile_parts + inner, arrived + tile, split, SPLITS)
        if is_last:
            if before is not None:
                out += before.to(gl.float32)
            elif ADD:
                out += gl.load(out_at, mask=mask, other=0.0).to(gl.float32)
            gl.store(out_at, out.to(out_TO.dtype.element_ty), mask=mask)


@gluon.jit(do_not_specialize=["T"])
def overlapping_product_kernel(
    w_desc, x_desc, x_TK, out_TO, parts, arrived, T, eps,
    O: gl.constexpr, K: gl.constexpr, OUTPUTS: gl.constexpr, TOKENS: gl.constexpr, BLOCKS: gl.constexpr,
    STAGES: gl.constexpr, SPLITS: gl.constexpr, TURNS: gl.constexpr, GROUP: gl.constexpr, THEN: gl.constexpr,
    WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    start_next(PDL)
    IS_GATE: gl.constexpr = THEN >= 2
    HAS_SCALE: gl.constexpr = THEN == 3
    RESULTS: gl.constexpr = OUTPUTS // 2 if IS_GATE else OUTPUTS
    BYTES: gl.constexpr = (OUTPUTS + TOKENS) * BLOCKS * 64 * 2
    ROUNDS: gl.constexpr = (K + BLOCKS * 64 - 1) // (BLOCKS * 64)
    EACH: gl.constexpr = (ROUNDS + SPLITS - 1) // SPLITS
    gl.static_assert(STAGES > 1 or EACH == 1, "a stage is filled again one round after it was read")
    # With other arithmetic in the loop, ptxas serialises products that run into the next round (C7515).
    IS_SUMMED_EARLY: gl.constexpr = IS_GATE and not HAS_SCALE and TOKENS <= EARLY_TOKENS and K <= EARLY_INPUTS
    HAS_SQUARES: gl.constexpr = IS_GATE and not HAS_SCALE and not IS_SUMMED_EARLY
    PENDING: gl.constexpr = 0 if HAS_SQUARES else (BLOCKS if BLOCKS < 7 else 7)
    dtype: gl.constexpr = w_desc.dtype
    # The programs of a tile may wait for one another; they are adjacent in the grid, so that they start together.
    tile = gl.program_id(0) // SPLITS
    split = gl.program_id(0) % SPLITS
    token, output = _corner_of(tile, T, O, RESULTS, TOKENS, GROUP)
    first = split * EACH
    rounds = gl.minimum(EACH, ROUNDS - first)

    if IS_GATE:
        w_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCKS, 2, RESULTS, 64], w_desc.layout)
    else:
        w_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCKS, OUTPUTS, 64], w_desc.layout)
    x_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCKS, TOKENS, 64], x_desc.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    _fetch_first(w_desc, x_desc, w_smem, x_smem, bars, first, rounds, token, output, BYTES, IS_GATE, PDL)

    # Two warp groups share a tile's tokens if its outputs are enough for only one.
    SIDES: gl.constexpr = 2 if WARPS == 8 and OUTPUTS == 64 else 1
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS // SIDES, SIDES], instr_shape=[16, TOKENS // SIDES, 16]
    )
    WIDE: gl.constexpr = 8 if RESULTS < 64 else 16
    out_layout: gl.constexpr = gl.BlockedLayout([4, 1], [WIDE, 32 // WIDE], [1, WARPS], [0, 1])
    inner_o = gl.arange(0, RESULTS, gl.SliceLayout(1, out_layout))
    inner_t = gl.arange(0, TOKENS, gl.SliceLayout(0, out_layout))
    out_at = out_TO + (token + inner_t).to(gl.int64)[None, :] * O + (output + inner_o)[:, None]
    mask = (token + inner_t < T)[None, :] & (output + inner_o < O)[:, None]
    # What the sums are added to is loaded together with the first inputs, if registers hold it.
    IS_SHARED: gl.constexpr = SPLITS > 1 and RESULTS * TOKENS >= SHARED_NUMBERS
    IS_EARLY: gl.constexpr = THEN == 1 and not IS_SHARED and RESULTS * TOKENS <= 1024 * WARPS
    before = gl.load(out_at, mask=mask, other=0.0) if IS_EARLY else None

    row_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    if IS_SUMMED_EARLY:
        squares = _squares_of(x_TK, token, T, K, TOKENS, row_layout)
    else:
        squares = gl.zeros([TOKENS, 64], gl.float32, row_layout)
    acc, squares = _sum_products(
        squares, w_desc, x_desc, w_smem, x_smem, bars, first, rounds, token, output,
        BYTES=BYTES, EACH=EACH, TURNS=TURNS, PENDING=PENDING, IS_GATE=IS_GATE, HAS_SQUARES=HAS_SQUARES,
        ACC=acc_layout, ROWS=row_layout,
    )  # fmt: skip
    # What follows reuses the stages' memory, from which another warp may still be multiplying: a warp's wait covers
    # only its own products.
    thread_barrier()

    if IS_GATE:
        _store_activated(
            acc, squares, parts, out_at, mask, token, T, eps, K=K, TOKENS=TOKENS, HAS_SCALE=HAS_SCALE, WARPS=WARPS
        )
    else:
        out = gl.convert_layout(acc, out_layout)
        tile_parts = parts + tile.to(gl.int64) * (SPLITS * RESULTS * TOKENS)
        inner = inner_o[:, None] + RESULTS * inner_t[None, :]
        _store_sums(
            out, before, out_TO, out_at, mask, tile_parts, inner, arrived, tile, split, token, output, T,
            O=O, SPLITS=SPLITS, IS_SHARED=IS_SHARED, ADD=THEN == 1, WARPS=WARPS,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["T"])
def scale_kernel(x_TK, scale_T, T, eps, K: gl.constexpr, TOKENS: gl.constexpr, WARPS: gl.constexpr):
    # Computed as in the product, in the same order.
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    t = gl.program_id(0) * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(1, layout))
    k = gl.arange(0, 64, gl.SliceLayout(0, layout))
    is_in = (t < T)[:, None] & (k >= 0)[None, :]
    squares = gl.zeros([TOKENS, 64], gl.float32, layout)
    for block in range(K // 64):
        x = gl.load(x_TK + t.to(gl.int64)[:, None] * K + block * 64 + k[None, :], mask=is_in, other=0.0).to(gl.float32)
        squares += x * x
    gl.store(scale_T + t, 1.0 / gl.sqrt(gl.sum(squares, 1) / K + eps), mask=t < T)


def by_blocks(matrix: torch.Tensor, tile: list[int]) -> TensorDescriptor:
    """[rows, K] or [2, rows, K], viewed as blocks of inputs. tile: [blocks, rows] or [blocks, 2, rows]."""
    *rows, inputs = matrix.shape
    shape, strides = [inputs // BLOCK, *rows, BLOCK], [BLOCK, *matrix.stride()[:-1], 1]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=len(shape))
    return TensorDescriptor(matrix, shape, strides, [*tile, BLOCK], layout)
