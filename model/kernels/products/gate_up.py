"""SwiGLU's gate and up of many tokens in one product, whose epilogue is the activation: silu(gate) * up.

A library's product writes gate and up, 2I numbers per token, and another kernel reads them again; for a small model
that is an eighth of a prompt's time. Here a gate column and its up column are in the same thread, so only the
activation is written. The matrix, gate's rows before up's, is read as [2, I, D]: a tile of it has outputs of both
halves, side by side on the wide side of one instruction.

    programs are persistent, one or two on each multiprocessor, and go from tile to tile: the next tile's inputs are
    loaded while this one's activation is computed. Within a group of token tiles, outputs change slowly, so that
    weights stay in the cache.

Legend: T tokens · I intermediate dim · D model dim · E = 2 I. Must not know: layers.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.model.kernels.checks import check_tensor, is_hopper

LEAST_TOKENS = 1024
"""From here on it is faster than a library's product and `silu_mul`, for every measured shape (bench/RESULTS.md)."""
INTERPRETED_MULTIPROCESSORS = 3  # without a CUDA device


@dataclass(frozen=True, slots=True, kw_only=True)
class GateUpTiles:
    """tokens, outputs (of gate, and as many of up): of a tile. inputs: taken at once. group: token tiles of a group.
    warps, stages: of a program. programs: per multiprocessor."""

    tokens: int = 128
    outputs: int = 128
    inputs: int = 64
    group: int = 16
    warps: int = 8
    stages: int = 3
    programs: int = 1

    def fit(self, gate_up_ED: torch.Tensor) -> bool:
        """Whether the tiles divide the matrix."""
        return gate_up_ED.shape[0] % (2 * self.outputs) == 0 and gate_up_ED.shape[1] % self.inputs == 0


TILES = GateUpTiles()
FEW_TILES = (
    (1.5, GateUpTiles(tokens=64, outputs=64, warps=4, stages=4, programs=2)),
    (3, GateUpTiles(outputs=64, warps=4, stages=4)),
)
"""(most turns of `TILES` per multiprocessor, smaller tiles that divide so little work better)."""


def is_faster(num_tokens: int, gate_up_ED: torch.Tensor) -> bool:
    """Whether `gate_up_product` should be used: for many tokens and 16-bit numbers, on a device like those on which it
    was measured."""
    return (
        num_tokens >= LEAST_TOKENS
        and gate_up_ED.is_cuda
        and gate_up_ED.element_size() == 2
        and TILES.fit(gate_up_ED)
        and is_hopper(gate_up_ED.device)
    )


def tiles_of(num_tokens: int, gate_up_ED: torch.Tensor) -> GateUpTiles:
    """The fastest tiles for this many tokens (bench/RESULTS.md); bits do not depend on the choice."""
    num_tiles = triton.cdiv(num_tokens, TILES.tokens) * (len(gate_up_ED) // (2 * TILES.outputs))
    turns = num_tiles / _num_multiprocessors(gate_up_ED.device)
    return next((tiles for most, tiles in FEW_TILES if turns <= most), TILES)


def gate_up_product_reference(x_TD: torch.Tensor, gate_up_ED: torch.Tensor, scale_T: torch.Tensor) -> torch.Tensor:
    """The obvious reference, float32."""
    gate_TI, up_TI = ((x_TD.float() * scale_T[:, None]) @ gate_up_ED.float().T).chunk(2, dim=-1)
    return torch.nn.functional.silu(gate_TI) * up_TI


@triton.jit(do_not_specialize=["T", "programs"])
def _gate_up_product_kernel(
    x_tiles, weight_tiles, act_tiles, scale_T, T, programs,
    D: tl.constexpr, I: tl.constexpr, OUTPUTS: tl.constexpr, TOKENS: tl.constexpr, INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    token_tiles = tl.cdiv(T, TOKENS)
    in_group: tl.constexpr = GROUP * (I // OUTPUTS)
    for tile in tl.range(tl.program_id(0), token_tiles * (I // OUTPUTS), programs, flatten=True):
        first = tile // in_group * GROUP
        width = tl.minimum(token_tiles - first, GROUP)
        token = (first + tile % in_group % width) * TOKENS
        output = tile % in_group // width * OUTPUTS
        acc = tl.zeros([TOKENS, 2 * OUTPUTS], tl.float32)
        for block in range(D // INPUTS):
            x = x_tiles.load([token, block * INPUTS])
            weight = tl.reshape(weight_tiles.load([0, output, block * INPUTS]), [2 * OUTPUTS, INPUTS])
            acc = tl.dot(x, tl.trans(weight), acc)
        gate, up = tl.split(tl.permute(tl.reshape(acc, [TOKENS, 2, OUTPUTS]), [0, 2, 1]))
        t = token + tl.arange(0, TOKENS)
        scale = tl.load(scale_T + t, mask=t < T, other=0.0)
        gate = gate * scale[:, None]
        act = gate / (1.0 + tl.exp(-gate)) * (up * scale[:, None])
        act_tiles.store([token, output], act.to(act_tiles.dtype))


@cache
def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def gate_up_product(
    x_TD: torch.Tensor,
    gate_up_ED: torch.Tensor,
    scale_T: torch.Tensor,
    act_TI: torch.Tensor,
    tiles: GateUpTiles = TILES,
) -> None:
    """act_TI = silu(gate) * up of scale_T * x_TD; gate_up_ED [2I, D]: gate's rows, then up's. scale_T: float32, the
    rest of one dtype, at most 16 bits wide on a device. Sums are in float32 and rounded once.

    Raises ValueError if a tensor does not fit, or the tiles do not divide the matrix.
    """
    (T, D), I, dtype = x_TD.shape, act_TI.shape[1], x_TD.dtype
    check_tensor("x_TD", x_TD, shape=(T, D), dtype=dtype)
    check_tensor("gate_up_ED", gate_up_ED, shape=(2 * I, D), dtype=dtype)
    check_tensor("scale_T", scale_T, shape=(T,), dtype=torch.float32)
    check_tensor("act_TI", act_TI, shape=(T, I), dtype=dtype)
    if not tiles.fit(gate_up_ED):
        raise ValueError(f"gate_up_ED has shape {tuple(gate_up_ED.shape)}, which {tiles} do not divide")
    num_tiles = triton.cdiv(T, tiles.tokens) * (I // tiles.outputs)
    programs = min(tiles.programs * _num_multiprocessors(x_TD.device), num_tiles)
    _gate_up_product_kernel[(programs,)](
        TensorDescriptor(x_TD, [T, D], [D, 1], [tiles.tokens, tiles.inputs]),
        TensorDescriptor(gate_up_ED, [2, I, D], [I * D, D, 1], [2, tiles.outputs, tiles.inputs]),
        TensorDescriptor(act_TI, [T, I], [I, 1], [tiles.tokens, tiles.outputs]),
        scale_T, T, programs,
        D=D, I=I, OUTPUTS=tiles.outputs, TOKENS=tiles.tokens, INPUTS=tiles.inputs, GROUP=tiles.group,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
