"""What every block is, and what a cell of several blocks is."""

import numpy as np
import pytest

from octavo.blockmgr.block_map import BlockState, map_blocks
from octavo.blockmgr.config import BlockManagerConfig
from octavo.blockmgr.ids import PrefixCache
from octavo.blockmgr.manager import BlockManager

FREE, CACHED, ACTIVE, SHARED = BlockState


def manager(num_blocks: int = 8) -> BlockManager:
    return BlockManager(
        BlockManagerConfig(
            num_blocks=num_blocks,
            block_size=2,
            max_slots=4,
            max_blocks_per_slot=8,
            fingerprint=b"f",
            prefix_cache=PrefixCache.ON,
        )
    )


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def test_every_state_is_seen_and_counted() -> None:
    blocks = manager()
    first = blocks.admit("a", ids(1, 2, 3, 4), reserve_tokens=4)
    blocks.commit(first.slot, ids(1, 2, 3, 4), 4)
    assert blocks.map(100).cells_C.tolist() == [ACTIVE] * 2 + [FREE] * 6
    blocks.fork(first.slot, "b", num_tokens=2)
    found = blocks.map(100)
    assert (found.cells_C.tolist(), found.num_shared) == ([SHARED, ACTIVE] + [FREE] * 6, 1)
    blocks.release(first.slot, "a")
    assert blocks.map(100).cells_C.tolist() == [ACTIVE, CACHED] + [FREE] * 6
    assert blocks.audit().violations == ()


def test_blocks_that_wait_for_a_step_are_active() -> None:
    blocks = manager()
    slot = blocks.admit("a", ids(1, 2, 3), reserve_tokens=3).slot
    blocks.begin_step(1)
    blocks.release(slot, "a")
    assert blocks.map(8).cells_C.tolist() == [ACTIVE] * 2 + [FREE] * 6
    blocks.end_step(1)
    assert blocks.map(8).cells_C.tolist() == [FREE] * 8


def test_a_cell_is_the_highest_that_any_of_its_blocks_is() -> None:
    blocks = manager(7)
    blocks.admit("a", ids(1, 2, 3, 4, 5, 6, 7, 8), reserve_tokens=8)  # blocks 0 to 3
    found = blocks.map(3)
    assert (found.blocks_per_cell, found.cells_C.tolist()) == (3, [ACTIVE, ACTIVE, FREE])
    assert blocks.map(2).cells_C.tolist() == [ACTIVE, FREE]  # 4 and 3 blocks
    assert blocks.map(1).cells_C.tolist() == [ACTIVE]
    assert (blocks.map(4).blocks_per_cell, blocks.map(4).cells_C.tolist()) == (2, [ACTIVE, ACTIVE, FREE, FREE])
    half = manager(2)
    half.admit("a", ids(1), reserve_tokens=1)
    assert half.map(1).cells_C.tolist() == [ACTIVE]


@pytest.mark.parametrize("max_cells", [1, 2, 3, 7, 64, 99, 100, 101, 4096])
def test_a_map_has_never_more_cells_than_asked_for_and_covers_everything(max_cells: int) -> None:
    found = manager(100).map(max_cells)
    assert len(found.cells_C) <= max_cells
    assert (len(found.cells_C) - 1) * found.blocks_per_cell < 100 <= len(found.cells_C) * found.blocks_per_cell


def test_a_map_without_cells_is_an_error_of_ours() -> None:
    with pytest.raises(ValueError, match="0 cells"):
        map_blocks(manager()._pool, 0)
