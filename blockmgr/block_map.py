"""What every block is, for people to look at. Must not know who asks.

Legend: P blocks · C cells.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from octavo.blockmgr.pool import BlockPool


class BlockState(IntEnum):
    """The numbers are those of octavo.v1.BlockState."""

    FREE = 1
    CACHED = 2
    ACTIVE = 3  # held by one request, or by steps in flight
    SHARED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMap:
    """cells_C: uint8, a BlockState each: cell c stands for blocks [c·blocks_per_cell, (c+1)·blocks_per_cell), of which
    the last has what is left. num_shared: blocks that are SHARED."""

    blocks_per_cell: int
    cells_C: np.ndarray
    num_shared: int


def map_blocks(pool: BlockPool, max_cells: int) -> BlockMap:
    """O(blocks), without Python per block. A cell has the highest state that any of its blocks has, so that nothing
    that is in use is hidden. ValueError for no cells."""
    if max_cells < 1:
        raise ValueError(f"a map of {max_cells} cells")
    states_P = np.full(pool.num_blocks, BlockState.ACTIVE, np.uint8)
    states_P[pool.ref_P > 1] = BlockState.SHARED
    states_P[pool.lru.to_array()] = BlockState.CACHED
    states_P[pool.blank_blocks()] = BlockState.FREE
    num_shared = int(np.count_nonzero(states_P == BlockState.SHARED))
    blocks_per_cell = max(1, -(-pool.num_blocks // max_cells))
    cells_C = np.maximum.reduceat(states_P, np.arange(0, pool.num_blocks, blocks_per_cell))
    return BlockMap(blocks_per_cell=blocks_per_cell, cells_C=cells_C, num_shared=num_shared)
