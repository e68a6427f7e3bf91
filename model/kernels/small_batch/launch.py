"""Common parts of the kernels for a few rows: how they are cut, and sums over registers. The kernels overlap
(model/kernels/overlap.py): each loads its weights into registers, and only then waits for its predecessor's results.

Products are sums over registers in a fixed order: the same inputs give the same bits, whatever else is in the batch.

Must not know: layers, rows' state.
"""

from dataclasses import dataclass
from math import gcd

import torch
import triton
import triton.language as tl

BLOCKS = (1024, 512, 256, 128)
WASTE = 1.15
MAX_ELEMENTS = 2**31
MAX_WARPS = 32
"""The most warps of a program, on every NVIDIA device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How a matrix product is cut: the most output rows of a program, its warps, and the elements of a row that are
    read at once (None: the widest block that wastes little); all powers of two.

    Raises ValueError if no device could run it, which triton's interpreter would not notice."""

    rows: int
    warps: int
    block: int | None = None

    def __post_init__(self) -> None:
        numbers = (self.rows, self.warps, self.block or 1)
        if any(number.bit_count() != 1 for number in numbers) or self.warps > MAX_WARPS:
            raise ValueError(f"{self}: all are powers of two, and a program has at most {MAX_WARPS} warps")

    def rows_of(self, total: int) -> int:
        """Rows of a program, which divide the total evenly."""
        return gcd(self.rows, total)

    def block_of(self, length: int) -> int:
        """Elements that are read at once of a row of this length: without a block of the cut, the widest that covers
        the row with at most 15% more elements."""
        if self.block is not None:
            return self.block
        for block in BLOCKS:
            if -(-length // block) * block <= length * WASTE:
                return block
        return min(BLOCKS[0], max(16, 1 << (length - 1).bit_length()))


def check_size(name: str, matrix: torch.Tensor) -> None:
    """Raises ValueError if offsets into the matrix do not fit 32 bits."""
    if matrix.numel() >= MAX_ELEMENTS:
        raise ValueError(f"{name} has {matrix.numel()} elements, more than {MAX_ELEMENTS - 1}")


@triton.jit
def load_rows(matrix, r, LENGTH: tl.constexpr, BLOCK: tl.constexpr):
    """Rows r of a matrix [_, LENGTH] as a tuple of tiles [R, BLOCK]."""
    tiles = ()
    for i in tl.static_range((LENGTH + BLOCK - 1) // BLOCK):
        k = i * BLOCK + tl.arange(0, BLOCK)
        at = matrix + r[:, None] * LENGTH + k[None, :]
        if i * BLOCK + BLOCK <= LENGTH:
            tiles = tiles + (tl.load(at),)  # noqa: RUF005 (triton has no unpacking)
        else:
            tiles = tiles + (tl.load(at, mask=(k < LENGTH)[None, :], other=0.0),)  # noqa: RUF005
    return tiles


@triton.jit
def load_vector(vector, LENGTH: tl.constexpr, BLOCK: tl.constexpr):
    """A vector [LENGTH] as a tuple of float32 blocks, padded with zeros."""
    blocks = ()
    for i in tl.static_range((LENGTH + BLOCK - 1) // BLOCK):
        k = i * BLOCK + tl.arange(0, BLOCK)
        blocks = blocks + (tl.load(vector + k, mask=k < LENGTH, other=0.0).to(tl.float32),)  # noqa: RUF005
    return blocks


@triton.jit
def product(tiles, blocks, R: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr):
    """float32 [R]: the tiles' rows times the vector."""
    acc = tl.zeros([R, BLOCK], tl.float32)
    for i in tl.static_range(COUNT):
        acc += tiles[i].to(tl.float32) * blocks[i][None, :]
    return tl.sum(acc, 1)


@triton.jit
def inverse_rms(blocks, eps, LENGTH: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr):
    """1 / sqrt(mean of squares + eps) of a vector."""
    squares = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(COUNT):
        squares += blocks[i] * blocks[i]
    return 1.0 / tl.sqrt(tl.sum(squares, 0) / LENGTH + eps)
