"""Products of a decode step's rows with a matrix that overlap with the kernels before and after them.

With few rows a product only reads its matrix. So here the copy engine (TMA) loads it: a program requests its first
blocks of weights, as many as its stages hold, before it waits for its predecessor (model/kernels/overlap.py), and so
does the next program on the same multiprocessor. Only the rows' inputs are loaded after the wait. Weights are on the
side of the product where the instruction is wide, rows on the other. A matrix is viewed as [blocks of 64 inputs,
outputs, 64], so that one copy brings whole blocks in the layout that the instruction needs.

    predecessor    |------ run ------|
    this one          |weights ...   | rows, products | parts |
    successor                |weights ...             ...

The sum over the inputs is divided into splits, which are added up in order: by the program that finishes a tile last,
or, for a large tile, by all its programs, a share each, once all have arrived. Within a split it runs over the inputs
in order, and an output reads only its own row of the matrix and its own token: bits depend on the splits, not on the
tile or the other rows.

The kernel is written in Gluon, for Hopper's instructions only (`fits`); model/kernels/products/split_k.py has the same
products for all other devices and for triton's interpreter.

Legend: T tokens · O outputs · K inputs · D model dim · I intermediate dim · E = 2 I. Must not know: layers.
"""

from dataclasses import dataclass, replace

import torch

from octavo.model.kernels.checks import check_tensor
from octavo.model.kernels.overlap import Overlap
from octavo.model.kernels.products.hopper import BLOCK, ProductTrial, takes
from octavo.model.kernels.products.split_k import SplitKRoom

PUT, ADD, GATE, SCALED_GATE = 0, 1, 2, 3
"""What happens to the sums: written, added to the output, or turned into gate and up's activation, with the norm's
scale computed by the kernel itself or before it."""
SCALED_TOKENS, SCALE_WARPS = 16, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlappingCut:
    """outputs: rows of the matrix in a tile (of gate and up, half of them gate's, half up's). tokens: of a tile.
    blocks: of inputs per copy. splits: of the inputs among programs. turns: splits that one program goes through
    itself. group: tiles of tokens that use a tile of the matrix one after another. warps: of a program."""

    outputs: int = 64
    tokens: int = 16
    blocks: int = 2
    stages: int = 4
    splits: int = 1
    turns: int = 1
    group: int = 1
    warps: int = 4

    def ends(self, num_inputs: int) -> bool:
        """Whether each round's copies are requested before they are waited for. A stage is refilled one round after it
        was read, so a single stage can serve only one round."""
        rounds = -(-num_inputs // (BLOCK * self.blocks))
        return self.stages > 1 or -(-rounds // self.splits) <= self.stages

    def num_tiles(self, num_tokens: int, num_outputs: int) -> int:
        """Number of tiles of a product."""
        return -(-num_outputs // self.outputs) * -(-num_tokens // self.tokens)

    def part_elements(self, num_tokens: int, num_outputs: int) -> int:
        """Memory for the parts, in float32 elements."""
        return self.num_tiles(num_tokens, num_outputs) * self.splits * self.outputs * self.tokens


def fits(weight_OK: torch.Tensor) -> bool:
    """Whether these products support this matrix and its device, and the kernel works there."""
    return takes(weight_OK) and _TRIAL.passes(weight_OK.device)


def _multiply(y_TK: torch.Tensor, weight_OK: torch.Tensor, out_TO: torch.Tensor) -> None:
    T, O = out_TO.shape
    cut = OverlappingCut(blocks=1, splits=2, stages=2)
    elements, tiles = cut.part_elements(T, O), cut.num_tiles(T, O)
    room = SplitKRoom.allocate(num_elements=elements, num_tiles=tiles, device=out_TO.device)
    _enqueue(y_TK, weight_OK, out_TO, room, cut, Overlap.DEPENDENT, then=PUT)


_TRIAL = ProductTrial("products that overlap", _multiply)


def _launch(
    x_TK: torch.Tensor,
    weight_OK: torch.Tensor,
    out_TO: torch.Tensor,
    room: SplitKRoom | None,
    cut: OverlappingCut,
    overlap: Overlap,
    *,
    then: int,
    eps: float = 0.0,
    scale_T: torch.Tensor | None = None,
) -> None:
    (T, K), O, dtype = x_TK.shape, out_TO.shape[1], x_TK.dtype
    check_tensor("x_TK", x_TK, shape=(T, K), dtype=dtype)
    check_tensor("weight_OK", weight_OK, shape=(2 * O if then >= GATE else O, K), dtype=dtype)
    check_tensor("out_TO", out_TO, shape=(T, O), dtype=dtype)
    if not fits(weight_OK):
        raise ValueError(f"weight_OK has shape {tuple(weight_OK.shape)} and dtype {dtype}: not for these products")
    if not cut.ends(K):
        raise ValueError(f"{cut} would wait for ever: {K} inputs need two stages")
    tiles = cut.num_tiles(T, len(weight_OK))
    if cut.splits > 1 and (room is None or room.parts.numel() < cut.part_elements(T, O) or len(room.arrived) < tiles):
        raise ValueError(f"room is too small for the parts of {cut}")
    _enqueue(x_TK, weight_OK, out_TO, room, cut, overlap, then=then, eps=eps, scale_T=scale_T)


def _enqueue(
    x_TK: torch.Tensor,
    weight_OK: torch.Tensor,
    out_TO: torch.Tensor,
    room: SplitKRoom | None,
    cut: OverlappingCut,
    overlap: Overlap,
    *,
    then: int,
    eps: float = 0.0,
    scale_T: torch.Tensor | None = None,
) -> None:
    from octavo.model.kernels.products.overlapping_kernel import by_blocks, overlapping_product_kernel

    (T, K), O = x_TK.shape, out_TO.shape[1]
    if then >= GATE:
        weights = by_blocks(weight_OK.view(2, O, K), [cut.blocks, 2, cut.outputs // 2])
    else:
        weights = by_blocks(weight_OK, [cut.blocks, cut.outputs])
    parts, arrived = (out_TO, out_TO) if room is None else (room.parts, room.arrived)
    parts = parts if scale_T is None else scale_T
    overlapping_product_kernel[(cut.num_tiles(T, len(weight_OK)) * cut.splits,)](
        weights, by_blocks(x_TK, [cut.blocks, cut.tokens]), x_TK, out_TO, parts, arrived, T, eps,
        O=O, K=K, OUTPUTS=cut.outputs, TOKENS=cut.tokens, BLOCKS=cut.blocks, STAGES=cut.stages, SPLITS=cut.splits,
        TURNS=cut.turns, GROUP=cut.group, THEN=then, WARPS=cut.warps, PDL=overlap.value, num_warps=cut.warps,
        launch_pdl=overlap.value,
    )  # fmt: skip


def overlapping_product(
    y_TK: torch.Tensor,
    weight_OK: torch.Tensor,
    out_TO: torch.Tensor,
    room: SplitKRoom | None,
    *,
    cut: OverlappingCut,
    overlap: Overlap,
) -> None:
    """out_TO = y_TK @ weight_OK^T, summed in float32 and rounded once. All of one 16-bit dtype.

    Raises ValueError if a tensor, the room or the device does not fit.
    """
    _launch(y_TK, weight_OK, out_TO, room, cut, overlap, then=PUT)


def overlapping_add_product(
    x_TO: torch.Tensor,
    y_TK: torch.Tensor,
    weight_OK: torch.Tensor,
    room: SplitKRoom | None,
    *,
    cut: OverlappingCut,
    overlap: Overlap,
) -> None:
    """x_TO += y_TK @ weight_OK^T, summed in float32 and rounded once; otherwise as `overlapping_product`."""
    _launch(y_TK, weight_OK, x_TO, room, cut, overlap, then=ADD)


def overlapping_gate_up(
    x_TD: torch.Tensor,
    gate_up_ED: torch.Tensor,
    act_TI: torch.Tensor,
    eps: float,
    *,
    cut: OverlappingCut,
    overlap: Overlap,
    scale_T: torch.Tensor | None = None,
) -> None:
    """act_TI = silu(gate) * up of RMSNorm(x_TD), with the norm's weight folded into gate_up_ED [2I, D]. The cut's
    splits are ignored. All of one 16-bit dtype.

    scale_T: float32 memory for the norm's scale, which is then computed first, with the same bits: large tiles leave no
    registers for it. Raises ValueError if a tensor or the device does not fit.
    """
    cut = replace(cut, splits=1)
    if scale_T is None:
        _launch(x_TD, gate_up_ED, act_TI, None, cut, overlap, then=GATE, eps=eps)
        return
    overlapping_scale(x_TD, scale_T, eps)
    _launch(x_TD, gate_up_ED, act_TI, None, cut, overlap, then=SCALED_GATE, eps=eps, scale_T=scale_T)


def overlapping_scale(x_TD: torch.Tensor, scale_T: torch.Tensor, eps: float) -> None:
    """scale_T = 1 / rms(x_TD), float32, with the same bits as the products compute. Whole blocks of inputs.

    Raises ValueError if a tensor does not fit.
    """
    from octavo.model.kernels.products.overlapping_kernel import scale_kernel

    T, K = x_TD.shape
    check_tensor("scale_T", scale_T, shape=(T,), dtype=torch.float32)
    scale_kernel[(-(-T // SCALED_TOKENS),)](
        x_TD, scale_T, T, eps, K=K, TOKENS=SCALED_TOKENS, WARPS=SCALE_WARPS, num_warps=SCALE_WARPS
    )
