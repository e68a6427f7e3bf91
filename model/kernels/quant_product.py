"""Products with weights of fewer bits, turned into numbers in registers: for as many tokens as reading weights bounds.

    out[t, o] (+)= sum over groups g of scale[g, o] * sum over i in g of (code[o, i] - zero[g, o]) * x[t, i]

Codes are integers of 4 or 8 bits (model/quantization/grouped.py), exact in bf16 with their zero point taken off, or
e4m3 with one scale per output (model/quantization/rounding.py). Weights stand on the side of the product whose
instruction has one size and go there from registers. A matrix is cut into tiles of outputs and, where those are too few
to fill the device, its inputs into splits; the program that ends a tile's last split adds them up in order, so that the
sum does not depend on timing.

Legend: T tokens · O outputs · I inputs · G groups · W bytes of a row of codes · X splits.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from model.kernels.checks import check_tensor, next_power_of_2
from model.quantization.grouped import GroupedWeight
from model.quantization.rounding import Fp8Weight

QuantizedWeight = GroupedWeight | Fp8Weight

MAX_SPLITS = 16
MIN_BLOCK = 32
FLOATS, NIBBLES, BYTES = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantTiles:
    """Outputs and tokens of a tile, a program's warps, its loop's stages, and programs wanted at least."""

    outputs: int = 64
    tokens: int = 16
    warps: int = 4
    stages: int = 4
    programs: int = 264

    @classmethod
    def of(cls, num_tokens: int) -> "QuantTiles":
        """By the number of tokens (bench/RESULTS.md)."""
        tokens = min(64, max(16, next_power_of_2(num_tokens)))
        return cls(tokens=tokens)


@dataclass(frozen=True, slots=True, eq=False)
class QuantScratch:
    """part_XTO: float32, sums of splits. arrived: int32, zero between launches. One for all products of a stream."""

    part: torch.Tensor
    arrived: torch.Tensor

    @classmethod
    def allocate(cls, *, max_outputs: int, max_tokens: int, device: torch.device | str) -> "QuantScratch":
        """For matrices of up to max_outputs and up to max_tokens."""
        return cls(
            torch.empty(MAX_SPLITS * max_outputs * max_tokens, dtype=torch.float32, device=device),
            torch.zeros(max_outputs * max_tokens, dtype=torch.int32, device=device),
        )


def splits_of(weight: QuantizedWeight, num_tiles: int, tiles: QuantTiles) -> int:
    """Into how many splits the inputs are cut: a divisor of the number of blocks, so that all are of one length."""
    blocks, wanted = weight.num_inputs // block_of_loop(weight), -(-tiles.programs // num_tiles)
    fitting = [count for count in range(1, MAX_SPLITS + 1) if blocks % count == 0]
    return next((count for count in fitting if count >= wanted), fitting[-1])


def block_of_loop(weight: QuantizedWeight) -> int:
    """Inputs of a round of the kernel's loop."""
    if isinstance(weight, GroupedWeight):
        return weight.block
    return next(block for block in (128, 64, 32, 16, 8, 4, 2, 1) if weight.num_inputs % block == 0)


def can_multiply(weight: QuantizedWeight) -> bool:
    """Whether blocks of inputs are long enough for the kernel."""
    return block_of_loop(weight) >= MIN_BLOCK


def quant_product_reference(x_TI: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """The obvious twin, float32 and without bias."""
    if isinstance(weight, GroupedWeight):
        step, group = weight.group_size, weight.codes().float()
        scale_OI = weight.scale_GO.T.float().repeat_interleave(step, 1)
        weight_OI = (group - weight.zero_GO.T.float().repeat_interleave(step, 1)) * scale_OI
        x_TI = x_TI.float() if weight.input_scale_I is None else x_TI.float() * weight.input_scale_I.float()
        return (x_TI if weight.order_I is None else x_TI[:, weight.order_I.long()]) @ weight_OI.T
    return x_TI.float() @ weight.dequantized().T


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
    OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, STAGES: tl.constexpr,
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
            zero = tl.load(zero_GO + at, mask=is_output, other=0).to(tl.float32)[:, None]
            if FORMAT == 1:
                codes = tl.load(codes_OW + row * (I // 2) + (start // 2 + j)[None, :], mask=is_output[:, None], other=0)
                low_x = _tokens_tile(x_TI, t, start + j, order_I, factor_I, is_token, I, HAS_ORDER, HAS_FACTOR)
                high_x = _tokens_tile(x_TI, t, start + HALF + j, order_I, factor_I, is_token, I, HAS_ORDER, HAS_FACTOR)
                low = ((codes & 15).to(tl.float32) - zero).to(element)
                high = ((codes >> 4).to(tl.float32) - zero).to(element)
                part = tl.dot(low, low_x, input_precision="ieee")
                part = tl.dot(high, high_x, part, input_precision="ieee")
            else:
                codes = tl.load(codes_OW + row * I + (start + k)[None, :], mask=is_output[:, None], other=0)
                x = _tokens_tile(x_TI, t, start + k, order_I, factor_I, is_token, I, HAS_ORDER, HAS_FACTOR)
                part = tl.dot((codes.to(tl.float32) - zero).to(element), x, input_precision="ieee")
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


def quant_product(
    x_TI: torch.Tensor,
    weight: QuantizedWeight,
    out_TO: torch.Tensor,
    scratch: QuantScratch,
    *,
    tiles: QuantTiles | None = None,
) -> None:
    """out_TO = x_TI @ weight^T without bias, summed in float32 and rounded once. x and out of one float dtype.

    Raises ValueError where a tensor does not fit.
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
    """out_TO += x_TI @ weight^T; else as `quant_product`."""
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
    tiles = tiles or QuantTiles.of(T)
    grid = triton.cdiv(O, tiles.outputs), triton.cdiv(T, tiles.tokens)
    splits = splits_of(weight, grid[0] * grid[1], tiles)
    if splits > 1 and (splits * T * O > scratch.part.numel() or grid[0] * grid[1] > scratch.arrived.numel()):
        raise ValueError(f"scratch is too small for {splits} splits of {T} x {O}")
    codes, scale, zero, order, factor, form, group = _operands(weight)
    _quant_product_kernel[(grid[0], splits, grid[1])](
        x_TI, codes, scale, zero, order, factor, out_TO, scratch.part, scratch.arrived, T,
        O=O, I=I, GROUP=group, BLOCK=block_of_loop(weight), FORMAT=form,
        HAS_ORDER=order is not codes, HAS_FACTOR=factor is not codes, ADD=adds, SPLITS=splits,
        OUTPUTS=tiles.outputs, TOKENS=tiles.tokens, STAGES=tiles.stages, num_warps=tiles.warps,
    )  # fmt: skip


def _operands(weight: QuantizedWeight) -> tuple[torch.Tensor, ...]:
    """The kernel's tensors, the codes in the place of those that are not there; then the format and the group."""
    if isinstance(weight, Fp8Weight):
        codes = weight.code_OI
        return codes, weight.scale_O, codes, codes, codes, FLOATS, weight.num_inputs  # type: ignore[return-value]
    codes = weight.codes_OW
    order = codes if weight.order_I is None else weight.order_I
    factor = codes if weight.input_scale_I is None else weight.input_scale_I
    form = NIBBLES if weight.bits == 4 else BYTES
    return codes, weight.scale_GO, weight.zero_GO, order, factor, form, weight.group_size  # type: ignore[return-value]
