"""The state of every block, for people to look at. Must not know who asks.

Legend: P blocks · C cells · H blocks of the host, from 0.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from octavo.blockmgr.host_tier import HostTier
from octavo.blockmgr.pool import BlockPool


class BlockState(IntEnum):
    """The numbers equal those of octavo.v1.BlockState."""

    FREE = 1
    CACHED = 2
    ACTIVE = 3  # held by one request, or by steps in flight
    SHARED = 4


class HostBlockState(IntEnum):
    """The numbers equal those of octavo.v1.HostBlockState."""

    FREE = 1
    CACHED = 2
    SWAPPED = 3  # of a preempted request
    COPYING = 4  # being copied to or from the host, or waiting for steps in flight


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMap:
    """cells_C: uint8, a BlockState each; cell c is for blocks [c·blocks_per_cell, (c+1)·blocks_per_cell), the last one
    for the remaining blocks. num_shared: blocks that are SHARED."""

    blocks_per_cell: int
    cells_C: np.ndarray
    num_shared: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBlockMap:
    """cells_C: as in BlockMap, but a HostBlockState each. Blocks that are not FREE, CACHED or SWAPPED are COPYING."""

    num_blocks: int
    num_free: int
    num_cached: int
    num_swapped: int
    blocks_per_cell: int
    cells_C: np.ndarray


def map_blocks(pool: BlockPool, max_cells: int) -> BlockMap:
    """O(blocks), without Python per block. A cell has the highest state of its blocks, so that blocks in use are never
    hidden. Raises ValueError if max_cells is below 1."""
    if max_cells < 1:
        raise ValueError(f"a map of {max_cells} cells")
    states_P = np.full(pool.num_blocks, BlockState.ACTIVE, np.uint8)
    states_P[pool.ref_P > 1] = BlockState.SHARED
    states_P[pool.lru.to_array()] = BlockState.CACHED
    states_P[pool.blank_blocks()] = BlockState.FREE
    num_shared = int(np.count_nonzero(states_P == BlockState.SHARED))
    blocks_per_cell, cells_C = _cells(states_P, max_cells)
    return BlockMap(blocks_per_cell=blocks_per_cell, cells_C=cells_C, num_shared=num_shared)


def map_host_blocks(tier: HostTier, max_cells: int) -> HostBlockMap | None:
    """The same for the second tier; None if there is none. A block in a queued copy is COPYING, whoever holds it: its
    content is not there yet, or is about to leave."""
    if max_cells < 1:
        raise ValueError(f"a map of {max_cells} cells")
    pool = tier.pool
    if not pool.num_blocks:
        return None
    states_P = np.full(pool.first + pool.num_blocks, HostBlockState.COPYING, np.uint8)
    for request in tier.swapped.values():
        states_P[request.blocks] = HostBlockState.SWAPPED
    states_P[pool.lru.to_array()] = HostBlockState.CACHED
    states_P[pool.blank_blocks()] = HostBlockState.FREE
    states_P[[*tier.outs, *tier.ins.sources]] = HostBlockState.COPYING
    states_H = states_P[pool.first :]
    num_by_state = np.bincount(states_H, minlength=len(HostBlockState) + 1).tolist()
    blocks_per_cell, cells_C = _cells(states_H, max_cells)
    return HostBlockMap(
        num_blocks=pool.num_blocks,
        num_free=num_by_state[HostBlockState.FREE],
        num_cached=num_by_state[HostBlockState.CACHED],
        num_swapped=num_by_state[HostBlockState.SWAPPED],
        blocks_per_cell=blocks_per_cell,
        cells_C=cells_C,
    )


def _cells(states_P: np.ndarray, max_cells: int) -> tuple[int, np.ndarray]:
    """Blocks per cell, and the cells: each has the highest state of its blocks."""
    blocks_per_cell = max(1, -(-len(states_P) // max_cells))
    return blocks_per_cell, np.maximum.reduceat(states_P, np.arange(0, len(states_P), blocks_per_cell))
