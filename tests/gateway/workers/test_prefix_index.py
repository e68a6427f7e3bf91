"""The prefix index against an obvious reference: per worker, a plain list of cached (salt, tokens) prefixes."""

import gc
import sys
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.gateway.workers.prefix_index import PART_BLOCKS, PrefixIndex, PrefixIndexes
from octavo.gateway.workers.stats import PoolStats
from octavo.wire.messages import KvEvent, KvEventKind, KvEvents
from tests.support.gateway.kv_events import BLOCK, ids, removed, stored

CLEARED = KvEvent(kind=KvEventKind.CLEARED)


def index_with(*events: tuple[int, KvEvent], max_nodes: int = 100) -> PrefixIndex:
    index = PrefixIndex(block_size=BLOCK, max_nodes=max_nodes)
    for incarnation, event in events:
        index.apply(incarnation, event)
    return index


def drop_all(index: PrefixIndex) -> None:
    """What workers had that are gone."""
    while index.has_leaving:
        index.drop_part()


def test_the_longest_run_of_cached_blocks_counts() -> None:
    index = index_with((1, stored(b"a", b"", [1, 2])), (1, stored(b"b", b"a", [3, 4])), (2, stored(b"x", b"", [1, 2])))
    assert index.match(ids(1, 2, 3, 4, 5), "") == {1: 4, 2: 2}
    assert index.match(ids(1, 2, 9, 4, 5), "") == {1: 2, 2: 2}
    assert index.match(ids(9, 2, 3, 4, 5), "") == {}


def test_the_last_token_is_never_cached() -> None:
    index = index_with((1, stored(b"a", b"", [1, 2])), (1, stored(b"b", b"a", [3, 4])))
    assert index.match(ids(1, 2, 3, 4), "") == {1: 3}
    assert index.match(ids(1, 2), "") == {1: 1}
    assert index.match(ids(1), "") == {}
    assert index.match(ids(), "") == {}


def test_another_salt_is_another_tree() -> None:
    index = index_with((1, stored(b"a", b"", [1, 2], salt="tenant")), (1, stored(b"b", b"a", [3, 4], salt="tenant")))
    assert index.match(ids(1, 2, 3, 4, 5), "tenant") == {1: 4}
    assert index.match(ids(1, 2, 3, 4, 5), "") == {}


def test_a_removed_block_ends_the_run_before_it() -> None:
    index = index_with(
        (1, stored(b"a", b"", [1, 2])),
        (1, stored(b"b", b"a", [3, 4])),
        (1, stored(b"c", b"b", [5, 6])),
        (1, removed(b"b")),
    )
    assert index.match(ids(1, 2, 3, 4, 5, 6, 7), "") == {1: 2}
    index.apply(1, stored(b"b", b"a", [3, 4]))
    assert index.match(ids(1, 2, 3, 4, 5, 6, 7), "") == {1: 6}


def test_a_cleared_or_forgotten_worker_leaves_nothing_behind() -> None:
    for end in (lambda index: index.apply(1, CLEARED), lambda index: index.forget(1)):
        index = index_with((1, stored(b"a", b"", [1, 2], "s")), (1, stored(b"b", b"a", [3, 4], "s")))
        end(index)
        assert index.match(ids(1, 2, 3), "s") == {}
        drop_all(index)
        assert (len(index), index._roots, index._holdings) == (0, {}, {})


def test_events_that_do_not_fit_are_ignored() -> None:
    index = index_with(
        (1, stored(b"b", b"unknown parent", [3, 4])),
        (1, stored(b"a", b"", [1, 2, 3])),
        (1, stored(b"", b"", [1, 2])),
        (1, removed(b"never stored")),
        (2, CLEARED),
    )
    assert len(index) == 0
    assert index._roots == {}


def test_one_workers_hash_says_nothing_about_anothers() -> None:
    index = index_with((1, stored(b"a", b"", [1, 2])), (2, stored(b"b", b"a", [3, 4])), (2, removed(b"a")))
    assert index.match(ids(1, 2, 3), "") == {1: 2}


def test_a_full_index_forgets_what_was_used_least_recently() -> None:
    index = PrefixIndex(block_size=BLOCK, max_nodes=20)
    for number in range(20):
        index.apply(1, stored(bytes([number]), b"", [number, number]))
    index.match(ids(0, 0, 9), "")
    index.apply(1, stored(b"new", b"", [50, 50]))
    assert len(index) == 20
    assert index.match(ids(0, 0, 9), "") == {1: 2}
    assert index.match(ids(50, 50, 9), "") == {1: 2}
    assert index.match(ids(1, 1, 9), "") == {}
    assert index.match(ids(2, 2, 9), "") == {1: 2}


def test_a_prefix_in_use_outlives_the_last_prompt_that_went_on_from_it() -> None:
    index = index_with((1, stored(b"system", b"", [1, 1])), (1, stored(b"talk", b"system", [2, 2])), max_nodes=3)
    index.apply(1, stored(b"x", b"", [3, 3]))
    index.match(ids(1, 1, 9), "")
    for number in range(4, 6):  # two more than there is room for: the talk goes, and what was not used after it
        index.apply(1, stored(bytes([number]), b"", [number, number]))
    assert index.match(ids(1, 1, 9), "") == {1: 2}
    assert index.match(ids(3, 3, 9), "") == {}


def lines_of(call: Callable[[], object]) -> int:
    """Lines of Python that it executes; not those by which garbage of other tests ends meanwhile."""
    count, before = 0, sys.gettrace()

    def trace(frame: object, event: str, arg: object) -> object:
        nonlocal count
        count += event == "line"
        return trace

    gc.disable()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


@pytest.mark.parametrize("depth", [1, 7, 3000])
def test_no_store_in_a_full_index_takes_longer_than_another(depth: int) -> None:
    """Also where everything hangs on one old block: what goes for it goes one block at a time."""
    index, number = PrefixIndex(block_size=BLOCK, max_nodes=3000), 0

    def store() -> None:
        nonlocal number
        parent = b"system" if number % depth == 0 else number.to_bytes(4, "big")
        number += 1
        index.apply(1, stored(number.to_bytes(4, "big"), parent, [number, 0]))

    index.apply(1, stored(b"system", b"", [-1, -1]))
    while len(index) < 3000:
        store()
    assert max(lines_of(store) for _ in range(300)) < 150
    assert len(index) == 3000


def test_a_worker_that_leaves_costs_no_turn_much_and_is_found_no_more() -> None:
    """Some prompts are of 1,500 blocks, and another worker has a few of them."""
    num_blocks = 6_000
    index, names = (
        PrefixIndex(block_size=BLOCK, max_nodes=num_blocks),
        [n.to_bytes(4, "big") for n in range(num_blocks)],
    )
    parents = [b"" if number % 1_500 == 0 else names[number - 1] for number in range(num_blocks)]
    everything = [stored(names[n], parents[n], [n, n]) for n in range(num_blocks)]
    index.apply(1, *everything)
    index.apply(2, *everything[:3])
    assert index.match(ids(0, 0, 1, 1, 2, 2, 3, 3, 9), "") == {1: 8, 2: 6}
    assert lines_of(lambda: index.forget(1)) < 10
    assert index.match(ids(0, 0, 1, 1, 2, 2, 3, 3, 9), "") == {2: 6}
    index.apply(1, *everything[:2])  # it is there again, and tells what it has
    assert index.match(ids(0, 0, 1, 1, 2, 2, 3, 3, 9), "") == {1: 4, 2: 6}
    lines: list[int] = []
    while index.has_leaving:
        lines.append(lines_of(index.drop_part))
    assert len(lines) == -(-num_blocks // PART_BLOCKS)
    assert max(lines) < 80 * PART_BLOCKS
    assert len(index) == 3
    assert index.match(ids(0, 0, 1, 1, 2, 2, 3, 3, 9), "") == {1: 4, 2: 6}


def test_each_part_has_a_turn_of_its_own_and_an_index_goes_with_its_last_worker() -> None:
    turns: list[Callable[[], None]] = []
    prefixes = PrefixIndexes(max_nodes=10_000, stats=PoolStats(), soon=lambda work: work(), later=turns.append)
    model, size = SimpleNamespace(name="m"), SimpleNamespace(block_size=BLOCK)
    first, second = (SimpleNamespace(card=model, capacity=size, incarnation=n) for n in (1, 2))
    num_blocks = 3 * PART_BLOCKS
    blocks = tuple(stored(n.to_bytes(4, "big"), b"", [n, n]) for n in range(num_blocks))

    def lengths_while_turns_last() -> list[int]:
        lengths = []
        while turns:
            (work,) = turns
            turns.clear()
            work()
            lengths += [len(index) for index in prefixes._indexes.values()]
        return lengths

    prefixes.apply(first, KvEvents(epoch="e", events=blocks))  # type: ignore[arg-type]
    prefixes.apply(second, KvEvents(epoch="e", events=blocks[:1]))  # type: ignore[arg-type]
    assert turns == []
    prefixes.forget(1)
    assert prefixes.match([first, second], ids(0, 0, 9), "") == {2: 2}  # type: ignore[list-item]
    lengths = lengths_while_turns_last()
    assert lengths[:3] == [2 * PART_BLOCKS, PART_BLOCKS, 1]
    prefixes.apply(second, KvEvents(epoch="e", events=(CLEARED, *blocks)))  # type: ignore[arg-type]
    prefixes.forget(2)
    lengths = lengths_while_turns_last()
    assert [before - after for before, after in pairwise(lengths) if before != after] == [PART_BLOCKS, PART_BLOCKS, 1]
    assert (prefixes._indexes, prefixes._emptied) == ({}, [])


def test_events_wait_for_the_next_turn_unless_something_is_asked_before() -> None:
    turns: list[Callable[[], None]] = []
    prefixes = PrefixIndexes(max_nodes=100, stats=PoolStats(), soon=turns.append)
    worker = SimpleNamespace(card=SimpleNamespace(name="m"), capacity=SimpleNamespace(block_size=BLOCK), incarnation=1)

    def tell(*events: KvEvent) -> None:
        prefixes.apply(worker, KvEvents(epoch="e", events=events))  # type: ignore[arg-type]

    tell(stored(b"a", b"", [0, 0]))
    tell(stored(b"b", b"a", [1, 1]))
    assert (prefixes._indexes, len(turns)) == ({}, 1)
    turns.pop()()
    assert [len(index) for index in prefixes._indexes.values()] == [2]
    tell(removed(b"b"))
    assert prefixes.match([worker], ids(0, 0, 1, 1, 9), "") == {1: 2}  # type: ignore[list-item]
    turns.pop()()  # nothing is left for it
    assert prefixes.match([worker], ids(0, 0, 1, 1, 9), "") == {1: 2}  # type: ignore[list-item]


def test_events_that_fail_are_counted_and_the_next_ones_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[Callable[[], None]] = []
    prefixes = PrefixIndexes(max_nodes=100, stats=(stats := PoolStats()), soon=turns.append)
    model, size = SimpleNamespace(name="m"), SimpleNamespace(block_size=BLOCK)
    apply = PrefixIndex.apply

    def broken(index: PrefixIndex, incarnation: int, event: KvEvent) -> None:
        if incarnation == 1:
            raise RuntimeError("a defect")
        apply(index, incarnation, event)

    monkeypatch.setattr(PrefixIndex, "apply", broken)
    for incarnation in (1, 2):
        worker = SimpleNamespace(card=model, capacity=size, incarnation=incarnation)
        prefixes.apply(worker, KvEvents(epoch="e", events=(stored(b"a", b"", [0, 0]),)))  # type: ignore[arg-type]
    turns.pop()()
    assert prefixes.match([worker], ids(0, 0, 9), "") == {2: 2}  # type: ignore[list-item]
    assert stats.protocol_errors == {"internal": 1}


def test_a_worker_that_stores_without_end_does_not_grow_the_index() -> None:
    index = PrefixIndex(block_size=BLOCK, max_nodes=50)
    parent = b""
    for number in range(2_000):
        name = number.to_bytes(4, "big")
        index.apply(1, stored(name, parent, [number % 7, number % 3]))
        parent = name if number % 10 else b""
    assert len(index) <= 50
    assert sum(len(each.node_of) for each in index._holdings.values()) <= 50


class Reference:
    """A worker's cache as it is: prefixes by their hash, each with its parent's."""

    def __init__(self) -> None:
        self.prefixes: dict[bytes, tuple[str, tuple[int, ...]]] = {}

    def longest(self, prompt: tuple[int, ...], salt: str) -> int:
        cached = set(self.prefixes.values())
        length = 0
        while length + BLOCK <= len(prompt) and (salt, prompt[: length + BLOCK]) in cached:
            length += BLOCK
        return min(length, max(len(prompt) - 1, 0))


prompts = st.lists(st.integers(0, 1), max_size=9).map(tuple)
operations = st.lists(
    st.tuples(st.integers(1, 3), st.sampled_from(["store", "remove", "clear"]), prompts, st.sampled_from(["", "s"])),
    max_size=40,
)


@given(operations, prompts, st.sampled_from(["", "s"]))
@settings(max_examples=200)
def test_it_matches_as_the_plain_reference_does(
    history: list[tuple[int, str, tuple[int, ...], str]], prompt: tuple[int, ...], salt: str
) -> None:
    index, references = PrefixIndex(block_size=BLOCK, max_nodes=10_000), {number: Reference() for number in (1, 2, 3)}
    for worker, kind, tokens, its_salt in history:
        reference = references[worker]
        if kind == "clear":
            index.apply(worker, CLEARED)
            reference.prefixes.clear()
        elif kind == "remove":
            # Tails go before heads, as in the block manager; what is left is closed under prefixes.
            for block_hash, (_, prefix) in sorted(reference.prefixes.items(), key=lambda item: -len(item[1][1]))[:1]:
                assert prefix
                index.apply(worker, removed(block_hash))
                del reference.prefixes[block_hash]
        else:
            parent = b""
            for end in range(BLOCK, len(tokens) + 1, BLOCK):
                block_hash = repr((worker, its_salt, tokens[:end])).encode()
                if block_hash not in reference.prefixes:
                    index.apply(worker, stored(block_hash, parent, tokens[end - BLOCK : end], its_salt))
                    reference.prefixes[block_hash] = (its_salt, tokens[:end])
                parent = block_hash
    expected = {worker: reference.longest(prompt, salt) for worker, reference in references.items()}
    assert index.match(ids(*prompt), salt) == {worker: tokens for worker, tokens in expected.items() if tokens}
    drop_all(index)
    assert len(index) == len({prefix for reference in references.values() for prefix in reference.prefixes.values()})


def test_no_block_is_an_object_that_the_garbage_collector_walks() -> None:
    """It stopped a gateway for half a second where it held 700,000 blocks."""
    index = PrefixIndex(block_size=BLOCK, max_nodes=100_000)
    index.apply(1, stored(b"first", b"", [0, 0]))
    gc.collect()
    before, parent = len(gc.get_objects()), b""
    for number in range(5_000):
        name = number.to_bytes(4, "big")
        for worker in (1, 2):
            index.apply(worker, stored(name, parent, [number, number]))
        parent = name if number % 50 else b""
    gc.collect()
    assert len(index) == 5_000
    assert len(gc.get_objects()) - before < 500


def test_what_changes_while_the_blocks_are_walked_is_told_once_or_not_at_all_and_never_as_anothers() -> None:
    index = index_with(*((1, stored(bytes([number]), b"", [number, 1], "s")) for number in range(1, 9)))
    walk = index.blocks("s")
    told = [next(walk)]
    for number in range(1, 9):
        index.apply(1, removed(bytes([number])))
    for number in range(1, 9):  # in the rows of those that went
        index.apply(1, stored(bytes([number]), b"", [number, 2], "other"))
    told += walk
    assert [np.frombuffer(each.token_ids, np.int32)[1] for each in told] == [1]
    assert len({each.block_id for each in index.blocks("other")} - {each.block_id for each in told}) == 8


def large_tables(found: object) -> list[int]:
    """Entries of the dicts and sets that it holds, of those with more than 1,024."""
    tables, seen, waiting = list[int](), set[int](), [found]
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, type):
            continue
        seen.add(id(each))
        if isinstance(each, dict | set) and len(each) > 1_024:
            tables.append(len(each))
        waiting += gc.get_referents(each)
    return tables


@pytest.mark.parametrize("num_below_one", [1, 128])
def test_a_store_moves_one_large_table_at_most(num_below_one: int) -> None:
    """A dict moves all that it holds when it grows. Five of 175,000 entries did that in the same store: no caller of
    any gateway got a token for 30 to 70 ms. What is left are a worker's names for its blocks."""
    index, parent, rng = PrefixIndex(block_size=BLOCK, max_nodes=30_000), b"", np.random.default_rng(0)
    for number in range(40_000):  # more than it holds
        name, tokens = rng.bytes(16), rng.integers(0, 6_000, 2).tolist()
        index.apply(1, stored(name, parent if number % num_below_one else b"", tokens))
        parent = name
    assert large_tables(index) == [30_000]
