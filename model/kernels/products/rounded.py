"""Products of e4m3 weights with tokens that are also rounded to e4m3, each with its own scale, on tensor cores.

    out[t, o] (+)= scale[t] * scale[o] * sum over i of code[t, i] * code[o, i]

A library is fast for many tokens. For a few dozen it uses fewer tiles than there are multiprocessors, and it cannot add
to a residual stream: here the inputs are split as well, as in model/kernels/products/split_k.py, and the stream is read
once the sum is complete.

Legend: T tokens · O outputs · I inputs · D model dim. Must not know: layers.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from octavo.model.kernels.checks import check_tensor, next_power_of_2
from octavo.model.kernels.products.split_k import SplitKCut, SplitKRoom
from octavo.model.quantization.rounding import FP8, FP8_MAX, Fp8Weight

INPUTS = 128  # of a tile: one row of shared memory
MAX_SPLITS = 16
LEAST_BLOCKS = 4  # of inputs in a split: the loop's stages need several to overlap
SILU_BLOCK, SILU_WARPS = 4096, 16


@dataclass(frozen=True, slots=True, eq=False)
class RoundedTokens:
    """code_TI: e4m3. scale_T: float32, one per token."""

    code_TI: torch.Tensor
    scale_T: torch.Tensor

    @classmethod
    def empty(cls, num_tokens: int, num_inputs: int, device: torch.device | str) -> "RoundedTokens":
        """Uninitialised memory for this many tokens."""
        return cls(
            torch.empty(num_tokens, num_inputs, dtype=FP8, device=device),
            torch.empty(num_tokens, dtype=torch.float32, device=device),
        )

    def __len__(self) -> int:
        return len(self.scale_T)


CUT = SplitKCut(outputs=128, tokens=64, inputs=INPUTS, warps=4, stages=6)
PROGRAMS = 132  # as many as an H200 runs at once: one on each multiprocessor
MOST_TOKENS = 64
"""With more, the library was as fast or faster in whole steps (bench/RESULTS.md)."""


def cut_of(num_outputs: int, num_inputs: int) -> SplitKCut:
    """A cut with as many splits as give every multiprocessor a program."""
    tiles, blocks = CUT.num_tiles(MOST_TOKENS, num_outputs), -(-num_inputs // INPUTS)
    return replace(CUT, splits=max(1, min(MAX_SPLITS, PROGRAMS // tiles, blocks // LEAST_BLOCKS)))


def room_of(shapes: list[tuple[int, int]], device: torch.device | str) -> SplitKRoom:
    """Memory for products of up to MOST_TOKENS tokens with matrices of these (outputs, inputs)."""
    each = [(O, cut_of(O, I)) for O, I in shapes]
    return SplitKRoom.allocate(
        num_elements=max(cut.part_elements(MOST_TOKENS, O) for O, cut in each),
        num_tiles=max(cut.num_tiles(MOST_TOKENS, O) for O, cut in each),
        device=device,
    )


def rounded_product_reference(tokens: RoundedTokens, weight: Fp8Weight) -> torch.Tensor:
    """The obvious reference, float32 and without bias."""
    return (tokens.code_TI.float() * tokens.scale_T[:, None]) @ weight.dequantized().T


@triton.jit(do_not_specialize=["T"])
def _rounded_product_kernel(
    code_TI, scale_T, code_OI, scale_O, out_TO, parts, arrived, T,
    O: tl.constexpr, I: tl.constexpr, OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, INPUTS: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    # Tiles of the same outputs are adjacent in the grid, so that the second finds the weights in the cache.
    token_tiles = tl.cdiv(T, TOKENS)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    o = tile // token_tiles * OUTPUTS + tl.arange(0, OUTPUTS)
    t = tile % token_tiles * TOKENS + tl.arange(0, TOKENS)
    is_output = o < O
    is_token = t < T
    k = tl.arange(0, INPUTS)
    blocks: tl.constexpr = (I + INPUTS - 1) // INPUTS
    each: tl.constexpr = (blocks + SPLITS - 1) // SPLITS
    # Rows beyond the end read the first row, which costs less than masks; nothing of them is stored.
    weight = code_OI + tl.where(is_output, o, 0).to(tl.int64)[:, None] * I + k[None, :]
    token = code_TI + tl.where(is_token, t, 0).to(tl.int64)[:, None] * I + k[None, :]
    acc = tl.zeros([OUTPUTS, TOKENS], tl.float32)
    for block in tl.range(split * each, tl.minimum(split * each + each, blocks), num_stages=STAGES):
        if I % INPUTS == 0:
            w = tl.load(weight + block * INPUTS)
            v = tl.load(token + block * INPUTS)
        else:
            has = (block * INPUTS + k < I)[None, :]
            w = tl.load(weight + block * INPUTS, mask=has, other=0.0)
            v = tl.load(token + block * INPUTS, mask=has, other=0.0)
        acc = tl.dot(w, tl.trans(v), acc)
    if SPLITS > 1:
        inside = tl.arange(0, OUTPUTS)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
        mine = parts + tile.to(tl.int64) * (SPLITS * OUTPUTS * TOKENS) + inside
        tl.store(mine + split * (OUTPUTS * TOKENS), acc)
        # The barrier orders every thread's stores before the one atomic that releases them.
        tl.debug_barrier()
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") < SPLITS - 1:
            return
        tl.store(arrived + tile, 0)
        acc = tl.zeros([OUTPUTS, TOKENS], tl.float32)
        for s in tl.static_range(SPLITS):
            acc += tl.load(mine + s * (OUTPUTS * TOKENS), cache_modifier=".cg")
    out = tl.trans(acc) * tl.load(scale_T + t, mask=is_token, other=0.0)[:, None]
    out = out * tl.load(scale_O + o, mask=is_output, other=0.0)[None, :]
    at = out_TO + t.to(tl.int64)[:, None] * O + o[None, :]
    mask = is_token[:, None] & is_output[None, :]
    if ADD:
        out += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, out.to(out_TO.dtype.element_ty), mask=mask)


def rounded_product(tokens: RoundedTokens, weight: Fp8Weight, out_TO: torch.Tensor, room: SplitKRoom) -> None:
    """out_TO = tokens @ weight^T without bias, summed in float32 and rounded once; for at most MOST_TOKENS tokens.

    Raises ValueError if a tensor or the room does not fit.
    """
    _launch(tokens, weight, out_TO, room, adds=0)


def rounded_add_product(tokens: RoundedTokens, weight: Fp8Weight, out_TO: torch.Tensor, room: SplitKRoom) -> None:
    """out_TO += tokens @ weight^T; otherwise as `rounded_product`."""
    _launch(tokens, weight, out_TO, room, adds=1)


def _launch(tokens: RoundedTokens, weight: Fp8Weight, out_TO: torch.Tensor, room: SplitKRoom, *, adds: int) -> None:
    T, (O, I) = len(tokens), (weight.num_outputs, weight.num_inputs)
    check_tensor("code_TI", tokens.code_TI, shape=(T, I), dtype=FP8)
    check_tensor("out_TO", out_TO, shape=(T, O), dtype=out_TO.dtype)
    if T > MOST_TOKENS:
        raise ValueError(f"code_TI has {T} tokens, more than {MOST_TOKENS}")
    if not T:
        return
    cut = cut_of(O, I).fitting(weight.code_OI)
    tiles = cut.num_tiles(T, O)
    if cut.splits > 1 and (room.parts.numel() < cut.part_elements(T, O) or len(room.arrived) < tiles):
        raise ValueError(f"room has {room.parts.numel()} elements and {len(room.arrived)} tiles, too few for {cut}")
    _rounded_product_kernel[(tiles, cut.splits)](
        tokens.code_TI, tokens.scale_T, weight.code_OI, weight.scale_O, out_TO, room.parts, room.arrived, T,
        O=O, I=I, OUTPUTS=cut.outputs, TOKENS=cut.tokens, INPUTS=cut.inputs, SPLITS=cut.splits, STAGES=cut.stages,
        ADD=adds, num_warps=cut.warps,
    )  # fmt: skip


@triton.jit
def _silu_round_kernel(
    gate_up, x_TD, code_TI, scale_T, eps,
    I: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    MOST: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDTH)
    i = tl.arange(0, BLOCK)
    gates, ups = (), ()
    # Everything is loaded before the sum of squares, since no load is moved across its barrier.
    for block in tl.static_range(BLOCKS):
        at = i + block * BLOCK
        gates = gates + (tl.load(gate_up + t * 2 * I + at, mask=at < I, other=0.0),)  # noqa: RUF005
        ups = ups + (tl.load(gate_up + t * 2 * I + I + at, mask=at < I, other=0.0),)  # noqa: RUF005
    x = tl.load(x_TD + t * D + d, mask=d < D, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / D + eps)
    acts = ()
    most = tl.zeros([BLOCK], tl.float32)
    for block in tl.static_range(BLOCKS):
        gate = gates[block].to(tl.float32) * scale
        up = ups[block].to(tl.float32) * scale
        # First rounded to the model's dtype, as `silu_mul` does when it writes to memory.
        act = (gate / (1.0 + tl.exp(-gate)) * up).to(x_TD.dtype.element_ty).to(tl.float32)
        most = tl.maximum(most, tl.abs(act))
        acts = acts + (act,)  # noqa: RUF005
    unit = tl.max(most, 0) / MOST
    unit = tl.where(unit > 0.0, unit, 1.0)
    for block in tl.static_range(BLOCKS):
        at = i + block * BLOCK
        code = tl.minimum(tl.maximum(acts[block] / unit, -MOST), MOST)
        tl.store(code_TI + t * I + at, code.to(code_TI.dtype.element_ty), mask=at < I)
    tl.store(scale_T + t, unit)


def silu_round(gate_up_T2I: torch.Tensor, x_TD: torch.Tensor, out: RoundedTokens, eps: float) -> None:
    """`silu_mul` (activation.py) and `round_rows` (unpack.py) in one kernel, with the same bits. gate_up and x of one
    dtype.

    Raises ValueError if a tensor does not fit.
    """
    T, I = out.code_TI.shape
    check_tensor("gate_up_T2I", gate_up_T2I, shape=(T, 2 * I), dtype=x_TD.dtype)
    check_tensor("x_TD", x_TD, shape=(T, None), dtype=x_TD.dtype)
    check_tensor("code_TI", out.code_TI, shape=(T, I), dtype=FP8)
    D, block = x_TD.shape[1], min(SILU_BLOCK, next_power_of_2(I))
    if T:
        _silu_round_kernel[(T,)](
            gate_up_T2I, x_TD, out.code_TI, out.scale_T, eps,
            I=I, D=D, WIDTH=next_power_of_2(D), BLOCK=block, BLOCKS=triton.cdiv(I, block), MOST=FP8_MAX,
            num_warps=SILU_WARPS if block == SILU_BLOCK else 4,
        )  # fmt: skip
