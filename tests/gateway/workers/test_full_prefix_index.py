"""A prefix index that is always too small, beside a twin in the plainest way."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from octavo.gateway.workers import prefix_index
from octavo.gateway.workers.prefix_index import PrefixIndex
from octavo.gateway.workers.prefix_tree import PrefixTree
from tests.support.gateway.kv_events import BLOCK, ids, removed, stored

Path = tuple[str | int, ...]  # a salt, then a number for each block


class Twin:
    """An index in the plainest way: every prefix that some worker has or that others go on from, with its workers; the
    leaf of the lowest rank goes first. A leaf gets the highest rank when it is used, and the lowest where it is left
    over and no prompt used it after what followed it."""

    def __init__(self, max_nodes: int) -> None:
        self.max_nodes = max_nodes
        self.owners: dict[Path, set[int]] = {}
        self.used: dict[Path, int] = {}
        self.rank: dict[Path, int] = {}
        self.stored: dict[int, list[Path]] = {1: [], 2: []}
        self.ghosts: list[int] = []
        self.time = 0

    def leaves(self) -> list[Path]:
        parents = {path[:-1] for path in self.owners}
        return [path for path in self.owners if path not in parents]

    def use(self, path: Path) -> list[Path]:
        self.time += 1
        prefixes = [path[:end] for end in range(2, len(path) + 1)]
        known = list(itertools.takewhile(lambda each: each in self.owners, prefixes))
        for each in known:
            self.used[each] = self.time
        if known and known[-1] in self.leaves():
            self.rank[known[-1]] = self.time
        return known

    def store(self, worker: int, path: Path) -> None:
        if len(path) > 2 and worker not in self.owners.get(path[:-1], ()):
            return
        if worker not in self.owners.setdefault(path, set()):
            self.owners[path].add(worker)
            self.stored[worker].append(path)
        self.time += 1
        self.used[path] = self.time
        if path in self.leaves():
            self.rank[path] = self.time
        while len(self.owners) > self.max_nodes:
            oldest = min(self.leaves(), key=lambda each: self.rank[each])
            for each in sorted(self.owners[oldest], key=lambda each: each != worker):
                self.remove(each, oldest)

    def remove(self, worker: int, path: Path) -> None:
        if worker not in self.owners.get(path, ()):
            return
        self.owners[path].discard(worker)
        self.stored[worker].remove(path)
        while path in self.leaves() and not self.owners[path]:
            del self.owners[path]
            parent = path[:-1]
            if parent in self.leaves():
                lowest = min((self.rank[each] for each in self.leaves() if each != parent), default=0) - 1
                self.time += 1
                self.rank[parent] = lowest if self.used[parent] <= self.used[path] else self.time
            path = parent

    def forget(self, worker: int) -> None:
        """What it has is a ghost's from now on, which no prompt finds."""
        ghost = min((0, *self.stored)) - 1
        self.ghosts.append(ghost)
        self.stored[ghost], self.stored[worker] = self.stored[worker], []
        for path in self.stored[ghost]:
            self.owners[path] ^= {worker, ghost}

    def drop(self) -> None:
        """The last of the first ghost."""
        is_done = False
        while self.ghosts and not is_done:
            left = self.stored[self.ghosts[0]]
            if left:
                self.remove(self.ghosts[0], left[-1])
                is_done = True
            if not left:
                self.ghosts.pop(0)


workers, salts = st.sampled_from([1, 2]), st.sampled_from(["", "s"])


def queue(tree: PrefixTree) -> Iterator[int]:
    """The leaves as they stand in it."""
    leaf = tree.oldest_leaf
    while leaf:
        yield leaf
        leaf = tree._newer[leaf]


class FullIndexes(RuleBasedStateMachine):
    """An index that is always too small, beside its twin."""

    def __init__(self) -> None:
        super().__init__()
        self.index, self.twin = PrefixIndex(block_size=BLOCK, max_nodes=6), Twin(6)

    @rule(
        worker=st.sampled_from([1, 2]), salt=st.sampled_from(["", "s"]), blocks=st.lists(st.integers(0, 2), max_size=5)
    )
    def store(self, worker: int, salt: str, blocks: list[int]) -> None:
        for end in range(1, len(blocks) + 1):
            path = (salt, *blocks[:end])
            parent = repr((worker, path[:-1])).encode() if end > 1 else b""
            token = blocks[end - 1]
            self.index.apply(worker, stored(repr((worker, path)).encode(), parent, [token, token], salt))
            self.twin.store(worker, path)

    @rule(worker=workers, number=st.integers(0, 20))
    def remove(self, worker: int, number: int) -> None:
        if known := sorted(self.twin.stored[worker], key=repr):
            path = known[number % len(known)]
            self.index.apply(worker, removed(repr((worker, path)).encode()))
            self.twin.remove(worker, path)

    @rule(worker=workers)
    def forget(self, worker: int) -> None:
        if worker in self.index._holdings:
            self.index.forget(worker)
            self.twin.forget(worker)

    @rule()
    def drop(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prefix_index, "PART_BLOCKS", 1)
            self.index.drop_part()
        self.twin.drop()

    @rule(salt=salts, blocks=st.lists(st.integers(0, 2), max_size=6))
    def match(self, salt: str, blocks: list[int]) -> None:
        found = self.index.match(ids(*(token for block in blocks for token in (block, block)), 9), salt)
        held = dict.fromkeys((1, 2), 0)
        for depth, path in enumerate(self.twin.use((salt, *blocks))):
            for worker in self.twin.owners[path] - {*self.twin.ghosts}:
                held[worker] += BLOCK if held[worker] == BLOCK * depth else 0
        assert found == {worker: tokens for worker, tokens in held.items() if tokens}

    @invariant()
    def both_know_the_same(self) -> None:
        tree = self.index._tree
        holdings = self.index._holdings | dict(zip(self.twin.ghosts, self.index._leaving, strict=True))
        known: dict[Path, set[int]] = {}
        waiting: list[tuple[Path, int]] = [((salt,), root) for salt, root in self.index._roots.items()]
        for path, node in waiting:  # grows while it is walked
            for child in tree.children(node):
                below = (*path, int(np.frombuffer(tree.key_of[child], np.int32)[0]))
                known[below] = {worker for worker, held in holdings.items() if held.hash_of.get(child)}
                assert tree.num_owners[child] == len(known[below])
                waiting.append((below, child))
        assert known == self.twin.owners
        assert len(self.index) == len(known) <= 6
        leaves = {node for _, node in waiting if tree.parent[node] and not tree.num_children[node]}
        assert set(queue(tree)) == leaves
        assert sum(len(each.node_of) for each in holdings.values()) == sum(map(len, self.twin.owners.values()))


TestFullIndexes = FullIndexes.TestCase
TestFullIndexes.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
