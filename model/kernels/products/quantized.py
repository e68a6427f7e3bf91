"""Products with quantised weights, dequantised in registers: for so few tokens that reading weights is the bottleneck.

    out[t, o] (+)= sum over groups g of scale[g, o] * sum over i in g of (code[o, i] - zero[g, o]) * x[t, i]

Codes are integers of 4 or 8 bits (model/quantization/grouped.py), exact in bf16 after subtracting their zero point, or
e4m3 with one scale per output (model/quantization/rounding.py). Weights are on the side of the product where the
instruction has a fixed size, as an operand in registers. A matrix is cut into tiles of outputs and, if those are too
few to fill the device, its inputs into splits; the program that finishes a tile's last split adds them up in order, so
that the sum does not depend on timing.

Legend: T tokens · O outputs · I inputs · G groups · W bytes of a row of codes · X splits.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from octavo.model.kernels.checks import check_tensor, next_power_of_2
from octavo.model.quantization.grouped import GroupedWeight
from octavo.model.quantization.rounding import Fp8Weight

QuantizedWeight = GroupedWeight | Fp8Weight

MAX_SPLITS = 16
MIN_BLOCK = 32
FLOATS, NIBBLES, BYTES = 0, 1, 2
VECTOR_TOKENS = 1
"""Up to here sums are computed without matrix instructions, whose operands take longer to lay out than to multiply."""
VECTOR_OUTPUTS, VECTOR_UNROLL, VECTOR_PROGRAMS = 16, 4, 792


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantTiles:
    """outputs, tokens: of a tile. warps: of a program. stages: of its loop. programs: the least number wanted."""

    outputs: int = 64
    tokens: int = 16
    warps: int = 4
    stages: int = 4
    programs: int = 264

    @classmethod
    def of(cls, num_tokens: int) -> "QuantTiles":
        """Tiles for this number of tokens (bench/RESULTS.md)."""
        tokens = min(64, max(16, next_power_of_2(num_tokens)))
        return cls(tokens=tokens)


@dataclass(frozen=True, slots=True, eq=False)
class QuantScratch:
    """part: float32, sums of splits [X, T, O]. arrived: int32, zero between launches. One for all products of a
    stream."""

    part: torch.Tensor
    arrived: torch.Tensor

    @classmethod
    def allocate(cls, *, max_outputs: int, max_tokens: int, device: torch.device | str) -> "QuantScratch":
        """For matrices of up to max_outputs outputs and up to max_tokens tokens."""
        return cls(
            torch.empty(MAX_SPLITS * max_outputs * max_tokens, dtype=torch.float32, device=device),
            torch.zeros(max_outputs * max_tokens, dtype=torch.int32, device=device),
        )


def splits_of(weight: QuantizedWeight, num_tiles: int, tiles: QuantTiles) -> int:
    """Number of splits of the inputs: a divisor of the number of blocks, so that all have the same length."""
    blocks, wanted = weight.num_inputs // block_of_loop(weight), -(-tiles.programs // num_tiles)
    fitting = [count for count in range(1, MAX_SPLITS + 1) if blocks % count == 0]
    return next((count for count in fitting if count >= wanted), fitting[-1])


def vector_splits(weight: QuantizedWeight, num_tiles: int) -> tuple[int, int]:
    """(splits, inputs of each) for the kernel without matrix instructions."""
    turn = block_of_loop(weight) * VECTOR_UNROLL
    turns = -(-weight.num_inputs // turn)
    length = -(-turns // max(1, min(MAX_SPLITS, turns, -(-VECTOR_PROGRAMS // num_tiles))))
    return -(-turns // length), length * turn


def block_of_loop(weight: QuantizedWeight) -> int:
    """Inputs of a round of the kernel's loop."""
    if isinstance(weight, GroupedWeight):
        return weight.block
    return next(block for block in (128, 64, 32, 16, 8, 4, 2, 1) if weight.num_inputs % block == 0)


def can_multiply(weight: QuantizedWeight) -> bool:
    """Whether blocks of inputs are long enough for the kernel."""
    return block_of_loop(weight) >= MIN_BLOCK


def quant_product_reference(x_TI: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """The obvious reference, float32 and without bias."""
    if isinstance(weight, GroupedWeight):
        step, group = weight.group_size, weight.codes().float()
        scale_OI = weight.scale_GO.T.float().repeat_interleave(step, 1)
        weight_OI = (group - weight.zero_GO.T.float().repeat_interleave(step, 1)) * scale_OI
        x_TI = x_TI.float() if weight.input_scale_I is None else x_TI.float() * weight.input_scale_I.float()
        return (x_TI if weight.order_I is None else x_TI[:, weight.order_I.long()]) @ weight_OI.T
    return x_TI.float() @ weight.dequantized().T


# Converts the 4-bit codes of four bytes at a time to bf16: 0x4300 | code is 128 + code, from which 128 + zero is
# subtracted.
_NIBBLES_TO_BF16 = tl.constexpr(
    """
    {
        .reg .b32 low, high, one, taken0, taken1, a, b, c, d;
        mov.b32 one, 0x3f803f80;
        mov.b32 taken0, $5;
        mov.b32 taken1, $6;
        and.b32 low, $4, 0x0f0f0f0f;
        shr.b32 high, $4, 4;
        and.b32 high, high, 0x0f0f0f0f;
        prmt.b32 a, low, 0x43434343, 0x4140;
        prmt.b32 b, low, 0x43434343, 0x4342;
        prmt.b32 c, high, 0x43434343, 0x4140;
        prmt.b32 d, high, 0x43434343, 0x4342;
        fma.rn.bf16x2 $0, a, one, taken0;
        fma.rn.bf16x2 $1, b, one, taken1;
        fma.rn.bf16x2 $2, c, one, taken0;
        fma.rn.bf16x2 $3, d, one, taken1;
    }
    """
)


@triton.jit
def _nibbles(codes, zero, element: tl.constexpr, FAST: tl.constexpr):
    """Low and high codes [O, W] minus their zero points [O]."""
    if FAST:
        taken = tl.broadcast_to((-128.0 - zero).to(tl.bfloat16)[:, None], codes.shape)
        return tl.inline_asm_elementwise(
            _NIBBLES_TO_BF16,
            "=r,=r,=r,=r,r,r,r",
            [codes, taken],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    low = ((codes & 15).to(tl.float32) - zero[:, None]).to(element)
    high = ((codes >> 4).to(tl.float32) - zero[:, None]).to(element)
    return low, high


@triton.jit
def _tokens_tile(
    x_TI, t, i, order_I, factor_I, is_token, I: tl.constexpr, HAS_ORDER: tl.constexpr, HAS_FACTOR: tl.constexpr
):
    if HAS_ORDER:
        i = tl.load(order_I + i)
    x = tl.load(x_TI + t.to(tl.int64)[None, :] * I + i[:, None], mask=is_token[None, :], other=0.0)
    if HAS_FACTOR:
        x = (x.to(tl.float32) * tl.load(factor_I + i).to(tl.float32)[:, None]).to(x_TI.dtype.element_ty)
    return x


@triton.jit(do_not_specialize=["num_tokens"])
def _quant_product_kernel(
    x_TI, codes_OW, scale_GO, zero_GO, order_I, factor_I, out_TO, part_XTO, arrived, num_tokens,
    O: tl.constexpr, I: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr,
    HAS_ORDER: tl.constexpr, HAS_FACTOR: tl.constexpr, ADD: tl.constexpr, SPLITS: tl.constexpr,
    OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, STAGES: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    element = x_TI.dtype.element_ty
    split = tl.program_id(1)
    o = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    t = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    is_output = o < O
    is_token = t < num_tokens
    SPLIT_INPUTS: tl.constexpr = I // SPLITS
    begin = split * SPLIT_INPUTS
    acc = tl.zeros([OUTPUTS, TOKENS], tl.float32)
    HALF: tl.constexpr = BLOCK // 2
    k = tl.arange(0, BLOCK)
    j = tl.arange(0, HALF)
    row = o.to(tl.int64)[:, None]
    for start in tl.range(begin, begin + SPLIT_INPUTS, BLOCK, num_stages=STAGES):
        if FORMAT == 0:
            codes = tl.load(codes_OW + row * I + (start + k)[None, :], mask=is_output[:, None], other=0.0)
            x = _tokens_tile(x_TI, t, start + k, order_I, factor_I, is_token, I, HAS_ORDER, HAS_FACTOR)
            acc = tl.dot(codes.to(element), x, acc, input_precision="ieee")
        else:
            at = start // GROUP * O + o
            scale = tl.load(scale_GO + at, mask=is_output, other=0.0).to(tl.float32)
            zero = tl.load(zero_GO + at, mask=is_output, other=0).to(tl.float32)
            if FORMAT == 1:
                codes = tl.load(codes_OW + row * (I // 2) + (start // 2 + j)[None, :], mask=is_output[:, None], other=0)
                low_x = _tokens_tile(x_TI, t, start + j, order_I, factor_I, is_token, I, HAS_ORDER, HAS_FACTOR)
                high_x = _tokens_tile(x_TI, t, start + HALF + j, order_I, factor_I, is_token, I, HAS_ORDER, HAS_FACTOR)
                low, high = _nibbles(codes, zero, element, FAST)
                part = tl.dot(low, low_x, input_precision="ieee")
                part = tl.dot(high, high_x, part, input_precision="ieee")
            else:
                codes = tl.load(codes_OW + row * I + (start + k)[None, :], mask=is_output[:, None], other=0)
                x = _tokens_tile(x_TI, t, start + k, order_I, factor_I, is_token, I, HAS_ORDER, HAS_FACTOR)
                part = tl.dot((codes.to(tl.float32) - zero[:, None]).to(element), x, input_precision="ieee")
            acc += part * scale[:, None]
    if FORMAT == 0:
        acc *= tl.load(scale_GO + o, mask=is_output, other=0.0)[:, None]
    at = t.to(tl.int64)[None, :] * O + o[:, None]
    mask = is_output[:, None] & is_token[None, :]
    if SPLITS > 1:
        size = num_tokens.to(tl.int64) * O
        tl.store(part_XTO + split * size + at, acc, mask=mask)
        # The barrier orders every thread's stores before the one atomic that releases them.
        tl.debug_barrier()
        mine = arrived + tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(mine, 1, sem="acq_rel") < SPLITS - 1:
            return
        tl.store(mine, 0)
        acc = tl.zeros([OUTPUTS, TOKENS], tl.float32)
        for s in tl.static_range(SPLITS):
            acc += tl.load(part_XTO + s * size + at, mask=mask, other=0.0, cache_modifier=".cg")
    if ADD:
        acc += tl.load(out_TO + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_TO + at, acc.to(out_TO.dtype.element_ty), mask=mask)


@triton.jit
def _integer(code, zero):
    # The bits of 2^23 as float32, or-ed with the code, are 2^23 + code: cheaper than a conversion.
    bits = (code.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)
    return bits - (zero + 8388608.0)[:, None]


@triton.jit
def _quant_vector_kernel(
    x_TI, codes_OW, scale_GO, zero_GO, order_I, factor_I, out_TO, part_XTO, arrived, split_inputs,
    T: tl.constexpr, O: tl.constexpr, I: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    FORMAT: tl.constexpr, HAS_ORDER: tl.constexpr, HAS_FACTOR: tl.constexpr, ADD: tl.constexpr,
    SPLITS: tl.constexpr, OUTPUTS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(1)
    o = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = o < O
    begin = split * split_inputs
    end = tl.minimum(begin + split_inputs, I)
    PER_BYTE: tl.constexpr = 2 if FORMAT == 1 else 1
    WIDTH: tl.constexpr = BLOCK // PER_BYTE
    j = tl.arange(0, WIDTH)
    row = o.to(tl.int64)[:, None] * (I // PER_BYTE)
    sums = ()
    for _ in tl.static_range(T):
        sums = sums + (tl.zeros([OUTPUTS, WIDTH], tl.float32),)  # noqa: RUF005 (triton has no unpacking)
    for start in tl.range(begin, end, BLOCK * UNROLL, num_stages=1):
        tiles, scales, zeros = (), (), ()
        for u in tl.static_range(UNROLL):
            at = start + u * BLOCK
            mask = is_output & (at < end)
            tiles = tiles + (tl.load(codes_OW + row + (at // PER_BYTE + j)[None, :], mask=mask[:, None], other=0.0),)  # noqa: RUF005
            if FORMAT > 0:
                scales = scales + (tl.load(scale_GO + at // GROUP * O + o, mask=mask, other=0.0),)  # noqa: RUF005
                zeros = zeros + (tl.load(zero_GO + at // GROUP * O + o, mask=mask, other=0),)  # noqa: RUF005
        for u in tl.static_range(UNROLL):
            at = start + u * BLOCK
            low = tiles[u].to(tl.float32)
            high = low
            if FORMAT > 0:
                zero = zeros[u].to(tl.float32)
                scale = scales[u].to(tl.float32)[:, None]
                low = _integer(tiles[u] & 15 if FORMAT == 1 else tiles[u], zero) * scale
                if FORMAT == 1:
                    high = _integer(tiles[u] >> 4, zero) * scale
            new = ()
            for t in tl.static_range(T):
                x = _vector(x_TI + t * I, at + j, end, order_I, factor_I, HAS_ORDER, HAS_FACTOR)
                more = sums[t] + low * x[None, :]
                if FORMAT == 1:
                    x = _vector(x_TI + t * I, at + WIDTH + j, end, order_I, factor_I, HAS_ORDER, HAS_FACTOR)
                    more += high * x[None, :]
                new = new + (more,)  # noqa: RUF005
            sums = new
    size = T * O
    for t in tl.static_range(T):
        acc = tl.sum(sums[t], 1)
        if FORMAT == 0:
            acc *= tl.load(scale_GO + o, mask=is_output, other=0.0)
        if SPLITS > 1:
            tl.store(part_XTO + split.to(tl.int64) * size + t * O + o, acc, mask=is_output)
        else:
            if ADD:
                acc += tl.load(out_TO + t * O + o, mask=is_output, other=0.0).to(tl.float32)
            tl.store(out_TO + t * O + o, acc.to(out_TO.dtype.element_ty), mask=is_output)
    if SPLITS == 1:
        return
    tl.debug_barrier()
    if tl.atomic_add(arrived + tl.program_id(0), 1, sem="acq_rel") < SPLITS - 1:
        return
    tl.store(arrived + tl.program_id(0), 0)
    for t in tl.static_range(T):
        acc = tl.zeros([OUTPUTS], tl.float32)
        for s in tl.static_range(SPLITS):
            acc += tl.load(part_XTO + s * size + t * O + o, mask=is_output, other=0.0, cache_modifier=".cg")
        if ADD:
            acc += tl.load(out_TO + t * O + o, mask=is_output, other=0.0).to(tl.float32)
        tl.store(out_TO + t * O + o, acc.to(out_TO.dtype.element_ty), mask=is_output)


@triton.jit
def _vector(x_I, i, end, order_I, factor_I, HAS_ORDER: tl.constexpr, HAS_FACTOR: tl.constexpr):
    is_in = i < end
    if HAS_ORDER:
        i = tl.load(order_I + i, mask=is_in, other=0)
    x = tl.load(x_I + i, mask=is_in, other=0.0)
    if HAS_FACTOR:
        x = (x.to(tl.float32) * tl.load(factor_I + i, mask=is_in, other=0.0).to(tl.float32)).to(x.dtype)
    return x.to(tl.float32)


def quant_product(
    x_TI: torch.Tensor,
    weight: QuantizedWeight,
    out_TO: torch.Tensor,
    scratch: QuantScratch,
    *,
    tiles: QuantTiles | None = None,
) -> None:
    """out_TO = x_TI @ weight^T without bias, summed in float32 and rounded once. x and out have the same float dtype.

    Raises ValueError if a tensor does not fit.
    """
    _launch(x_TI, weight, out_TO, scratch, tiles, adds=0)


def quant_add_product(
    x_TI: torch.Tensor,
    weight: QuantizedWeight,
    out_TO: torch.Tensor,
    scratch: QuantScratch,
    *,
    tiles: QuantTiles | None = None,
) -> None:
    """out_TO += x_TI @ weight^T; otherwise as `quant_product`."""
    _launch(x_TI, weight, out_TO, scratch, tiles, adds=1)


def _launch(
    x_TI: torch.Tensor,
    weight: QuantizedWeight,
    out_TO: torch.Tensor,
    scratch: QuantScratch,
    tiles: QuantTiles | None,
    *,
    adds: int,
) -> None:
    T, (O, I) = len(x_TI), (weight.num_outputs, weight.num_inputs)
    check_tensor("x_TI", x_TI, shape=(T, I), dtype=out_TO.dtype)
    check_tensor("out_TO", out_TO, shape=(T, O), dtype=out_TO.dtype)
    if not can_multiply(weight):
        raise ValueError(f"weight has blocks of {block_of_loop(weight)} inputs, fewer than {MIN_BLOCK}")
    if not T:
        return
    codes, scale, zero, order, factor, form, group = _operands(weight)
    operands = (x_TI, codes, scale, zero, order, factor, out_TO, scratch.part, scratch.arrived)
    constants: dict[str, Any] = {
        "O": O, "I": I, "GROUP": group, "BLOCK": block_of_loop(weight), "FORMAT": form, "ADD": adds,
        "HAS_ORDER": order is not codes, "HAS_FACTOR": factor is not codes,
    }  # fmt: skip
    if tiles is None and T <= VECTOR_TOKENS:
        num_tiles = triton.cdiv(O, VECTOR_OUTPUTS)
        splits, inputs = vector_splits(weight, num_tiles)
        _check_scratch(scratch, splits * T * O, num_tiles)
        _quant_vector_kernel[(num_tiles, splits)](
            *operands, inputs, **constants, T=T, SPLITS=splits, OUTPUTS=VECTOR_OUTPUTS, UNROLL=VECTOR_UNROLL,
            num_warps=4,
        )  # fmt: skip
        return
    tiles = tiles or QuantTiles.of(T)
    grid = triton.cdiv(O, tiles.outputs), triton.cdiv(T, tiles.tokens)
    splits = splits_of(weight, grid[0] * grid[1], tiles)
    _check_scratch(scratch, splits * T * O, grid[0] * grid[1])
    _quant_product_kernel[(grid[0], splits, grid[1])](
        *operands, T, **constants, SPLITS=splits, OUTPUTS=tiles.outputs, TOKENS=tiles.tokens, STAGES=tiles.stages,
        FAST=x_TI.is_cuda and x_TI.dtype == torch.bfloat16, num_warps=tiles.warps,
    )  # fmt: skip


def _check_scratch(scratch: QuantScratch, part_elements: int, num_tiles: int) -> None:
    if part_elements > scratch.part.numel() or num_tiles > scratch.arrived.numel():
        raise ValueError(f"scratch is too small for {part_elements} elements of parts, {num_tiles} tiles")


def _operands(weight: QuantizedWeight) -> tuple[torch.Tensor, ...]:
    """The kernel's tensors, with the codes in place of absent ones; then the format and the group size."""
    if isinstance(weight, Fp8Weight):
        codes = weight.code_OI
        return codes, weight.scale_O, codes, codes, codes, FLOATS, weight.num_inputs  # type: ignore[return-value]
    codes = weight.codes_OW
    order = codes if weight.order_I is None else weight.order_I
    factor = codes if weight.input_scale_I is None else weight.input_scale_I
    form = NIBBLES if weight.bits == 4 else BYTES
    return codes, weight.scale_GO, weight.zero_GO, order, factor, form, weight.group_size  # type: ignore[return-value]
