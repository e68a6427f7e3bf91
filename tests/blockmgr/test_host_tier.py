"""The second tier, by examples: what goes out, what comes back, and what a plan is told of it."""

from collections.abc import Callable

import numpy as np
import pytest

from octavo.blockmgr import BlockManager, BlockManagerConfig, OutOfBlocks, PrefixCache
from octavo.blockmgr.ids import Tier
from octavo.blockmgr.tables import CopyQueue

MakeManager = Callable[..., BlockManager]
A, B = np.arange(9, dtype=np.int32), np.arange(100, 133, dtype=np.int32)


def serve(manager: BlockManager, name: str, tokens: np.ndarray) -> None:
    """A request comes, computes all of its tokens, and goes."""
    slot = manager.admit(name, tokens, reserve_tokens=len(tokens)).slot
    manager.commit(slot, tokens, len(tokens))
    manager.release(slot, name)


def moves(manager: BlockManager) -> tuple[list[list[int]], list[list[int]]]:
    outs_C2, ins_C2 = manager.take_moves()
    return outs_C2.tolist(), ins_C2.tolist()


def test_an_evicted_prefix_goes_to_the_host_and_comes_back_on_a_hit(make_manager: MakeManager) -> None:
    manager = make_manager(num_host_blocks=4, max_blocks_per_slot=12)
    serve(manager, "a", A)  # two full blocks, 0 and 1
    serve(manager, "b", B[:31])  # eight blocks: all there are
    assert moves(manager) == ([[1, 0], [0, 1]], [])  # tails are given up first
    assert manager.match(A) == 8
    assert {event.tier for event in manager.walk_events().take(99)} == {Tier.DEVICE, Tier.HOST}
    admission = manager.admit("c", A, reserve_tokens=9)
    assert (admission.num_cached_tokens, admission.num_awaited_blocks) == (8, 2)
    assert manager.is_awaited(admission.slot)
    row = manager.table_SM[admission.slot].tolist()
    outs, ins = moves(manager)
    assert ins == [[1, row[0]], [0, row[1]]]
    assert {device for device, _ in outs} < set(row[:3])  # who made room: the third block was blank
    assert not manager.is_awaited(admission.slot)
    assert manager.audit().violations == ()


def test_what_costs_less_to_compute_stays_on_the_host(make_manager: MakeManager) -> None:
    manager = make_manager(num_host_blocks=4, max_blocks_per_slot=12)
    serve(manager, "a", A)
    serve(manager, "b", B[:31])
    moves(manager)
    admission = manager.admit("c", A, reserve_tokens=9, num_to_use=lambda is_on_host: 0)
    assert (admission.num_cached_tokens, admission.num_awaited_blocks) == (0, 0)
    manager.commit(admission.slot, A, 9)  # computed meanwhile: the device has the entry, the host's block is blank
    assert manager.host.pool.num_blank == 2  # the other two have what made room
    assert manager.audit().violations == ()


def test_a_plan_brings_back_no_more_than_it_may(make_manager: MakeManager) -> None:
    manager = make_manager(num_host_blocks=4, max_blocks_per_slot=12, max_copies_in=1)
    serve(manager, "a", A)
    serve(manager, "b", B[:31])
    moves(manager)
    slot = manager.admit("c", A, reserve_tokens=9).slot
    assert [len(moves(manager)[1]), manager.is_awaited(slot), len(moves(manager)[1]), manager.is_awaited(slot)] == [
        1, True, 1, False,
    ]  # fmt: skip


def test_a_request_is_swapped_out_with_its_half_full_block_and_comes_back_whole(make_manager: MakeManager) -> None:
    manager = make_manager(num_host_blocks=3, prefix_cache=PrefixCache.OFF)
    slot = manager.admit("a", A, reserve_tokens=9).slot
    manager.swap_out(slot, "a", 9)
    assert (manager.num_free, manager.host.pool.num_available) == (8, 0)
    assert moves(manager) == ([[0, 0], [1, 1], [2, 2]], [])
    admission = manager.admit("a", A, reserve_tokens=13)
    assert (admission.num_cached_tokens, admission.num_awaited_blocks) == (9, 3)
    assert moves(manager) == ([], [[0, 0], [1, 1], [2, 2]])
    manager.begin_step(1)
    manager.end_step(1)
    assert manager.host.pool.num_available == 3
    assert manager.audit().violations == ()


def test_one_that_does_not_fit_stays_where_it_is(make_manager: MakeManager) -> None:
    manager = make_manager(num_host_blocks=2)
    slot = manager.admit("a", A, reserve_tokens=9).slot
    with pytest.raises(OutOfBlocks):
        manager.swap_out(slot, "a", 9)
    assert manager.capacity(slot) == 12
    assert manager.audit().violations == ()


def test_a_block_of_a_step_in_flight_does_not_move(make_manager: MakeManager) -> None:
    manager = make_manager(num_host_blocks=8)
    slot = manager.admit("a", A, reserve_tokens=9).slot
    manager.begin_step(1)
    with pytest.raises(ValueError, match="cannot be swapped out"):
        manager.swap_out(slot, "a", 9)


def test_a_cancel_while_its_prefix_comes_back_leaves_it_on_the_host(make_manager: MakeManager) -> None:
    manager = make_manager(num_host_blocks=8, max_blocks_per_slot=12)
    serve(manager, "a", A)
    serve(manager, "b", B[:31])
    moves(manager)
    slot = manager.admit("c", A, reserve_tokens=9).slot
    manager.release(slot, "c")
    assert moves(manager)[1] == []
    assert manager.match(A) == 8
    assert manager.admit("d", A).num_awaited_blocks == 2
    assert manager.audit().violations == ()


def swapped_source(make_manager: MakeManager) -> list[int]:
    """Where the last block of a fork is copied out from, when its copy on write has not happened yet."""
    manager = make_manager(num_host_blocks=8, prefix_cache=PrefixCache.OFF)
    parent = manager.admit("p", A[:6], reserve_tokens=6).slot
    child = manager.fork(parent, "c", num_tokens=6)
    manager.prepare_write(child, 6)  # block 1 is to be copied into block 2 by the next plan
    manager.swap_out(child, "c", 6)
    return [device for device, _ in manager.take_moves()[0].tolist()]


def test_a_block_whose_own_copy_is_queued_goes_out_from_where_it_is(
    make_manager: MakeManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert swapped_source(make_manager) == [0, 1]
    monkeypatch.setattr(CopyQueue, "origin", lambda self, block: block)
    assert swapped_source(make_manager) == [0, 2]  # the mutant: nothing is there yet


def test_a_failed_plan_did_none_of_its_copies(make_manager: MakeManager) -> None:
    manager = make_manager(num_host_blocks=8, max_blocks_per_slot=12)
    serve(manager, "a", A)
    serve(manager, "b", B[:31])
    outs_C2, ins_C2 = manager.take_moves()
    assert manager.invalidate_copies(outs_C2, ins_C2) == []
    assert manager.match(A) == 0
    slot = manager.admit("x", A, reserve_tokens=9).slot
    manager.swap_out(slot, "x", 9)
    manager.invalidate_copies(*manager.take_moves())
    assert manager.admit("x", A, reserve_tokens=9).num_cached_tokens == 0
    assert manager.audit().violations == ()


def test_who_reads_what_a_failed_plan_should_have_brought_is_named(make_manager: MakeManager) -> None:
    manager = make_manager(num_host_blocks=8, max_blocks_per_slot=12)
    serve(manager, "a", A)
    serve(manager, "b", B[:31])
    moves(manager)
    slot = manager.admit("c", A, reserve_tokens=9).slot
    sharer = manager.admit("d", A).slot
    assert manager.invalidate_copies(*manager.take_moves()) == [slot, sharer]
    assert manager.match(A) == 0


def test_what_waits_for_a_block_that_a_failed_plan_should_have_copied_out_is_named_too(
    make_manager: MakeManager,
) -> None:
    manager = make_manager(num_host_blocks=16, max_blocks_per_slot=12, max_copies_in=2)
    for name, tokens in (("a", A), ("z", A + 50), ("b", B[:31])):
        serve(manager, name, tokens)
    first = manager.admit("c", A + 50, reserve_tokens=9).slot
    second = manager.admit("d", A).slot
    outs_C2, ins_C2 = manager.take_moves()
    assert set(ins_C2[:, 1].tolist()) == set(manager.table_SM[first, :2].tolist())  # the second waits for its turn
    assert manager.invalidate_copies(outs_C2, ins_C2) == [first, second]
    manager.release(second, "d")
    manager.release(first, "c")
    assert (manager.match(A), manager.match(A + 50), manager.audit().violations) == (0, 0, ())


def test_a_later_plan_brings_back_nothing_of_what_a_failed_one_should_have_copied_out(
    make_manager: MakeManager,
) -> None:
    manager = make_manager(num_host_blocks=16, max_blocks_per_slot=12)
    serve(manager, "a", A)
    serve(manager, "b", B[:31])
    failing = manager.take_moves()
    manager.begin_step(1)
    slot = manager.admit("c", A, reserve_tokens=9).slot
    manager.take_moves()
    manager.begin_step(2)
    manager.end_step(1)
    assert manager.invalidate_copies(*failing) == [slot]
    manager.end_step(2)
    assert (manager.match(A), manager.audit().violations) == (0, ())


def test_a_flush_forgets_the_host_too(make_manager: MakeManager) -> None:
    manager = make_manager(num_host_blocks=8, max_blocks_per_slot=12)
    serve(manager, "a", A)
    serve(manager, "b", B[:31])
    moves(manager)
    assert manager.flush_prefix_cache() == 2 + 7
    assert (manager.match(A), manager.host.pool.num_blank, manager.num_free) == (0, 8, 8)


@pytest.mark.parametrize("field", ["num_host_blocks", "max_copies_in"])
def test_a_size_that_cannot_be_is_named(field: str) -> None:
    sizes = {"num_blocks": 1, "block_size": 1, "max_slots": 1, "max_blocks_per_slot": 1, field: -1}
    with pytest.raises(ValueError, match=field):
        BlockManagerConfig(fingerprint=b"", prefix_cache=PrefixCache.ON, **sizes)  # type: ignore[arg-type]


def test_a_hit_that_is_computed_again_instead_of_copied_in_is_one_more_in_use(make_manager: MakeManager) -> None:
    manager = make_manager(num_host_blocks=4, max_blocks_per_slot=12)
    serve(manager, "a", A)
    serve(manager, "b", B[:31])
    slot = manager.admit("c", A, reserve_tokens=9, num_to_use=lambda is_on_host: 0).slot
    assert (manager.num_hits_in_use("d", A), manager.most_hits_in_use("d")) == (0, 0)
    manager.commit(slot, A, 9)
    assert (manager.most_hits_in_use("d"), manager.num_hits_in_use("d", A)) == (None, 2)


def test_a_request_whose_copies_failed_hits_what_is_indexed(make_manager: MakeManager) -> None:
    manager = make_manager(num_host_blocks=4)
    slot = manager.admit("a", A, reserve_tokens=9).slot
    manager.swap_out(slot, "a", 9)
    other = manager.admit("other", A, reserve_tokens=9).slot
    manager.commit(other, A, 9)
    assert (manager.num_hits_in_use("a", A), manager.most_hits_in_use("a")) == (0, 0)
    manager.invalidate_copies(*manager.take_moves())
    assert (manager.most_hits_in_use("a"), manager.num_hits_in_use("a", A)) == (None, 2)
