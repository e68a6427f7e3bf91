"""What every block is, and what a cell of several blocks is."""

import contextlib

import numpy as np
import pytest

from octavo.blockmgr.block_map import BlockState, HostBlockState, map_blocks, map_host_blocks
from octavo.blockmgr.config import BlockManagerConfig
from octavo.blockmgr.errors import OutOfBlocks, OutOfSlots
from octavo.blockmgr.ids import PrefixCache
from octavo.blockmgr.manager import BlockManager

FREE, CACHED, ACTIVE, SHARED = BlockState


def manager(num_blocks: int = 8, num_host_blocks: int = 0, max_copies_in: int = 1) -> BlockManager:
    return BlockManager(
        BlockManagerConfig(
            num_blocks=num_blocks,
            block_size=2,
            max_slots=4,
            max_blocks_per_slot=8,
            fingerprint=b"f",
            prefix_cache=PrefixCache.ON,
            num_host_blocks=num_host_blocks,
            max_copies_in=max_copies_in,
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
    with pytest.raises(ValueError, match="0 cells"):
        map_host_blocks(manager(num_host_blocks=2).host, 0)


# ---------------------------------------------------------------- the second tier


def recount(blocks: BlockManager) -> list[int]:
    """Both tiers, block by block: the states of the device's, then those of the host's."""
    tier, states = blocks.host, []
    packed = {block for request in tier.swapped.values() for block in request.blocks.tolist()}
    to_copy = {*tier.outs, *tier.ins.sources}
    for pool, is_host in ((blocks._pool, False), (tier.pool, True)):
        blank, cached = set(pool.blank_blocks().tolist()), set(pool.lru.to_array().tolist())
        for block in range(pool.first, pool.first + pool.num_blocks):
            if is_host and block in to_copy:
                states.append(int(HostBlockState.COPYING))
            elif block in blank:
                states.append(int(FREE))
            elif block in cached:
                states.append(int(CACHED))
            elif is_host:
                states.append(int(HostBlockState.SWAPPED if block in packed else HostBlockState.COPYING))
            else:
                states.append(int(SHARED if pool.ref_P[block] > 1 else ACTIVE))
    return states


def host_states(blocks: BlockManager) -> list[int]:
    """One cell a block; what the map counts is what it shows, and both maps are what a recount finds."""
    found, device = blocks.map_host(100), blocks.map(100)
    assert found is not None
    states = found.cells_C.tolist()
    assert device.cells_C.tolist() + states == recount(blocks)
    counts = [states.count(each) for each in HostBlockState]
    assert (found.num_blocks, found.num_free, found.num_cached, found.num_swapped) == (len(states), *counts[:3])
    return states


def run_step(blocks: BlockManager, step: int) -> None:
    """A plan takes what is queued, is launched, and ends."""
    blocks.take_moves()
    blocks.begin_step(step)
    blocks.end_step(step)


def test_a_worker_without_a_second_tier_has_no_map_of_it() -> None:
    assert manager().map_host(100) is None


def test_every_state_of_the_second_tier_is_seen_and_counted() -> None:
    free, cached, swapped, copying = HostBlockState
    blocks = manager(num_blocks=3, num_host_blocks=4)
    assert host_states(blocks) == [free] * 4
    first = blocks.admit("a", ids(1, 2, 3, 4, 5), reserve_tokens=6).slot
    blocks.commit(first, ids(1, 2, 3, 4), 4)
    blocks.release(first, "a")
    second = blocks.admit("b", ids(6, 7, 8, 9), reserve_tokens=6).slot
    assert host_states(blocks) == [copying, copying, free, free]  # what b has driven out
    run_step(blocks, 1)
    assert host_states(blocks) == [cached, cached, free, free]
    blocks.swap_out(second, "b", 4)
    assert host_states(blocks) == [cached, cached, copying, copying]
    run_step(blocks, 2)
    assert host_states(blocks) == [cached, cached, swapped, swapped]
    blocks.admit("c", ids(1, 2, 3, 4, 5), reserve_tokens=6)
    assert sorted(host_states(blocks)) == [swapped, swapped, copying, copying]  # both come back, one a plan
    blocks.take_moves()
    blocks.begin_step(3)
    assert sorted(host_states(blocks)) == [swapped, swapped, copying, copying]  # one in flight, one in the queue
    blocks.end_step(3)
    assert sorted(host_states(blocks)) == [free, swapped, swapped, copying]
    run_step(blocks, 4)
    blocks.drop_swapped("b")
    assert host_states(blocks) == [free] * 4
    assert blocks.audit().violations == ()


@pytest.mark.parametrize("seed", range(6))
def test_both_maps_are_those_of_a_recount_whatever_happens(seed: int) -> None:
    chance = np.random.default_rng(seed)
    blocks = manager(num_blocks=10, num_host_blocks=12, max_copies_in=2)
    running: dict[str, tuple[int, np.ndarray]] = {}
    waiting: dict[str, np.ndarray] = {}
    seen: set[int] = set()
    for step in range(1, 150):
        name, tokens = f"r{step}", ids(*[int(chance.integers(3))] * 4, *chance.integers(9, size=4).tolist())
        if waiting and chance.random() < 0.5:
            name, tokens = waiting.popitem()
        try:
            slot = blocks.admit(name, tokens, reserve_tokens=len(tokens)).slot
            running[name] = (slot, tokens)
        except (OutOfBlocks, OutOfSlots):
            blocks.drop_swapped(name)
        seen |= set(host_states(blocks))
        blocks.take_moves()
        blocks.begin_step(step)
        seen |= set(host_states(blocks))
        for name, (slot, tokens) in list(running.items()):
            if blocks.is_awaited(slot):
                continue
            blocks.commit(slot, tokens, len(tokens))
            if chance.random() < 0.3:
                blocks.release(slot, name)
                del running[name]
        seen |= set(host_states(blocks))
        blocks.end_step(step)
        for name, (slot, tokens) in list(running.items()):
            if chance.random() < 0.2 and not blocks.is_awaited(slot):
                with contextlib.suppress(OutOfBlocks):
                    blocks.swap_out(slot, name, len(tokens))
                    waiting[name] = running.pop(name)[1]
        seen |= set(host_states(blocks))
    assert seen == set(HostBlockState)
    assert blocks.audit().violations == ()


def test_a_cell_of_the_second_tier_is_the_highest_of_its_blocks() -> None:
    blocks = manager(num_blocks=3, num_host_blocks=5)
    slot = blocks.admit("a", ids(1, 2, 3), reserve_tokens=4).slot
    blocks.swap_out(slot, "a", 3)
    run_step(blocks, 1)
    found = blocks.map_host(3)
    assert found is not None
    assert (found.blocks_per_cell, found.cells_C.tolist()) == (2, [HostBlockState.SWAPPED, FREE, FREE])
    assert (found.num_blocks, found.num_free, found.num_swapped) == (5, 3, 2)
