"""Products of dozens to hundreds of tokens with a matrix, cut so that tiles fill whole rounds (waves) of a device.

With 65 to 256 tokens a product is bound by what a multiprocessor can load: a tile loads its tokens and its rows of the
matrix, and tiles that are powers of two leave a round half empty. So here a tile has all tokens and as many rows of the
matrix as give each multiprocessor the same work, any multiple of 8. One warp loads blocks of both, as many as shared
memory holds, the matrix's before the wait for the preceding kernel (model/kernels/overlap.py); warp groups multiply.
Gate and up are in the registers of the same thread, and only their activation is written.

The inputs of a matrix with few outputs are split among the programs (thread blocks) of a cluster. Each program has a
share of the tile's tokens: the others send it their sums, from shared memory to shared memory by the copy engine, and
it adds them up in the order of the splits. Bits depend on the cut alone.

    one program     weights ...| tokens, weights ... | products | sums to the others |
    its cluster     weights ...| tokens, weights ... | products | sums to the others | each a share: sums, x, out

The kernel (clustered.cu) is CUDA C++ for Hopper's instructions only (`fits_clustered`); elsewhere a library multiplies.

Legend: T tokens · O outputs · K inputs · D model dim · I intermediate dim · E = 2 I. Must not know: layers.
"""

import ctypes
from dataclasses import dataclass
from enum import Enum
from functools import cache
from math import ceil
from pathlib import Path

import torch

from octavo.model.kernels.checks import check_tensor
from octavo.model.kernels.cuda_source import CudaKernel, TensorMap, has_compiler
from octavo.model.kernels.overlap import Overlap
from octavo.model.kernels.precompile import is_compiling
from octavo.model.kernels.products.hopper import BLOCK, MULTIPROCESSORS, ProductTrial, takes

ROW_BYTES = 128
"""Of a block of inputs in a row."""
SHARED_BYTES, BYTES_BESIDE = 232_448, 2_048
"""Most shared memory of a program, and what it uses besides its stages."""
LEAST_STAGES, MOST_STAGES = 3, 8
MOST_WIDTH = 192
"""Most outputs of an instruction: for more there are two, since the compiler gives no instruction more registers than a
thread has on average."""
MOST_OUTPUTS = {128: 288, 192: 224, 256: 176}
"""Most outputs of a tile of gate and up that registers hold, by the tile's tokens."""
CLUSTERS = {1: 132, 2: 66, 4: 30, 8: 15}
"""How many clusters of this many programs an H100 or H200 holds, whose multiprocessors are in groups of 16 and 18."""
FEW_SPLITS = 2
"""Up to this many, shared memory is more useful for another stage than for the other programs' sums."""
CLOCK_BYTES = 40
"""Bytes that a multiprocessor loads per clock when all do."""
SUM_CLOCKS, SUM_BYTES = 2_500, 6
"""Clocks to add up the splits of a tile, and bytes of its sums per further clock: more than it really takes, but cuts
that are chosen with these were the fastest (bench/RESULTS.md)."""
REGISTERS = {2: (40, 232), 3: (32, 160)}
"""Registers of a thread that loads and of one that multiplies, by the number of warp groups that multiply."""
SOURCE = Path(__file__).with_name("clustered.cu")


class Then(Enum):
    """What happens to the sums."""

    PUT, ADD, GATE = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusteredCut:
    """tokens: of a tile, 128, 192 or 256. outputs: rows of the matrix in a tile; of gate and up, half of them gate's
    and half up's. splits: of the inputs, among the programs of a cluster."""

    tokens: int
    outputs: int
    stages: int
    splits: int = 1

    @property
    def is_apart(self) -> bool:
        """Whether the other programs' sums have memory of their own, so that they need not wait for the stages'."""
        return self.splits > FEW_SPLITS

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory, in which stages begin at a multiple of 1,024 bytes."""
        stages = self.stages * (self.tokens + self.outputs) * ROW_BYTES
        return 1024 + stages + _landing_bytes(self.tokens, self.outputs, self.splits)

    @property
    def holds_sums(self) -> bool:
        """Whether the stages' memory has room for a program's sums, and for the others' unless these are apart."""
        own = _sum_bytes(self.tokens, self.outputs, 1)
        others = 0 if self.splits == 1 or self.is_apart else _sum_bytes(self.tokens, self.outputs, self.splits)
        return own + others <= self.stages * (self.tokens + self.outputs) * ROW_BYTES

    def has_inputs(self, num_inputs: int) -> bool:
        """Whether each split has a block of a matrix of num_inputs."""
        return BLOCK * self.splits <= num_inputs

    @property
    def groups(self) -> int:
        """Number of warp groups that multiply."""
        return 3 if self.tokens % 128 else 2

    def num_tiles(self, num_tokens: int, num_outputs: int) -> int:
        """Number of tiles of a product."""
        return -(-num_outputs // self.outputs) * -(-num_tokens // self.tokens)

    def part_elements(self, num_tokens: int, num_outputs: int) -> int:
        """Always 0: parts stay in shared memory."""
        return 0


def gate_up_cut(num_outputs: int, tokens: int) -> ClusteredCut:
    """Cut for gate and up, num_outputs rows together, for up to this many tokens: with the outputs for which a device's
    rounds take the least time."""

    def clocks(outputs: int) -> float:
        return ceil(ceil(num_outputs / outputs) / MULTIPROCESSORS) * _block_clocks(tokens, outputs)

    outputs = min(range(48, MOST_OUTPUTS[tokens] + 16, 16), key=clocks)
    return ClusteredCut(tokens=tokens, outputs=outputs, stages=_stages(tokens, outputs))


def split_cut(num_outputs: int, num_inputs: int, num_tokens: int) -> ClusteredCut | None:
    """Cut for a product with few tiles, in one round of a device, based on measurements (bench/RESULTS.md); None if
    there is none."""
    blocks = num_inputs // BLOCK

    def clocks(cut: ClusteredCut) -> float:
        sums = SUM_CLOCKS + cut.tokens * cut.outputs * 4 / SUM_BYTES
        return blocks / cut.splits * _block_clocks(cut.tokens, cut.outputs) + sums

    cuts = (
        ClusteredCut(tokens=tokens, outputs=outputs, stages=_stages(tokens, outputs, splits), splits=splits)
        for tokens in {128, num_tokens}
        for splits in CLUSTERS
        for outputs in range(24, 136, 8)
    )
    at_once = (cut for cut in cuts if cut.num_tiles(num_tokens, num_outputs) <= CLUSTERS[cut.splits])
    fitting = (cut for cut in at_once if cut.stages >= LEAST_STAGES and cut.holds_sums and cut.has_inputs(num_inputs))
    return min(fitting, key=clocks, default=None)


def _block_clocks(tokens: int, outputs: int) -> float:
    """Clocks for a block of inputs: to multiply, or to load, whichever is more."""
    return max(tokens // 64 * outputs * 2, (tokens + outputs) * ROW_BYTES / CLOCK_BYTES)


def _stages(tokens: int, outputs: int, splits: int = 1) -> int:
    room = SHARED_BYTES - BYTES_BESIDE - _landing_bytes(tokens, outputs, splits)
    return min(MOST_STAGES, room // ((tokens + outputs) * ROW_BYTES))


def _landing_bytes(tokens: int, outputs: int, splits: int) -> int:
    """Shared memory for the other programs' sums, besides the stages."""
    return _sum_bytes(tokens, outputs, splits) if splits > FEW_SPLITS else 0


def _sum_bytes(tokens: int, outputs: int, splits: int) -> int:
    """Bytes of a tile's sums in this many shares of its tokens, with rows padded against bank conflicts."""
    row_bytes = 4 * (outputs if outputs % 16 else outputs + 8)
    return splits * -(-tokens // splits) * row_bytes


def fits_clustered(weight_OK: torch.Tensor) -> bool:
    """Whether these products support the matrix and its device, there is a compiler for the kernel, and the kernel
    works there; while kernels are only being compiled, that last is assumed."""
    return takes(weight_OK) and has_compiler() and (is_compiling() or _TRIAL.passes(weight_OK.device))


def _multiply(y_TK: torch.Tensor, weight_OK: torch.Tensor, out_TO: torch.Tensor) -> None:
    cut = ClusteredCut(tokens=128, outputs=48, stages=3, splits=2)
    clustered_product(y_TK, weight_OK, out_TO, cut=cut, overlap=Overlap.DEPENDENT)


_TRIAL = ProductTrial("products in clusters", _multiply)


def clustered_product(
    y_TK: torch.Tensor, weight_OK: torch.Tensor, out_TO: torch.Tensor, *, cut: ClusteredCut, overlap: Overlap
) -> None:
    """out_TO = y_TK @ weight_OK^T, summed in float32 and rounded once. All of one 16-bit dtype; O a multiple of 8, K of
    64.

    Raises ValueError if a tensor or the device does not fit.
    """
    _launch(y_TK, weight_OK, out_TO, None, cut, overlap, Then.PUT)


def clustered_add_product(
    x_TO: torch.Tensor, y_TK: torch.Tensor, weight_OK: torch.Tensor, *, cut: ClusteredCut, overlap: Overlap
) -> None:
    """x_TO += y_TK @ weight_OK^T, summed in float32 and rounded once; otherwise as `clustered_product`."""
    _launch(y_TK, weight_OK, x_TO, None, cut, overlap, Then.ADD)


def clustered_gate_up(
    x_TD: torch.Tensor,
    gate_up_ED: torch.Tensor,
    scale_T: torch.Tensor,
    act_TI: torch.Tensor,
    *,
    cut: ClusteredCut,
    overlap: Overlap,
) -> None:
    """act_TI = silu(scale * gate) * (scale * up) of x_TD, with the norm's weight folded into gate_up_ED [2I, D].
    scale_T: float32; otherwise as `clustered_product`. The cut must have one split."""
    check_tensor("scale_T", scale_T, shape=(len(x_TD),), dtype=torch.float32)
    _launch(x_TD, gate_up_ED, act_TI, scale_T, cut, overlap, Then.GATE)


def _launch(
    x_TK: torch.Tensor,
    weight_OK: torch.Tensor,
    out_TO: torch.Tensor,
    scale_T: torch.Tensor | None,
    cut: ClusteredCut,
    overlap: Overlap,
    then: Then,
) -> None:
    (T, K), O, dtype = x_TK.shape, out_TO.shape[1], x_TK.dtype
    is_gate = then is Then.GATE
    check_tensor("x_TK", x_TK, shape=(T, K), dtype=dtype)
    check_tensor("weight_OK", weight_OK, shape=(2 * O if is_gate else O, K), dtype=dtype)
    check_tensor("out_TO", out_TO, shape=(T, O), dtype=dtype)
    if not takes(weight_OK) or O % 8:
        raise ValueError(f"weight_OK has shape {tuple(weight_OK.shape)} and dtype {dtype}: not for these products")
    if not cut.has_inputs(K) or (is_gate and cut.splits > 1):
        raise ValueError(f"{cut} has too many splits for {K} inputs{', of gate and up' * is_gate}")
    if not (is_gate or cut.holds_sums):
        raise ValueError(f"{cut} has no room for its sums")
    kernel = clustered_product_kernel(cut, then, dtype == torch.float16)
    if is_compiling():
        kernel.begin_compiling()
        return
    tiles = cut.num_tiles(T, 2 * O if is_gate else O)
    matrix, rows = (weight_OK.view(2, O, K), cut.outputs // 2) if is_gate else (weight_OK, cut.outputs)
    arguments = [
        (TensorMap(matrix, rows), None),
        (TensorMap(x_TK, min(cut.tokens, ceil(T / 8) * 8)), None),
        (out_TO.data_ptr(), ctypes.c_void_p),
        (0 if scale_T is None else scale_T.data_ptr(), ctypes.c_void_p),
        *((number, ctypes.c_int) for number in (T, O, K // BLOCK)),
    ]
    # The programs of gate and up are persistent and go through tiles; those that split sums have one tile each.
    kernel.launch(min(tiles, MULTIPROCESSORS) if is_gate else tiles * cut.splits, arguments, overlap)


@cache
def clustered_product_kernel(cut: ClusteredCut, then: Then, is_fp16: bool) -> CudaKernel:
    """The kernel for a cut and a dtype."""
    return CudaKernel(
        source_of(cut, then, is_fp16=is_fp16),
        "products.clustered.clustered_product_kernel",
        num_threads=(cut.groups + 1) * 128,
        shared_bytes=cut.shared_bytes,
    )


def source_of(cut: ClusteredCut, then: Then, *, is_fp16: bool) -> str:
    """The kernel's source for a cut."""
    number, width = "f16" if is_fp16 else "bf16", cut.outputs // (2 if cut.outputs > MOST_WIDTH else 1)
    sums = width // 2
    registers = ", ".join(f"%{i}" for i in range(sums))
    multiply = (
        f'asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{sums + 2}, 0;\\n'
        f"wgmma.mma_async.sync.aligned.m64n{width}k16.f32.{number}.{number} {{{registers}}}, "
        f'%{sums}, %{sums + 1}, p, 1, 1, 0, 0;\\n}}" : '
        + ", ".join(f'"+f"(d[{i}])' for i in range(sums))
        + ' : "l"(x), "l"(w), "r"(has_sums) : "memory");'
    )
    few, many = REGISTERS[cut.groups]
    names = {
        "GROUPS": cut.groups, "TILES": cut.tokens // cut.groups // 64, "OUTPUTS": cut.outputs, "WIDTH": width,
        "STAGES": cut.stages, "SPLITS": cut.splits, "APART": int(cut.is_apart), "THEN": then.value,
        "IS_FP16": int(is_fp16),
    }  # fmt: skip
    defined = "".join(f"#define {name} {value}\n" for name, value in names.items())
    text = SOURCE.read_text().replace("@MULTIPLY@", multiply).replace("@FEW@", str(few)).replace("@MANY@", str(many))
    return defined + text
