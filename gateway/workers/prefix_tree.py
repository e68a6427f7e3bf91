"""The tree under the index of prefixes: nodes are rows of arrays.

A gateway holds hundreds of thousands of nodes. As objects with dicts of their own they were three objects each that
Python's collector walks: half a second for 700,000 nodes, in which no caller gets a token. Arrays, and dicts of numbers
and bytes, it does not walk. But for one a worker no dict is large either: one that grows moves all that it holds, and
those that hold something for every node grew together.

Must not know: workers, events, what keys mean.
"""

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count

NOBODY = 0
"""No node has this row."""
_block_ids = count(1)  # of all trees, so that a feed may have blocks of several
_ROW_BYTES = 8
_PART_BITS = 10
_ROWS_AT_ONCE = 1 << _PART_BITS
_NUM_PARTS = 256
BYTES_A_NODE = 600
"""About, of blocks of 16 tokens with one owner: arrays, dicts, and what these hold."""


class ByRow:
    """Byte strings by row, in one dict per 1,024 rows."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: list[dict[int, bytes]] = []

    def __getitem__(self, row: int) -> bytes:
        return self._parts[row >> _PART_BITS][row]

    def get(self, row: int) -> bytes | None:
        """The bytes of a row, or None."""
        part = row >> _PART_BITS
        return self._parts[part].get(row) if part < len(self._parts) else None

    def put(self, row: int, value: bytes) -> None:
        """Add or replace."""
        while row >> _PART_BITS >= len(self._parts):
            self._parts.append({})
        self._parts[row >> _PART_BITS][row] = value

    def pop(self, row: int) -> bytes:
        """Remove and return the bytes of a row, which must have some."""
        return self._parts[row >> _PART_BITS].pop(row)


class Holding:
    """What one worker has: nodes by its hashes, hashes by node, and which nodes are in host memory."""

    __slots__ = ("hash_of", "node_of", "on_host")

    def __init__(self) -> None:
        self.node_of, self.hash_of, self.on_host = dict[bytes, int](), ByRow(), set[int]()


class PrefixTree:
    """Nodes below roots, each found by its parent and its key. Leaves are queued, least recently used first. Columns,
    by row: parent (NOBODY for a root), num_children, block_id (never reused; 0 if none), and counts for the tree's
    owner. key_of: of every node but roots."""

    def __init__(self) -> None:
        self.key_of = ByRow()
        self._salt_of: dict[int, str] = {}  # of roots
        self._num_nodes = 0
        self.parent, self.num_children, self.block_id = array("q", [0]), array("q", [0]), array("q", [0])
        self.num_owners, self.num_on_host = array("q", [0]), array("q", [0])
        self._first_child, self._before, self._behind = array("q", [0]), array("q", [0]), array("q", [0])
        self._older, self._newer = array("q", [0]), array("q", [0])  # a ring: row 0 lies between newest and oldest
        self._used, self._num_uses = array("q", [0]), 0  # which touch was the last of this node
        self._root = array("q", [0])  # above it
        self._children: list[dict[bytes, int]] = [{} for _ in range(_NUM_PARTS)]  # by `_part`
        self._free = array("q")
        self._num_rows = 1
        self._columns = (
            self.parent, self.num_children, self.block_id, self.num_owners, self.num_on_host, self._first_child,
            self._before, self._behind, self._older, self._newer, self._used, self._root,
        )  # fmt: skip

    def __len__(self) -> int:
        """Number of nodes, roots not counted."""
        return self._num_nodes

    @property
    def parts(self) -> list[object]:
        """Its large containers."""
        return [*self._columns, self.key_of, self._children, self._free]

    @property
    def oldest_leaf(self) -> int:
        """The least recently used leaf; NOBODY if there is none."""
        return self._newer[NOBODY]

    def salt_of(self, node: int) -> str:
        """The salt of the root above the node."""
        return self._salt_of[self._root[node]]

    def add_root(self, salt: str) -> int:
        """Roots have no key and no age."""
        node = self._free.pop() if self._free else self._new_row()
        self.block_id[node], self._root[node], self._salt_of[node] = next(_block_ids), node, salt
        return node

    def put(self, parent: int, key: bytes) -> int:
        """The child with this key, created and marked as just used if missing. Called for every block that a worker
        stores, so it calls little itself."""
        path, part = parent.to_bytes(_ROW_BYTES, "little") + key, self._children[_part(parent, key)]
        node = part.get(path)
        if node is not None:
            self.touch((node,))
            return node
        node = self._free.pop() if self._free else self._new_row()
        self.block_id[node] = next(_block_ids)
        older, newer, newest = self._older, self._newer, self._older[NOBODY]
        first = self._first_child[parent]
        if first:
            last = self._before[first]
            self._behind[last] = self._before[first] = node
            self._before[node] = last
        else:
            self._first_child[parent] = self._before[node] = node
            if parent == newest:  # the child takes its place, as in most prompts
                newest = older[parent]
            elif self.parent[parent]:
                before, behind = older[parent], newer[parent]
                newer[before], older[behind] = behind, before
        newer[newest] = older[NOBODY] = node
        older[node], newer[node] = newest, NOBODY
        self.parent[node] = parent
        self.num_children[parent] += 1
        self._num_nodes += 1
        self._root[node] = self._root[parent]
        self.key_of.put(node, key)
        part[path] = node
        self._num_uses += 1
        self._used[node] = self._num_uses
        return node

    def remove(self, node: int) -> None:
        """Remove a node or root without children. Called for every block that nobody has any more, like `put`."""
        parent, before = self.parent[node], self._before
        if parent:
            key = self.key_of.pop(node)
            del self._children[_part(parent, key)][parent.to_bytes(_ROW_BYTES, "little") + key]
            self._num_nodes -= 1
            last, behind = before[node], self._behind[node]
            if last == node:  # the only one
                self._first_child[parent] = NOBODY
            elif node == self._first_child[parent]:
                self._first_child[parent] = behind
                before[behind] = last
            else:
                self._behind[last] = behind
                before[behind or self._first_child[parent]] = last  # of the first it is the last
            left = self.num_children[parent] = self.num_children[parent] - 1
            older, newer = self._older[node], self._newer[node]
            self._newer[older], self._older[newer] = newer, older
            if not left and self.parent[parent]:
                # Unless it was used after its last child, it goes next, as the rest of a prefix whose end has gone.
                is_next = self._used[parent] <= self._used[node]
                self._enter_ring(parent, newer=self.oldest_leaf if is_next else NOBODY)
            self.parent[node] = before[node] = self._behind[node] = 0
        else:
            del self._salt_of[node]
        self.block_id[node] = self.num_owners[node] = self.num_on_host[node] = 0
        self._free.append(node)

    def walk(self, root: int, keys: bytes, width: int) -> list[int]:
        """The nodes from a root down, as far as there are children with these keys of `width` bytes each."""
        path: list[int] = []
        node = root
        for start in range(0, len(keys) - width + 1, width):
            key = keys[start : start + width]
            node = self._children[_part(node, key)].get(node.to_bytes(_ROW_BYTES, "little") + key, NOBODY)
            if not node:
                break
            path.append(node)
        return path

    def prune(self, node: int) -> bool:
        """Remove the node and its ancestors while they have neither owners nor children. Returns whether the root went
        too."""
        while not self.num_owners[node] and not self.num_children[node] and self.parent[node]:
            parent = self.parent[node]
            self.remove(node)
            if not self.parent[parent] and not self.num_children[parent]:
                self.remove(parent)
                return True
            node = parent
        return False

    def below(self, root: int) -> Iterator[int]:
        """All nodes, parents first. Concurrent changes may or may not be included."""
        waiting = deque((node, self.block_id[node]) for node in self.children(root))
        while waiting:
            node, block_id = waiting.popleft()
            if self.block_id[node] == block_id:  # else gone meanwhile, and its row perhaps another's
                waiting.extend((child, self.block_id[child]) for child in self.children(node))
                yield node

    def children(self, node: int) -> Iterator[int]:
        """In insertion order. The tree must not change meanwhile."""
        child = self._first_child[node]
        while child:
            yield child
            child = self._behind[child]

    def touch(self, path: Sequence[int]) -> None:
        """Mark a path of nodes, each the parent of the next, as just used."""
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

    def _new_row(self) -> int:
        node = self._num_rows
        if node == len(self.parent):
            for column in self._columns:
                column.frombytes(bytes(_ROWS_AT_ONCE * column.itemsize))
        self._num_rows += 1
        return node


def _part(parent: int, key: bytes) -> int:
    """The part of the children dicts for this key. Consecutive rows share one; a root's children do not, so that no two
    parts grow at once."""
    return (parent >> _PART_BITS ^ key[0]) & _NUM_PARTS - 1
