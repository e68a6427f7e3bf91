"""Preparation for products of many tokens: integers unpacked to plain weights, and tokens rounded to e4m3.

Legend: O outputs · I inputs · G groups · T tokens · W bytes of a row of codes.
"""

import torch
import triton
import triton.language as tl

from octavo.model.kernels.checks import check_tensor, next_power_of_2
from octavo.model.quantization.grouped import GroupedWeight
from octavo.model.quantization.rounding import FP8, FP8_MAX

ROWS = 16


@triton.jit
def _unpack_kernel(
    codes_OW, scale_GO, zero_GO, order_I, factor_I, out_OI,
    O: tl.constexpr, I: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr,
    HAS_ORDER: tl.constexpr, HAS_FACTOR: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    o = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    start = tl.program_id(1) * BLOCK
    is_output = (o < O)[:, None]
    at = start // GROUP * O + o
    scale = tl.load(scale_GO + at, mask=o < O, other=0.0).to(tl.float32)[:, None]
    zero = tl.load(zero_GO + at, mask=o < O, other=0).to(tl.float32)[:, None]
    row = o.to(tl.int64)[:, None]
    PARTS: tl.constexpr = 8 // BITS
    WIDTH: tl.constexpr = BLOCK // PARTS
    j = tl.arange(0, WIDTH)
    codes = tl.load(codes_OW + row * (I // PARTS) + (start // PARTS + j)[None, :], mask=is_output, other=0)
    for part in tl.static_range(PARTS):
        code = (codes >> (part * BITS)) & (15 if BITS == 4 else 255)
        i = start + part * WIDTH + j
        if HAS_ORDER:
            i = tl.load(order_I + i)
        weight = (code.to(tl.float32) - zero) * scale
        if HAS_FACTOR:
            weight *= tl.load(factor_I + i).to(tl.float32)[None, :]
        tl.store(out_OI + row * I + i[None, :], weight.to(out_OI.dtype.element_ty), mask=is_output)


def unpack_weight(weight: GroupedWeight, out_OI: torch.Tensor) -> None:
    """`GroupedWeight.dequantized` into out_OI, of any float dtype. Raises ValueError if it does not fit."""
    O, I, codes = weight.num_outputs, weight.num_inputs, weight.codes_OW
    check_tensor("out_OI", out_OI, shape=(O, I), dtype=out_OI.dtype)
    order, factor = weight.order_I, weight.input_scale_I
    _unpack_kernel[(triton.cdiv(O, ROWS), I // weight.block)](
        codes, weight.scale_GO, weight.zero_GO, codes if order is None else order, codes if factor is None else factor,
        out_OI,
        O=O, I=I, GROUP=weight.group_size, BLOCK=weight.block, BITS=weight.bits,
        HAS_ORDER=order is not None, HAS_FACTOR=factor is not None, ROWS=ROWS, num_warps=4,
    )  # fmt: skip


@triton.jit
def _round_rows_kernel(x_TI, code_TI, scale_T, I: tl.constexpr, WIDTH: tl.constexpr, MOST: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, WIDTH)
    x = tl.load(x_TI + t * I + i, mask=i < I, other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(x), 0) / MOST
    scale = tl.where(scale > 0.0, scale, 1.0)
    code = tl.minimum(tl.maximum(x / scale, -MOST), MOST)
    tl.store(code_TI + t * I + i, code.to(code_TI.dtype.element_ty), mask=i < I)
    tl.store(scale_T + t, scale)


def round_rows(x_TI: torch.Tensor, code_TI: torch.Tensor, scale_T: torch.Tensor) -> None:
    """`quantize_rows` (model/quantization/rounding.py) into code_TI, e4m3, and scale_T, float32.

    Raises ValueError if a tensor does not fit.
    """
    T, I = x_TI.shape
    check_tensor("x_TI", x_TI, shape=(T, I), dtype=x_TI.dtype)
    check_tensor("code_TI", code_TI, shape=(T, I), dtype=FP8)
    check_tensor("scale_T", scale_T, shape=(T,), dtype=torch.float32)
    if T:
        _round_rows_kernel[(T,)](
            x_TI, code_TI, scale_T, I=I, WIDTH=next_power_of_2(I), MOST=FP8_MAX, num_warps=8 if I > 8192 else 4
        )
