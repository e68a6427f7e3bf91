"""The vectorised paths against their slow references: the same calls one by one."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.blockmgr import BlockManager, BlockManagerConfig, OutOfBlocks, PrefixCache
from tests.support.blockmgr.state import full_state


def make(num_blocks: int, starts: list[int]) -> tuple[BlockManager, np.ndarray]:
    config = BlockManagerConfig(
        num_blocks=num_blocks, block_size=2, max_slots=8, max_blocks_per_slot=6, fingerprint=b"",
        prefix_cache=PrefixCache.ON, secret=b"s",
    )  # fmt: skip
    manager = BlockManager(config)
    old = np.arange(9, dtype=np.int32)
    slot = manager.admit("old", old, reserve_tokens=9).slot
    manager.commit(slot, old, 9)
    manager.release(slot, "old")
    slots = [manager.admit(f"r{i}", np.array([50 + i]), reserve_tokens=n).slot for i, n in enumerate(starts)]
    return manager, np.array(slots, np.int32)


@settings(max_examples=200)
@given(
    num_blocks=st.integers(12, 30),
    sizes=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), min_size=1, max_size=6),
    order=st.randoms(use_true_random=False),
)
def test_growing_many_is_growing_one_after_the_other(
    num_blocks: int, sizes: list[tuple[int, int]], order: object
) -> None:
    (fast, slots), (slow, _) = (make(num_blocks, [start for start, _ in sizes]) for _ in range(2))
    rows = list(range(len(sizes)))
    order.shuffle(rows)  # type: ignore[attr-defined]
    slots, wanted = slots[rows], np.array([sizes[row][1] for row in rows])
    refused = []
    for slot, num_tokens in zip(slots.tolist(), wanted.tolist(), strict=True):
        try:
            slow.grow(slot, num_tokens)
        except OutOfBlocks:
            refused.append(slot)
    answer = fast.grow_many(slots, wanted)
    assert (answer.tolist(), answer.dtype) == (refused, np.int32)
    states = [list(full_state(manager)) for manager in (fast, slow)]
    assert states[0] == states[1]


def test_rows_that_cross_no_border_are_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, slots = make(30, [1] * 6)
    before = full_state(manager)
    monkeypatch.setattr(manager._growth, "_grow_rows", None)  # would fail if called
    monkeypatch.setattr(manager._growth, "prepare_write", None)
    assert manager.grow_many(slots, np.full(6, 2)).tolist() == []
    assert manager.prepare_write_many(slots, np.full(6, 1)).tolist() == []
    assert full_state(manager) == before


@pytest.mark.parametrize(
    ("slots", "message"), [([0, 0], "given twice"), ([1, 0, 1], "given twice"), ([0, 7], r"nobody holds slots \[7\]")]
)
def test_slots_that_make_no_sense_are_refused(slots: list[int], message: str) -> None:
    manager, _ = make(30, [1, 1])
    before = full_state(manager)
    with pytest.raises(ValueError, match=message):
        manager.grow_many(np.array(slots), np.full(len(slots), 8))
    assert full_state(manager) == before


CallsOfManager = Callable[[BlockManager], object]


@pytest.mark.parametrize(
    "call",
    [
        lambda manager: manager.grow(5, 1),
        lambda manager: manager.commit(5, np.array([1]), 1),
        lambda manager: manager.taint(5),
        lambda manager: manager.fork(5, "x", num_tokens=1),
        lambda manager: manager.prepare_write(5, 0),
        lambda manager: manager.release(8, "x"),
    ],
)
def test_a_slot_that_nobody_holds_is_an_error(call: CallsOfManager) -> None:
    manager, _ = make(30, [1])
    before = full_state(manager)
    with pytest.raises(ValueError, match="slot"):
        call(manager)
    assert full_state(manager) == before
