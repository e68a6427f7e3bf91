"""Products of a few dozen tokens with a matrix: weights are on the side of the product where the instruction is wide.

A library puts the tokens there, where 8 of them fill an eighth of it, and seldom splits the sum over the inputs, so
that few of the device's multiprocessors read weights at once. Here a program takes a tile of outputs and one split of
the inputs; the one that finishes a tile last adds up the splits in order, so that the sum does not depend on timing.

    weight_OK   |-- split 0 --|-- split 1 --|-- split 2 --|        parts [tile, split], then out_TO
    tile of O   |  program    |  program    |  program    |

Legend: T tokens · O outputs · K inputs · D model dim · I intermediate dim · E = 2 I. Must not know: layers.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl

from octavo.model.kernels.checks import check_tensor
from octavo.model.kernels.products.gate_up import gate_up_product_reference
from octavo.model.kernels.rows import rms_scale_reference


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitKCut:
    """outputs, tokens: of a tile. inputs: taken at once. splits: of the inputs. warps, stages: of a program."""

    outputs: int = 64
    tokens: int = 16
    inputs: int = 128
    splits: int = 1
    warps: int = 4
    stages: int = 4

    def fitting(self, weight: torch.Tensor, *, matrices: int = 1) -> "SplitKCut":
        """This cut, with no more stages than fit into a program's shared memory on the weight's device. matrices: that
        the weight consists of; a program takes a tile of each."""
        if not weight.is_cuda:
            return self
        stage_bytes = (matrices * self.outputs + self.tokens) * self.inputs * weight.element_size()
        return _with_stages(self, 1 + _shared_bytes(weight.device) // stage_bytes)  # one is in registers

    def num_tiles(self, num_tokens: int, num_outputs: int) -> int:
        """Number of tiles of a product."""
        return -(-num_outputs // self.outputs) * -(-num_tokens // self.tokens)

    def part_elements(self, num_tokens: int, num_outputs: int) -> int:
        """Memory for the parts, in float32 elements."""
        return self.num_tiles(num_tokens, num_outputs) * self.splits * self.outputs * self.tokens


@cache
def _with_stages(cut: SplitKCut, most: int) -> SplitKCut:
    return replace(cut, stages=min(cut.stages, most))


@cache
def _shared_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True, eq=False)
class SplitKRoom:
    """What products need besides their result. parts: float32. arrived: int32, zero between launches."""

    parts: torch.Tensor
    arrived: torch.Tensor

    @classmethod
    def allocate(cls, *, num_elements: int, num_tiles: int, device: torch.device | str) -> "SplitKRoom":
        """For products with at most this many elements of parts, and tiles."""
        return cls(
            parts=torch.empty(num_elements, dtype=torch.float32, device=device),
            arrived=torch.zeros(num_tiles, dtype=torch.int32, device=device),
        )


def add_product_reference(x_TO: torch.Tensor, y_TK: torch.Tensor, weight_OK: torch.Tensor) -> torch.Tensor:
    """The obvious reference of `split_k_add_product`, float32."""
    return x_TO.float() + y_TK.float() @ weight_OK.float().T


@triton.jit
def _split_k_product_kernel(
    y_TK, weight_OK, out_TO, parts, arrived, T,
    O: tl.constexpr, K: tl.constexpr, OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, INPUTS: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    split = tl.program_id(1)
    o = tile % tl.cdiv(O, OUTPUTS) * OUTPUTS + tl.arange(0, OUTPUTS)
    t = tile // tl.cdiv(O, OUTPUTS) * TOKENS + tl.arange(0, TOKENS)
    is_output = o < O
    is_token = t < T
    k = tl.arange(0, INPUTS)
    blocks: tl.constexpr = (K + INPUTS - 1) // INPUTS
    each: tl.constexpr = (blocks + SPLITS - 1) // SPLITS
    weight = weight_OK + o.to(tl.int64)[:, None] * K + k[None, :]
    y = y_TK + t[:, None] * K + k[None, :]
    acc = tl.zeros([OUTPUTS, TOKENS], tl.float32)
    for block in tl.range(split * each, tl.minimum(split * each + each, blocks), num_stages=STAGES):
        has = (block * INPUTS + k < K)[None, :]
        w = tl.load(weight + block * INPUTS, mask=is_output[:, None] & has, other=0.0)
        v = tl.load(y + block * INPUTS, mask=is_token[:, None] & has, other=0.0)
        acc = tl.dot(w, tl.trans(v), acc, input_precision="ieee")
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
    at = out_TO + t[:, None] * O + o[None, :]
    mask = is_token[:, None] & is_output[None, :]
    out = tl.trans(acc)
    if ADD:
        out += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, out.to(out_TO.dtype.element_ty), mask=mask)


def _launch(
    y_TK: torch.Tensor, weight_OK: torch.Tensor, out_TO: torch.Tensor, room: SplitKRoom, cut: SplitKCut, *, adds: int
) -> None:
    (T, K), O, dtype = y_TK.shape, weight_OK.shape[0], out_TO.dtype
    check_tensor("y_TK", y_TK, shape=(T, K), dtype=dtype)
    check_tensor("weight_OK", weight_OK, shape=(O, K), dtype=dtype)
    check_tensor("out_TO", out_TO, shape=(T, O), dtype=dtype)
    cut = cut.fitting(weight_OK)
    tiles = cut.num_tiles(T, O)
    if cut.splits > 1 and (room.parts.numel() < cut.part_elements(T, O) or len(room.arrived) < tiles):
        raise ValueError(f"room has {room.parts.numel()} elements and {len(room.arrived)} tiles, too few for {cut}")
    _split_k_product_kernel[(tiles, cut.splits)](
        y_TK, weight_OK, out_TO, room.parts, room.arrived, T,
        O=O, K=K, OUTPUTS=cut.outputs, TOKENS=cut.tokens, INPUTS=cut.inputs, SPLITS=cut.splits, STAGES=cut.stages,
        ADD=adds, num_warps=cut.warps,
    )  # fmt: skip


def split_k_product(
    y_TK: torch.Tensor, weight_OK: torch.Tensor, out_TO: torch.Tensor, room: SplitKRoom, cut: SplitKCut
) -> None:
    """out_TO = y_TK @ weight_OK^T, summed in float32 and rounded once. All of one dtype.

    Raises ValueError if a tensor or the room does not fit.
    """
    _launch(y_TK, weight_OK, out_TO, room, cut, adds=0)


def split_k_add_product(
    x_TO: torch.Tensor, y_TK: torch.Tensor, weight_OK: torch.Tensor, room: SplitKRoom, cut: SplitKCut
) -> None:
    """x_TO += y_TK @ weight_OK^T, summed in float32 and rounded once. All of one dtype.

    Raises ValueError if a tensor or the room does not fit.
    """
    _launch(y_TK, weight_OK, x_TO, room, cut, adds=1)


def gate_up_reference(x_TD: torch.Tensor, gate_up_ED: torch.Tensor, eps: float) -> torch.Tensor:
    """The obvious reference of `dot_gate_up`, float32."""
    return gate_up_product_reference(x_TD, gate_up_ED, rms_scale_reference(x_TD, eps))


@triton.jit
def _dot_gate_up_kernel(
    x_TD, gate_up_ED, act_TI, eps, T,
    D: tl.constexpr, I: tl.constexpr, OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, INPUTS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    t = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_output = i < I
    is_token = t < T
    k = tl.arange(0, INPUTS)
    weight = gate_up_ED + i.to(tl.int64)[:, None] * D + k[None, :]
    x_at = x_TD + t[:, None] * D + k[None, :]
    gate = tl.zeros([OUTPUTS, TOKENS], tl.float32)
    up = tl.zeros([OUTPUTS, TOKENS], tl.float32)
    squares = tl.zeros([TOKENS, INPUTS], tl.float32)
    for start in tl.range(0, D, INPUTS, num_stages=STAGES):
        has = (start + k < D)[None, :]
        wanted = is_output[:, None] & has
        w_gate = tl.load(weight + start, mask=wanted, other=0.0)
        w_up = tl.load(weight + (I * D + start), mask=wanted, other=0.0)
        x = tl.load(x_at + start, mask=is_token[:, None] & has, other=0.0)
        gate = tl.dot(w_gate, tl.trans(x), gate, input_precision="ieee")
        up = tl.dot(w_up, tl.trans(x), up, input_precision="ieee")
        squares += x.to(tl.float32) * x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(squares, 1) / D + eps)
    gate = tl.trans(gate) * scale[:, None]
    out = gate / (1.0 + tl.exp(-gate)) * (tl.trans(up) * scale[:, None])
    at = act_TI + t[:, None] * I + i[None, :]
    tl.store(at, out.to(act_TI.dtype.element_ty), mask=is_token[:, None] & is_output[None, :])


def dot_gate_up(x_TD: torch.Tensor, gate_up_ED: torch.Tensor, act_TI: torch.Tensor, eps: float, cut: SplitKCut) -> None:
    """act_TI = silu(gate) * up of RMSNorm(x_TD), with the norm's weight folded into gate_up_ED [2I, D]. All of one
    dtype; the cut's splits are ignored.

    Raises ValueError if a tensor does not fit.
    """
    (T, D), I, dtype = x_TD.shape, act_TI.shape[1], x_TD.dtype
    check_tensor("x_TD", x_TD, shape=(T, D), dtype=dtype)
    check_tensor("gate_up_ED", gate_up_ED, shape=(2 * I, D), dtype=dtype)
    check_tensor("act_TI", act_TI, shape=(T, I), dtype=dtype)
    if gate_up_ED.numel() >= 2**31:
        raise ValueError(f"gate_up_ED has {gate_up_ED.numel()} elements, more than {2**31 - 1}")
    cut = cut.fitting(gate_up_ED, matrices=2)
    _dot_gate_up_kernel[(triton.cdiv(I, cut.outputs), triton.cdiv(T, cut.tokens))](
        x_TD, gate_up_ED, act_TI, eps, T,
        D=D, I=I, OUTPUTS=cut.outputs, TOKENS=cut.tokens, INPUTS=cut.inputs, STAGES=cut.stages, num_warps=cut.warps,
    )  # fmt: skip
