"""The prefix index against an obvious reference: per worker, a plain list of cached (salt, tokens) prefixes."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.gateway.workers.router import PrefixIndex
from octavo.wire.messages import KvEvent, KvEventKind

BLOCK = 2


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def stored(block_hash: bytes, parent: bytes, tokens: Sequence[int], salt: str = "") -> KvEvent:
    return KvEvent(
        kind=KvEventKind.STORED,
        block_hash=block_hash,
        parent_hash=parent,
        token_ids=ids(*tokens).tobytes(),
        salt=salt,
    )


def removed(block_hash: bytes) -> KvEvent:
    return KvEvent(kind=KvEventKind.REMOVED, block_hash=block_hash)


CLEARED = KvEvent(kind=KvEventKind.CLEARED)


def index_with(*events: tuple[int, KvEvent], max_nodes: int = 100) -> PrefixIndex:
    index = PrefixIndex(block_size=BLOCK, max_nodes=max_nodes)
    for incarnation, event in events:
        index.apply(incarnation, event)
    return index


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
        assert (len(index), index._roots, index._by_hash) == (0, {}, {})


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
    assert len(index) == 19
    assert index.match(ids(0, 0, 9), "") == {1: 2}
    assert index.match(ids(50, 50, 9), "") == {1: 2}
    assert index.match(ids(1, 1, 9), "") == {}


def test_a_worker_that_stores_without_end_does_not_grow_the_index() -> None:
    index = PrefixIndex(block_size=BLOCK, max_nodes=50)
    parent = b""
    for number in range(2_000):
        name = number.to_bytes(4, "big")
        index.apply(1, stored(name, parent, [number % 7, number % 3]))
        parent = name if number % 10 else b""
    assert len(index) <= 50
    assert sum(map(len, index._by_hash.values())) <= 50


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
    assert len(index) == len({prefix for reference in references.values() for prefix in reference.prefixes.values()})
