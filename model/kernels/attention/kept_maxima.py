"""Part of warp_groups.py: tiles of keys that all queries of a prompt's tile see, weighted with a maximum that is kept.

In exp2(score - maximum) the maximum only keeps weights within a number's range: bfloat16 and float32 are as exact at
2**60 as at 1. So a query keeps the maximum of its newest tiles, which contain its own token, so that its weights add up
to at least one. Earlier tiles compute no maximum, nothing is rescaled, and while one half of a tile is being weighted,
the other half's scores and the product with the values of the half before are computed:

    matrix units  | QK a | QK b | PV a  | QK a' | PV b  | QK b' | PV a'  |
    weights              | a    | b     | a'            | b'             |

A query with scores too far above its maximum gets a sum above `_HEAVIEST`, or infinity: warp_groups.py then repeats its
tile with the maximum of every tile. Must not know: which tiles.
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
_HEAVIEST = gl.constexpr(2.0**96)  # times a value of up to 2**31, it is still a float32


@gluon.jit
def in_columns(x, columns: gl.constexpr):
    """x as [rows, number, columns], for several short chains of maxima or additions instead of a long one."""
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
    # No product is in flight between rounds: the assembler would wait at once for one that is carried around the loop.
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
        # Issued after these scores: the product with the values of the half before (except in the first half), and the
        # next scores (except in the last half).
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
    """acc [queries, H] and total [queries, sums] with num_tiles more tiles, and the step after them.

    most [queries]: the maxima that are kept. TILES: of a round, one or two.
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
    """1 if the weights of any query add up to too much, else 0. first: number of the first row among the tile's `count`
    queries; rows beyond the last query may hold anything."""
    is_query = first + gl.arange(0, QUERIES, row_total.type.layout) < count
    return gl.where(gl.max(gl.where(is_query, row_total, 0.0), 0) < _HEAVIEST, 0, 1)
