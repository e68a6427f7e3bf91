"""Whole answers of the block manager, one situation each."""

from collections.abc import Callable

import numpy as np
import pytest

from octavo.blockmgr import Admission, BlockManager, BlockManagerConfig, OutOfBlocks, OutOfSlots, PrefixCache, SlotId
from tests.support.blockmgr.state import full_state

MakeManager = Callable[..., BlockManager]
TEN = np.arange(10, dtype=np.int32)


def rows(manager: BlockManager) -> list[list[int]]:
    return [[block for block in row if block >= 0] for row in manager.table_SM.tolist()]


def run(manager: BlockManager, name: str, tokens: np.ndarray, salt: str = "") -> int:
    """Admit, compute and commit a whole prompt; its slot."""
    slot = manager.admit(name, tokens, salt=salt, reserve_tokens=len(tokens)).slot
    manager.commit(slot, tokens, len(tokens))
    return int(slot)


def counts(manager: BlockManager) -> tuple[int, int, int]:
    return manager.num_free, manager.num_cached, manager.num_active


def test_a_first_request_gets_the_lowest_slot_and_rising_blocks(make_manager: MakeManager) -> None:
    manager = make_manager()
    assert manager.admit("a", TEN, reserve_tokens=10) == Admission(slot=SlotId(0), num_cached_tokens=0)
    updates_U3, copies_C2 = manager.take_updates()
    assert updates_U3.tolist() == [[0, 0, 0], [0, 1, 1], [0, 2, 2]]
    assert (updates_U3.dtype, copies_C2.shape, copies_C2.dtype) == (np.int32, (0, 2), np.int32)
    assert manager.take_updates()[0].tolist() == []
    assert rows(manager) == [[0, 1, 2], [], [], []]
    assert counts(manager) == (5, 0, 3)


def test_admission_without_a_reserve_holds_the_cached_prefix_only(make_manager: MakeManager) -> None:
    manager = make_manager()
    manager.release(run(manager, "a", TEN), "a")
    assert manager.admit("b", TEN) == Admission(slot=SlotId(0), num_cached_tokens=8)
    assert rows(manager)[0] == [0, 1]
    assert manager.capacity(0) == 8


def test_a_prompt_that_is_cached_whole_computes_its_last_block_again(make_manager: MakeManager) -> None:
    manager = make_manager()
    run(manager, "a", TEN[:8])
    assert manager.match(TEN[:8]) == 4
    assert manager.match(TEN[:9]) == 8
    assert manager.match(TEN[:4]) == 0
    assert manager.match(TEN[:0]) == 0


def test_only_full_blocks_are_hit(make_manager: MakeManager) -> None:
    manager = make_manager()
    slot = manager.admit("a", TEN, reserve_tokens=10).slot
    manager.commit(slot, TEN, 7)
    assert manager.match(TEN) == 4
    manager.commit(slot, TEN, 8)
    assert manager.match(TEN) == 8


def test_a_hit_ends_at_the_first_block_that_differs(make_manager: MakeManager) -> None:
    manager = make_manager()
    run(manager, "a", TEN)
    other = TEN.copy()
    other[5] = 99
    assert manager.match(other) == 4
    other[0] = 99
    assert manager.match(other) == 0


def test_the_same_tokens_after_another_prefix_are_no_hit(make_manager: MakeManager) -> None:
    manager = make_manager()
    run(manager, "a", np.array([1, 1, 1, 1, 2, 2, 2, 2, 3], np.int32))
    assert manager.match(np.array([2, 2, 2, 2, 3], np.int32)) == 0


def test_salts_do_not_share(make_manager: MakeManager) -> None:
    manager = make_manager()
    run(manager, "a", TEN, salt="tenant")
    assert (manager.match(TEN), manager.match(TEN, salt="tenant"), manager.match(TEN, salt="tenan")) == (0, 8, 0)


def test_statistics_count_prompt_and_hit_tokens_of_admitted_requests(make_manager: MakeManager) -> None:
    manager = make_manager()
    run(manager, "a", TEN)
    manager.match(TEN)
    manager.admit("b", TEN)
    assert (manager.num_queried_tokens, manager.num_hit_tokens) == (20, 8)


def test_a_released_request_leaves_full_blocks_cached_and_the_rest_free(make_manager: MakeManager) -> None:
    manager = make_manager()
    slot = run(manager, "a", TEN)
    assert counts(manager) == (5, 0, 3)
    manager.release(slot, "a")
    assert counts(manager) == (6, 2, 0)
    assert rows(manager) == [[], [], [], []]


def test_free_blocks_go_first_and_then_cached_tails_before_heads(make_manager: MakeManager) -> None:
    manager = make_manager(num_blocks=4, max_blocks_per_slot=4)
    manager.release(run(manager, "a", np.arange(12, dtype=np.int32)), "a")  # cached: blocks 0, 1, 2
    slot = manager.admit("b", np.array([7], np.int32)).slot
    given = []
    for num_tokens in (4, 8, 12, 16):
        manager.grow(slot, num_tokens)
        given.append(rows(manager)[0][-1])
    assert given == [3, 2, 1, 0]
    assert manager.num_evicted_blocks == 3


def test_a_prefix_that_was_used_again_outlives_an_older_one(make_manager: MakeManager) -> None:
    manager = make_manager(num_blocks=4, max_blocks_per_slot=4)
    old, young = np.array([1, 1, 1, 1, 1], np.int32), np.array([2, 2, 2, 2, 2], np.int32)
    for name, tokens in (("a", old), ("b", young), ("c", old)):
        manager.release(run(manager, name, tokens), name)
    manager.admit("d", np.array([9], np.int32), reserve_tokens=12)
    assert (manager.match(old), manager.match(young)) == (4, 0)


def test_admission_that_cannot_be_whole_changes_nothing(make_manager: MakeManager) -> None:
    manager = make_manager(num_blocks=4, max_blocks_per_slot=6)
    manager.release(run(manager, "a", TEN), "a")
    before = full_state(manager)
    with pytest.raises(OutOfBlocks) as refused:
        manager.admit("b", TEN, reserve_tokens=17)  # hits 2 blocks, and so leaves 2 for the 3 more that it wants
    assert (refused.value.wanted, refused.value.free) == (3, 2)
    assert full_state(manager) == before
    assert manager.admit("b", TEN, reserve_tokens=16).num_cached_tokens == 8


def test_a_fifth_request_finds_no_slot(make_manager: MakeManager) -> None:
    manager = make_manager()
    for name in "abcd":
        manager.admit(name, TEN)
    with pytest.raises(OutOfSlots, match="all 4 slots are taken"):
        manager.admit("e", TEN)
    manager.release(2, "c")
    assert manager.admit("e", TEN).slot == 2


@pytest.mark.parametrize(
    ("name", "tokens", "message"),
    [("a", TEN, "already holds slot 0"), ("b", TEN[:0], "no tokens"), ("b", np.zeros(25, np.int32), "do not fit")],
)
def test_a_request_that_makes_no_sense_is_refused(
    make_manager: MakeManager, name: str, tokens: np.ndarray, message: str
) -> None:
    manager = make_manager()
    manager.admit("a", TEN)
    before = full_state(manager)
    with pytest.raises(ValueError, match=message):
        manager.admit(name, tokens)
    assert full_state(manager) == before


def test_growing_is_all_or_nothing(make_manager: MakeManager) -> None:
    manager = make_manager(num_blocks=3)
    slot = manager.admit("a", TEN, reserve_tokens=4).slot
    before = full_state(manager)
    with pytest.raises(OutOfBlocks, match="3 blocks wanted, 2 free"):
        manager.grow(slot, 13)
    assert full_state(manager) == before
    manager.grow(slot, 12)
    manager.grow(slot, 1)
    assert rows(manager)[0] == [0, 1, 2]


def test_a_row_is_never_wider_than_the_table(make_manager: MakeManager) -> None:
    manager = make_manager()
    slot = manager.admit("a", TEN).slot
    with pytest.raises(ValueError, match="25 tokens do not fit a row of 6 blocks"):
        manager.grow(slot, 25)
    with pytest.raises(ValueError, match="does not fit"):
        manager.grow_many(np.array([slot], np.int32), np.array([25]))


def test_a_second_release_and_a_strangers_do_nothing(make_manager: MakeManager) -> None:
    manager = make_manager()
    slot = run(manager, "a", TEN)
    manager.release(slot, "a")
    manager.release(slot, "a")
    assert manager.admit("b", TEN).slot == slot
    before = full_state(manager)
    manager.release(slot, "a")
    manager.release(3, "b")
    assert full_state(manager) == before


def test_a_row_released_before_anybody_saw_it_is_not_reported(make_manager: MakeManager) -> None:
    manager = make_manager()
    manager.release(manager.admit("a", TEN, reserve_tokens=10).slot, "a")
    slot = manager.admit("b", TEN, reserve_tokens=1).slot
    assert manager.take_updates()[0].tolist() == [[slot, 0, manager.table_SM[slot, 0]]]


def test_the_second_of_two_equal_blocks_stays_private(make_manager: MakeManager) -> None:
    manager = make_manager()
    first = manager.admit("a", TEN, reserve_tokens=10).slot
    second = manager.admit("b", TEN, reserve_tokens=10).slot
    manager.commit(first, TEN, 10)
    manager.commit(second, TEN, 10)
    manager.release(second, "b")
    assert counts(manager) == (5, 0, 3)
    manager.release(first, "a")
    assert counts(manager) == (6, 2, 0)


def test_a_private_copy_takes_over_when_the_first_is_evicted(make_manager: MakeManager) -> None:
    manager = make_manager(num_blocks=6)
    first, second = (manager.admit(name, TEN, reserve_tokens=8).slot for name in "ab")
    manager.commit(first, TEN, 8)
    manager.commit(second, TEN, 8)
    manager.release(first, "a")
    third = manager.admit("c", np.array([5], np.int32), reserve_tokens=16).slot  # evicts both
    assert manager.match(TEN) == 0
    manager.release(third, "c")
    manager.grow(second, 12)
    manager.commit(second, np.arange(12, dtype=np.int32), 12)
    assert manager.match(TEN) == 8


def test_without_a_prefix_cache_nothing_is_kept(make_manager: MakeManager) -> None:
    manager = make_manager(prefix_cache=PrefixCache.OFF)
    slot = run(manager, "a", TEN)
    assert manager.match(TEN) == 0
    manager.release(slot, "a")
    assert counts(manager) == (8, 0, 0)
    assert manager.take_events() == []


def test_more_tokens_committed_than_are_known_or_fit_is_an_error(make_manager: MakeManager) -> None:
    manager = make_manager()
    slot = manager.admit("a", TEN, reserve_tokens=8).slot
    for tokens, num_computed in ((TEN, 9), (TEN[:3], 4)):
        with pytest.raises(ValueError, match="computed"):
            manager.commit(slot, tokens, num_computed)


def test_flush_forgets_what_nobody_uses(make_manager: MakeManager) -> None:
    manager = make_manager()
    run(manager, "a", TEN)
    manager.release(run(manager, "b", TEN + 50), "b")
    assert counts(manager) == (3, 2, 3)
    assert manager.flush_prefix_cache() == 2
    assert counts(manager) == (5, 0, 3)
    assert (manager.match(TEN), manager.match(TEN + 50)) == (8, 0)
    assert manager.flush_prefix_cache() == 0


def test_the_table_cannot_be_written_by_others(make_manager: MakeManager) -> None:
    with pytest.raises(ValueError, match="read-only"):
        make_manager().table_SM[0, 0] = 1


def test_half_a_million_blocks_take_no_python_object_each(make_manager: MakeManager) -> None:
    manager = make_manager(num_blocks=500_000, block_size=16, max_slots=8, max_blocks_per_slot=500_000)
    slot = manager.admit("a", TEN, reserve_tokens=8_000_000).slot
    assert (manager.num_free, manager.capacity(slot)) == (0, 8_000_000)
    manager.release(slot, "a")
    assert (manager.num_free, manager.audit().violations) == (500_000, ())


@pytest.mark.parametrize("field", ["num_blocks", "block_size", "max_slots", "max_blocks_per_slot", "max_events"])
def test_settings_that_make_no_sense_name_their_field(field: str) -> None:
    settings = {"num_blocks": 1, "block_size": 1, "max_slots": 1, "max_blocks_per_slot": 1, field: 0}
    with pytest.raises(ValueError, match=f"{field} must be at least 1, got 0"):
        BlockManagerConfig(fingerprint=b"", prefix_cache=PrefixCache.ON, **settings)  # type: ignore[arg-type]


def test_hits_in_use_are_those_that_take_no_room(make_manager: MakeManager) -> None:
    manager = make_manager(num_blocks=4)
    slot = manager.admit("a", TEN, reserve_tokens=10).slot
    assert manager.num_hits_in_use("b", TEN) == 0
    manager.commit(slot, TEN, 10)
    assert manager.num_hits_in_use("b", TEN) == 2
    manager.begin_step(1)
    manager.release(slot, "a")
    assert (manager.num_hits_in_use("b", TEN), manager.num_cached) == (2, 0)  # they wait for the step
    manager.end_step(1)
    assert (manager.num_hits_in_use("b", TEN), manager.num_cached) == (0, 2)


def test_the_most_hits_in_use_are_known_until_the_prompt_may_hit_more(make_manager: MakeManager) -> None:
    manager = make_manager(num_blocks=12)
    slot = manager.admit("a", TEN, reserve_tokens=10).slot
    manager.commit(slot, TEN, 4)
    assert manager.most_hits_in_use("b") is None
    assert (manager.num_hits_in_use("b", TEN), manager.most_hits_in_use("b")) == (1, 1)
    assert manager.most_hits_in_use("c") is None
    other = manager.admit("other", TEN + 50, reserve_tokens=10).slot
    assert manager.most_hits_in_use("b") is None  # which might have shared what was cached
    assert (manager.num_hits_in_use("b", TEN), manager.most_hits_in_use("b")) == (1, 1)
    manager.commit(other, TEN + 50, 10)
    manager.release(other, "other")
    assert manager.most_hits_in_use("b") == 1
    manager.commit(slot, TEN, 8)
    assert manager.most_hits_in_use("b") is None
    assert (manager.num_hits_in_use("b", TEN), manager.most_hits_in_use("b")) == (2, 2)


def test_a_hit_that_was_evicted_and_is_computed_again_may_raise_the_most(make_manager: MakeManager) -> None:
    manager = make_manager(num_blocks=5)
    manager.commit(manager.admit("a", TEN, reserve_tokens=10).slot, TEN, 10)
    manager.release(0, "a")
    manager.admit("b", TEN[:1] + 30, reserve_tokens=4)
    assert (manager.num_hits_in_use("c", TEN), manager.most_hits_in_use("c")) == (0, 0)
    manager.grow(0, 16)
    assert (manager.match(TEN), manager.most_hits_in_use("c")) == (4, 0)  # one of the two is gone
    manager.grow(0, 20)
    manager.commit(0, np.concatenate([TEN, TEN]), 4)
    assert manager.most_hits_in_use("c") is None
