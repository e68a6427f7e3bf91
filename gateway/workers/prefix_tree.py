"""The tree under the index of prefixes: nodes are rows of arrays.

A gateway holds hundreds of thousands of nodes. As objects with dicts of their own they were three objects each that
Python's collector walks: half a second for 700,000 nodes, in which no caller gets a token. Arrays, and dicts of numbers
and bytes, it does not walk.

Must not know: workers, events, what keys mean.
"""

from array import array
from collections.abc import Iterator, Sequence
from itertools import count

NOBODY = 0
"""No node has this row."""
_block_ids = count(1)  # of all trees, so that a feed may have blocks of several
_ROW_BYTES = 8
_ROWS_AT_ONCE = 1024


class PrefixTree:
    """Nodes below roots, each found by its parent and its key. Those without children stand in a queue, touched least
    recently first. Columns, by row: parent (NOBODY for a root), num_children, block_id (one that no other node ever
    had; 0 where there is none), and counts for whoever owns the tree. key_of, salt_of: of every node but roots."""

    def __init__(self) -> None:
        self.key_of: dict[int, bytes] = {}
        self.salt_of: dict[int, str] = {}
        self.parent, self.num_children, self.block_id = array("q", [0]), array("q", [0]), array("q", [0])
        self.num_owners, self.num_on_host = array("q", [0]), array("q", [0])
        self._first_child, self._before, self._behind = array("q", [0]), array("q", [0]), array("q", [0])
        self._older, self._newer = array("q", [0]), array("q", [0])  # a ring: row 0 lies between newest and oldest
        self._used, self._num_uses = array("q", [0]), 0  # which touch was the last of this node
        self._child: dict[bytes, int] = {}
        self._free = array("q")
        self._num_rows = 1
        self._columns = (
            self.parent, self.num_children, self.block_id, self.num_owners, self.num_on_host, self._first_child,
            self._before, self._behind, self._older, self._newer, self._used,
        )  # fmt: skip

    def __len__(self) -> int:
        """Nodes without roots."""
        return len(self.key_of)

    @property
    def oldest_leaf(self) -> int:
        """The next to go; NOBODY where there is none."""
        return self._newer[NOBODY]

    def add_root(self) -> int:
        """It has no key and no age."""
        return self._take_row()

    def add(self, parent: int, key: bytes, salt: str) -> int:
        """A new node."""
        node = self._take_row()
        if self.parent[parent] and not self.num_children[parent]:
            self._leave_ring(parent)
        self.parent[node] = parent
        self.key_of[node], self.salt_of[node] = key, salt
        self._child[_path(parent, key)] = node
        first = self._first_child[parent]
        if first:
            last = self._before[first]
            self._behind[last], self._before[node], self._before[first] = node, last, node
        else:
            self._first_child[parent] = self._before[node] = node
        self.num_children[parent] += 1
        self._enter_ring(node, newer=NOBODY)
        return node

    def remove(self, node: int) -> None:
        """A node or root without children."""
        parent = self.parent[node]
        if parent:
            del self._child[_path(parent, self.key_of.pop(node))], self.salt_of[node]
            first, before, behind = self._first_child[parent], self._before[node], self._behind[node]
            if node == first:
                self._first_child[parent] = behind
            else:
                self._behind[before] = behind
            self._before[behind or first] = before  # of the first it is the last
            self.num_children[parent] -= 1
            self._leave_ring(node)
            if self.parent[parent] and not self.num_children[parent]:
                # Unless it was used after its last child, it goes next, as the rest of a prefix whose end has gone.
                is_next = self._used[parent] <= self._used[node]
                self._enter_ring(parent, newer=self.oldest_leaf if is_next else NOBODY)
        self.block_id[node] = self.parent[node] = self._before[node] = self._behind[node] = self._used[node] = 0
        self.num_owners[node] = self.num_on_host[node] = 0
        self._free.append(node)

    def find(self, parent: int, key: bytes) -> int:
        """The child with this key, or NOBODY."""
        return self._child.get(_path(parent, key), NOBODY)

    def children(self, node: int) -> Iterator[int]:
        """In the order in which they were added. The tree must not change meanwhile."""
        child = self._first_child[node]
        while child:
            yield child
            child = self._behind[child]

    def touch(self, path: Sequence[int]) -> None:
        """A node after the other was used, each the parent of the next."""
        self._num_uses += 1
        for node in path:
            self._used[node] = self._num_uses
        if path and not self.num_children[path[-1]]:
            self._leave_ring(path[-1])
            self._enter_ring(path[-1], newer=NOBODY)

    def _leave_ring(self, node: int) -> None:
        older, newer = self._older[node], self._newer[node]
        self._newer[older], self._older[newer] = newer, older

    def _enter_ring(self, node: int, *, newer: int) -> None:
        older = self._older[newer]
        self._older[node], self._newer[node] = older, newer
        self._newer[older] = self._older[newer] = node

    def _take_row(self) -> int:
        if self._free:
            node = self._free.pop()
        else:
            node = self._num_rows
            if node == len(self.parent):
                for column in self._columns:
                    column.frombytes(bytes(_ROWS_AT_ONCE * column.itemsize))
            self._num_rows += 1
        self.block_id[node] = next(_block_ids)
        return node


def _path(parent: int, key: bytes) -> bytes:
    return parent.to_bytes(_ROW_BYTES, "little") + key
