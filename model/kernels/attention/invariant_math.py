"""Common to the Gluon kernels of deterministic mode: queries, keys and values from the raw product, and merging chunks
of a context.

Each function runs in several kernels, in different layouts, and must give the same bits in all of them. So nothing is
left to the compiler: a product that it could fuse with an addition is an instruction of its own, what is fused is
written as fma, and the numbers of a sum are always distributed among threads in the same way (`HEADS` of a warp's rows,
blocks of eight of a token).

Legend: N query heads · K kv heads · H head dim · C = (N + 2K)·H · D model dim. Must not know: who calls.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def product(x, y):
    """x * y, rounded in any case: it cannot be fused with an addition."""
    return gl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def exp2(x):
    """2^x. The library's function keeps denormal numbers, which costs three more instructions."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def for_rows_of(matrix, x):
    """x, a number for each row, as [rows, 1] in the matrix's layout."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, matrix.type.layout)), 1)


@gluon.jit
def merge(acc, most, total, chunk_acc, chunk_most, chunk_total):
    """[rows, H], [rows], [rows]: what was merged so far, and a chunk's. Initially most is -inf, the others 0."""
    new_most = gl.maximum(most, chunk_most)
    base = gl.where(new_most == float("-inf"), 0.0, new_most)
    shrink = exp2(most - base)
    weight = exp2(chunk_most - base)
    total = gl.fma(chunk_total, weight, total * shrink)
    weight = gl.broadcast(for_rows_of(acc, weight), acc)[0]
    acc = gl.fma(chunk_acc, weight, acc * for_rows_of(acc, shrink))
    return acc, new_most, total


@gluon.jit
def row_scale(x_BD, b, eps, D: gl.constexpr, WIDTH: gl.constexpr, WARPS: gl.constexpr):
    """The RMSNorm's scale for one row."""
    d = gl.arange(0, WIDTH, gl.BlockedLayout([8], [32], [WARPS], [0]))
    x = gl.load(x_BD + b * D + d, mask=d < D, other=0.0).to(gl.float32)
    return 1.0 / gl.sqrt(gl.sum(product(x, x), 0) / D + eps)


@gluon.jit
def heads_of(qkv, bias_C, at, mask, scale):
    """Elements of the raw product, scaled, plus their bias."""
    x = gl.load(qkv + at, mask=mask, other=0.0).to(gl.float32)
    scales = gl.zeros_like(x) + scale
    if bias_C is None:
        x = product(x, scales)
    else:
        x = gl.fma(x, scales, gl.load(bias_C + at, mask=mask, other=0.0).to(gl.float32))
    return x


@gluon.jit
def norm_scale(x, eps, H: gl.constexpr, AXIS: gl.constexpr):
    """The scale of a head's RMSNorm, along the axis."""
    return 1.0 / gl.sqrt(gl.sum(product(x, x), AXIS) / H + eps)


@gluon.jit
def normed(x, inverse, norm, mask):
    """A head times its norm's scale and the norm's weights."""
    weight = gl.load(norm, mask=mask, other=0.0).to(gl.float32)
    return product(product(x, gl.broadcast(inverse, x)[0]), gl.broadcast(weight, x)[0])


@gluon.jit
def turned(x, other, cos, sin):
    """A head, rotated by its position (RoPE). other: the other half of each element. The first half's sine is
    negated."""
    return gl.fma(x, gl.broadcast(cos, x)[0], product(other, gl.broadcast(sin, x)[0]))
