"""Matrix products whose rows have the same bits in any batch: x @ W^T, and the same added to a residual stream.

A library chooses kernels by the number of rows, and splits the sum over the inputs so as to keep the device busy. Here
the sum is split by the matrix alone, into splits that are added up in order, and within a split it runs over the inputs
in order. Weights are on the side of the product where the instruction has a fixed size, tokens on the other; an output
element reads only its own row of W and its own token. So whatever the tile and whichever program adds up the splits, a
token's bits are the same (tests/model/kernels/test_invariant_product.py compares them, on a device too).

    few tokens     a program for each (tile of outputs, tile of tokens, split); a second kernel adds up the splits
    many tokens    a program for each (tile of outputs, tile of tokens) goes through the splits itself

Legend: T tokens · O outputs · K inputs · S splits. Must not know: layers, what the matrices mean.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from octavo.model.kernels.checks import check_tensor

SPLIT_INPUTS = 1024  # a sum of up to this many inputs is not split
WANTED_PROGRAMS = 264  # two for each multiprocessor of an H100, if there is only one tile of tokens
LEAST_OUTPUTS = 64
SPLIT_MULTIPLE = 64  # inputs: whole tiles
TOKENS_IN_GROUP = 16  # tiles of tokens that share a tile of weights while it is in the cache
MANY_TOKENS = 256
BLOCK = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTiles:
    """outputs, tokens: of a program's tile. inputs: taken at once. warps: of a program. stages: of its loop."""

    outputs: int
    tokens: int
    inputs: int = 64
    warps: int = 4
    stages: int = 4


FLOAT32 = ProductTiles(outputs=64, tokens=64, inputs=32, stages=3)
BY_TOKENS = (
    (32, ProductTiles(outputs=64, tokens=16)),
    (64, ProductTiles(outputs=64, tokens=32)),
    (256, ProductTiles(outputs=64, tokens=64)),
    (1024, ProductTiles(outputs=128, tokens=128, warps=8, stages=3)),
)
"""(most tokens, tiles for them), fewest first."""
MOST = ProductTiles(outputs=128, tokens=256, warps=8, stages=3)


def tiles_of(num_tokens: int, dtype: torch.dtype) -> ProductTiles:
    """The fastest tiles on an H100 (bench/RESULTS.md); bits do not depend on the choice."""
    if dtype == torch.float32:
        return FLOAT32
    return next((tiles for most, tiles in BY_TOKENS if num_tokens <= most), MOST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """How the sum over a matrix's inputs is split. count: of splits. inputs: of each split except the last."""

    count: int
    inputs: int

    @classmethod
    def of(cls, num_outputs: int, num_inputs: int) -> "Splits":
        """Depends on the matrix alone. Without splits, few outputs and many inputs would leave most of the device
        idle."""
        wanted = WANTED_PROGRAMS // -(-num_outputs // LEAST_OUTPUTS)
        count = max(1, min(wanted, -(-num_inputs // SPLIT_INPUTS)))
        inputs = -(-num_inputs // (count * SPLIT_MULTIPLE)) * SPLIT_MULTIPLE
        return cls(count=-(-num_inputs // inputs), inputs=inputs)


def part_elements(num_tokens: int, num_outputs: int, num_inputs: int) -> int:
    """float32 elements of memory that a product of up to this many tokens needs besides its result."""
    splits = Splits.of(num_outputs, num_inputs)
    return splits.count * min(num_tokens, MANY_TOKENS) * num_outputs if splits.count > 1 else 0


def product_reference(
    x_TK: torch.Tensor, weight_OK: torch.Tensor, residual_TO: torch.Tensor | None = None
) -> torch.Tensor:
    """The obvious reference, float32."""
    out_TO = x_TK.float() @ weight_OK.float().T
    return out_TO if residual_TO is None else out_TO + residual_TO.float()


@triton.jit
def _sum_of_split(
    x_TK, weight_OK, o, t, num_tokens, num_outputs, begin, end,
    K: tl.constexpr, OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    acc = tl.zeros([OUTPUTS, TOKENS], tl.float32)
    for start in range(begin, end, INPUTS):
        k = start + tl.arange(0, INPUTS)
        has = k < end
        w = tl.load(
            weight_OK + o.to(tl.int64)[:, None] * K + k[None, :],
            mask=(o < num_outputs)[:, None] & has[None, :], other=0.0,
        )  # fmt: skip
        x = tl.load(
            x_TK + t.to(tl.int64)[:, None] * K + k[None, :], mask=(t < num_tokens)[:, None] & has[None, :], other=0.0
        )
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["num_tokens"])
def _product_kernel(
    x_TK, weight_OK, out_TO, part_STO, num_tokens, num_outputs, split_inputs,
    K: tl.constexpr, SPLITS: tl.constexpr, IN_PARTS: tl.constexpr, ADD: tl.constexpr, GROUP: tl.constexpr,
    OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    # Token tiles vary fastest, within groups of them, so that a tile of weights is read while it is in the cache.
    token_tiles = tl.cdiv(num_tokens, TOKENS)
    in_group = GROUP * tl.cdiv(num_outputs, OUTPUTS)
    first = tl.program_id(0) // in_group * GROUP
    width = tl.minimum(token_tiles - first, GROUP)
    t = (first + tl.program_id(0) % in_group % width) * TOKENS + tl.arange(0, TOKENS)
    o = tl.program_id(0) % in_group // width * OUTPUTS + tl.arange(0, OUTPUTS)
    at = t.to(tl.int64)[None, :] * num_outputs + o[:, None]
    mask = (t < num_tokens)[None, :] & (o < num_outputs)[:, None]
    if IN_PARTS:
        split = tl.program_id(1)
        begin = split * split_inputs
        end = tl.minimum(begin + split_inputs, K)
        acc = _sum_of_split(x_TK, weight_OK, o, t, num_tokens, num_outputs, begin, end, K, OUTPUTS, TOKENS, INPUTS)
        tl.store(part_STO + split.to(tl.int64) * num_tokens * num_outputs + at, acc, mask=mask)
        return
    if SPLITS == 1:
        acc = _sum_of_split(x_TK, weight_OK, o, t, num_tokens, num_outputs, 0, K, K, OUTPUTS, TOKENS, INPUTS)
    else:
        acc = tl.zeros([OUTPUTS, TOKENS], tl.float32)
        for split in range(SPLITS):
            begin = split * split_inputs
            end = tl.minimum(begin + split_inputs, K)
            acc += _sum_of_split(x_TK, weight_OK, o, t, num_tokens, num_outputs, begin, end, K, OUTPUTS, TOKENS, INPUTS)
    if ADD:
        acc += tl.load(out_TO + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_TO + at, acc.to(out_TO.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_elements"])
def _add_parts_kernel(part_STO, out_TO, num_elements, SPLITS: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_in = i < num_elements
    acc = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        acc += tl.load(part_STO + tl.full([], split, tl.int64) * num_elements + i, mask=is_in, other=0.0)
    if ADD:
        acc += tl.load(out_TO + i, mask=is_in, other=0.0).to(tl.float32)
    tl.store(out_TO + i, acc.to(out_TO.dtype.element_ty), mask=is_in)


def invariant_product(
    x_TK: torch.Tensor,
    weight_OK: torch.Tensor,
    out_TO: torch.Tensor,
    part: torch.Tensor,
    *,
    tiles: ProductTiles | None = None,
) -> None:
    """out_TO = x_TK @ weight_OK^T, summed in float32 and rounded once. All of one dtype (float32, float16, bfloat16).

    part: float32, at least `part_elements`. Raises ValueError if a tensor does not fit.
    """
    _launch(x_TK, weight_OK, out_TO, part, tiles, adds=0)


def invariant_add_product(
    x_TK: torch.Tensor,
    weight_OK: torch.Tensor,
    out_TO: torch.Tensor,
    part: torch.Tensor,
    *,
    tiles: ProductTiles | None = None,
) -> None:
    """out_TO += x_TK @ weight_OK^T, summed in float32 and rounded once; otherwise as `invariant_product`."""
    _launch(x_TK, weight_OK, out_TO, part, tiles, adds=1)


def _launch(
    x_TK: torch.Tensor,
    weight_OK: torch.Tensor,
    out_TO: torch.Tensor,
    part: torch.Tensor,
    tiles: ProductTiles | None,
    *,
    adds: int,
) -> None:
    (T, K), O = x_TK.shape, weight_OK.shape[0]
    check_tensor("x_TK", x_TK, shape=(T, K), dtype=out_TO.dtype)
    check_tensor("weight_OK", weight_OK, shape=(O, K), dtype=out_TO.dtype)
    check_tensor("out_TO", out_TO, shape=(T, O), dtype=out_TO.dtype)
    check_tensor("part", part, shape=(None,), dtype=torch.float32)
    if not T:
        return
    splits, tiles = Splits.of(O, K), tiles or tiles_of(T, out_TO.dtype)
    in_parts = splits.count > 1 and T <= MANY_TOKENS
    if in_parts and part.numel() < splits.count * T * O:
        raise ValueError(f"part has {part.numel()} elements, fewer than {splits.count * T * O}")
    grid = (triton.cdiv(O, tiles.outputs) * triton.cdiv(T, tiles.tokens), splits.count if in_parts else 1)
    _product_kernel[grid](
        x_TK, weight_OK, out_TO, part, T, O, splits.inputs,
        K=K, SPLITS=splits.count, IN_PARTS=in_parts, ADD=adds, GROUP=TOKENS_IN_GROUP,
        OUTPUTS=tiles.outputs, TOKENS=tiles.tokens, INPUTS=tiles.inputs,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if in_parts:
        _add_parts_kernel[(triton.cdiv(T * O, BLOCK),)](
            part, out_TO, T * O, SPLITS=splits.count, ADD=adds, BLOCK=BLOCK, num_warps=4
        )
