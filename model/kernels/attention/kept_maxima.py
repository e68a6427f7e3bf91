"""Tiles of keys that all queries of a prompt's tile see, weighed by a maximum that is kept: a part of warp_groups.py.

A weight is exp2(score - maximum) for the range of numbers alone: bfloat16 and float32 are as exact at 2**60 as at 1. So
a query's maximum is that of its newest tiles, which hold the query's own token: its weights add up to one at least. No
tile behind them looks for a maximum, nothing is rescaled, and while one half of a tile is being weighed, the other's
scores and the values of the half before are multiplied:

    matrix units  | QK a | QK b | PV a  | QK a' | PV b  | QK b' | PV a'  |
    weights              | a    | b     | a'            | b'             |

A query that meets scores too far above its maximum has a sum beyond `_HEAVIEST`, or infinite: warp_groups.py does its
tile again, with a maximum of every tile. Must not know: which tiles.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from octavo.model.kernels.attention.invariant_math import exp2
from octavo.model.kernels.gluon import thread_barrier

QUERIES = gl.constexpr(64)  # of a consumer: the rows of one instruction
KEYS = gl.constexpr(128)  # of a tile
HALF = gl.constexpr(KEYS // 2)
_HEAVIEST = gl.constexpr(2.0**96)  # times a value it is a float32 still, for values up to 2**31


@gluon.jit
def in_columns(x, columns: gl.constexpr):
    """[rows, number, columns]: several short chains of maxima or additions instead of a long one."""
    return gl.reshape(x, [x.shape[0], x.shape[1] // columns, columns])


@gluon.jit
def _multiply_half(q_smem, k_tiles, buffer, half: gl.constexpr, layout: gl.constexpr):
    zero = gl.zeros([QUERIES, HALF], gl.float32, layout)
    half_of_keys = k_tiles.index(buffer).slice(half * HALF, HALF).permute((1, 0))
    return warpgroup_mma(q_smem, half_of_keys, zero, use_acc=False, is_async=True)


@gluon.jit
def _round(
    acc, total, most, q_smem, k_tiles, v_tiles, k_full, k_free, v_full, v_free, step, log2_scale,
    BUFFERS: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    # Between rounds nothing is being multiplied: what is carried around a loop the assembler waits for at once.
    half_layout: gl.constexpr = most.type.layout.parent
    now = step % BUFFERS
    mbarrier.wait(k_full.index(now), (step // BUFFERS) & 1)
    to_come = _multiply_half(q_smem, k_tiles, now, 0, half_layout)
    values_to_come = warpgroup_mma_init(acc)
    for half in gl.static_range(2 * TILES):
        now, phase = (step + half // 2) % BUFFERS, ((step + half // 2) // BUFFERS) & 1
        weighed_now = to_come
        if half + 1 < 2 * TILES:
            after = (step + (half + 1) // 2) % BUFFERS
            if half % 2 == 1:
                mbarrier.wait(k_full.index(after), ((step + (half + 1) // 2) // BUFFERS) & 1)
            to_come = _multiply_half(q_smem, k_tiles, after, (half + 1) % 2, half_layout)
        # Behind these scores: the values of the half before, but for the first one, and scores, but for the last one.
        score = warpgroup_mma_wait(1 if half == 0 or half + 1 == 2 * TILES else 2, deps=[weighed_now])
        if half % 2 == 0:
            mbarrier.wait(v_full.index(now), phase)
        else:
            thread_barrier()
            mbarrier.arrive(k_free.index(now))
            if half > 1:
                mbarrier.arrive(v_free.index((step + half // 2 - 1) % BUFFERS))
        zeros = gl.zeros_like(score)
        weight = exp2(gl.fma(score, zeros + log2_scale, zeros - gl.expand_dims(most, 1)))
        total += gl.convert_layout(gl.sum(in_columns(weight, total.shape[1]), 1), total.type.layout)
        operand = gl.convert_layout(weight.to(q_smem.dtype), gl.DotOperandLayout(0, acc.type.layout, 2))
        half_of_values = v_tiles.index(now).slice(half % 2 * HALF, HALF)
        values_to_come = warpgroup_mma(operand, half_of_values, values_to_come, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[values_to_come])
    thread_barrier()
    mbarrier.arrive(v_free.index((step + TILES - 1) % BUFFERS))
    return acc, total, step + TILES


@gluon.jit
def stream_kept(
    acc, total, most, q_smem, k_tiles, v_tiles, k_full, k_free, v_full, v_free, step, num_tiles, log2_scale,
    BUFFERS: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """acc [queries, H] and total [queries, sums] with so many tiles more, and the step behind them.

    most [queries]: what is kept. TILES: of a round, one or two.
    """
    half_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    most = gl.convert_layout(most, gl.SliceLayout(1, half_layout))
    for _ in range(num_tiles // TILES):
        acc, total, step = _round(
            acc, total, most, q_smem, k_tiles, v_tiles, k_full, k_free, v_full, v_free, step, log2_scale, BUFFERS, TILES
        )
    if TILES == 2:  # noqa: SIM102 - the one while compiling, the other while running
        if num_tiles % 2 == 1:
            acc, total, step = _round(
                acc, total, most, q_smem, k_tiles, v_tiles, k_full, k_free, v_full, v_free, step, log2_scale, BUFFERS, 1
            )
    return acc, total, step


@gluon.jit
def is_too_heavy(row_total, first, count):
    """1 where the weights of a query add up to too much, else 0. first: of these, among `count` queries of the tile;
    rows behind the last one may hold anything."""
    is_query = first + gl.arange(0, QUERIES, row_total.type.layout) < count
    return gl.where(gl.max(gl.where(is_query, row_total, 0.0), 0) < _HEAVIEST, 0, 1)
