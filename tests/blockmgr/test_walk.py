"""The index told in parts while it changes, against what it holds in the end."""

import random

import numpy as np
import pytest

from octavo.blockmgr import BlockManager, OutOfBlocks
from octavo.blockmgr import changes as walk_module
from octavo.blockmgr.changes import BlockEvent, EventKind
from tests.blockmgr.conftest import MakeManager

BLOCK_SIZE = 4


class Listener:
    """Hears as a gateway does: a block whose parent it does not know is nothing to it."""

    def __init__(self) -> None:
        self.parent_of: dict[bytes, bytes] = {}

    def hear(self, events: list[BlockEvent]) -> None:
        for event in events:
            if event.kind is EventKind.CLEARED:
                self.parent_of.clear()
            elif event.kind is EventKind.REMOVED:
                self.parent_of.pop(event.block_hash, None)
            elif not event.parent_hash or event.parent_hash in self.parent_of:
                self.parent_of[event.block_hash] = event.parent_hash


def store(manager: BlockManager, request_id: str, token_ids: list[int]) -> int | None:
    ids_T = np.asarray(token_ids, np.int32)
    try:
        slot = manager.admit(request_id, ids_T, reserve_tokens=len(ids_T)).slot
    except OutOfBlocks:
        return None
    manager.commit(slot, ids_T, len(ids_T))
    return int(slot)


def change(manager: BlockManager, rng: random.Random, number: int) -> None:
    """Prompts over two tokens, so that many share heads; few blocks, so that many are evicted; rarely a flush."""
    name = f"r{number}"
    if rng.random() < 0.02:
        manager.flush_prefix_cache()
        return
    prompt = [token for _ in range(rng.randint(1, 5)) for token in [rng.randint(1, 2)] * BLOCK_SIZE]
    slot = store(manager, name, prompt)
    if slot is not None:
        manager.release(slot, name)  # type: ignore[arg-type]


def reachable(manager: BlockManager) -> set[bytes]:
    """Digests of the blocks that some prompt can hit: whose parents are the very entries that they followed."""
    index = manager._index
    alive, digests = {0}, set()
    for event in manager.walk_events().take(10**6):
        block = index.block_of[event.block_hash]
        if int(index.parent_entry_P[block]) in alive:
            alive.add(int(index.entry_P[block]))
            digests.add(event.block_hash)
    return digests


@pytest.mark.parametrize("num_blocks", [6, 14, 40])
@pytest.mark.parametrize("num_host_blocks", [0, 20])
@pytest.mark.parametrize("part", [1, 2, 7])
def test_parts_between_changes_tell_all_that_can_be_hit_and_nothing_else(
    make_manager: MakeManager, num_blocks: int, num_host_blocks: int, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(walk_module, "LOOK_AHEAD", 3)
    for seed in range(40):
        rng = random.Random(seed)
        manager = make_manager(num_blocks=num_blocks, num_host_blocks=num_host_blocks)
        for number in range(30):
            change(manager, rng, number)
        manager.take_events()
        walk, listener, number = manager.walk_events(), Listener(), 100
        is_over = False
        while not is_over:
            for _ in range(rng.choice([0, 0, 1])):
                number += 1
                change(manager, rng, number)
            listener.hear(manager.take_events())
            events = walk.take(part)
            is_over = len(events) < part
            listener.hear(events)
            assert len(events) <= part
        present = {event.block_hash for event in manager.walk_events().take(10**6)}
        assert reachable(manager) <= listener.parent_of.keys() <= present


def test_without_changes_the_parts_are_the_whole(make_manager: MakeManager) -> None:
    manager = make_manager(num_blocks=40, max_blocks_per_slot=12)
    for number in range(3):
        store(manager, f"r{number}", [number, *range(39)])
    walk, whole = manager.walk_events(), manager.walk_events().take(10**6)
    parts = [walk.take(7) for _ in range(6)]
    assert [len(part) for part in parts] == [7, 7, 7, 7, 2, 0]
    assert [event for part in parts for event in part] == whole
