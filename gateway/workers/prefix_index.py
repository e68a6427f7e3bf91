"""What the workers have cached, by their KV events: how much of a prompt each of them has.

A tree over blocks of tokens, where a child is found by (parent node, tokens) and a root by the salt. Workers name their
blocks by keyed hashes that mean nothing elsewhere; they only serve to find the node again. The tree is a hint: what it
has forgotten costs a recomputation, never a wrong token. Bounded: beyond ``max_nodes`` the end of the least recently
used prefix is dropped. A worker that is gone matches nothing, and its blocks are dropped part by part, over several
turns of the event loop. Pure but for these turns; must not know sockets, nor how workers are chosen.
"""

import asyncio
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

import numpy as np
import structlog

from octavo.gateway.workers.events import BlockChange, BlockFeed, BlockSubscription, ChangeKind
from octavo.gateway.workers.prefix_tree import BYTES_A_NODE, NOBODY, Holding, PrefixTree
from octavo.gateway.workers.registry import WorkerRecord
from octavo.gateway.workers.stats import PoolStats
from octavo.wire.messages import KvEvent, KvEventKind, KvEvents, KvTier

log = structlog.get_logger(__name__)
_TOKEN_BYTES = np.dtype(np.int32).itemsize
PART_BLOCKS = 512  # of a worker that is gone, dropped in one turn of the loop: one or two milliseconds
PAUSE_S = 0.002  # between two such turns
# Looking up an enum member takes longer than comparing it, and these are used for each block.
_STORED, _CLEARED, _DEVICE, _HOST = KvEventKind.STORED, KvEventKind.CLEARED, KvTier.DEVICE, KvTier.HOST


class Match(dict[int, int]):
    """Cached tokens by worker incarnation; only workers with a hit. num_branches: in how many ways other prompts
    continued after the longest prefix."""

    num_branches = 0


class PrefixIndex:
    """Prefixes of one model, in blocks of one size. feed: told of each block when its first owner stores it and when
    its last one drops it."""

    def __init__(self, *, block_size: int, max_nodes: int, feed: BlockFeed | None = None) -> None:
        self.block_size = block_size
        self._feed = feed
        self._num_owned: Counter[str] = Counter()  # nodes with owners, by salt
        self._max_nodes = max_nodes
        self._tree = PrefixTree()
        self._roots: dict[str, int] = {}  # by salt; not counted, gone with their last child
        self._holdings: dict[int, Holding] = {}  # by worker incarnation
        self._leaving: deque[Holding] = deque()  # of workers that are gone: still counted, never matched
        self._block_bytes = block_size * _TOKEN_BYTES

    def __len__(self) -> int:
        return len(self._tree)

    @property
    def parts(self) -> list[object]:
        """Its large containers."""
        return self._tree.parts

    def match(self, token_ids_T: np.ndarray, salt: str) -> Match:
        """At most len - 1 cached tokens (the last token is always computed). token_ids_T: int32."""
        root, keys = self._roots.get(salt, NOBODY), np.ascontiguousarray(token_ids_T, np.int32).tobytes()
        path = self._tree.walk(root, keys, self._block_bytes) if root and len(keys) >= self._block_bytes else []
        matched, holders = Match(), self._holdings
        for depth, node in enumerate(path, start=1):
            holders = {incarnation: each for incarnation, each in holders.items() if each.hash_of.get(node)}
            if not holders:
                break
            for incarnation in holders:
                matched[incarnation] = depth * self.block_size
        if path:
            self._tree.touch(path)
            matched.num_branches = self._tree.num_children[path[-1]]
        longest = max(len(token_ids_T) - 1, 0)
        matched.update({incarnation: min(tokens, longest) for incarnation, tokens in matched.items()})
        return matched

    def apply(self, incarnation: int, *events: KvEvent) -> None:
        """Apply a worker's events. Events that do not fit (unknown parent, wrong block size) are ignored."""
        holding = self._holdings.get(incarnation)
        for event in events:
            if event.kind is _STORED:
                if holding is None:
                    holding = self._holdings[incarnation] = Holding()
                self._store(holding, event)
            elif event.kind is _CLEARED:
                self.forget(incarnation)
                holding = None
            elif holding is not None:
                node = holding.node_of.pop(event.block_hash, NOBODY)
                if node:
                    self._disown(holding, node)
        if holding is not None and not holding.node_of:
            del self._holdings[incarnation]

    def forget(self, incarnation: int) -> None:
        """The worker's cache is empty, or the worker is gone: it matches nothing now, and `drop_part` drops its
        blocks."""
        if (holding := self._holdings.pop(incarnation, None)) is not None:
            self._leaving.append(holding)

    @property
    def has_leaving(self) -> bool:
        """Whether `drop_part` has anything to do."""
        return bool(self._leaving)

    def drop_part(self) -> list[object]:
        """Drop some blocks of workers that are gone. Returns large containers that are now empty. The last stored
        blocks go first: they are leaves, which no other block depends on."""
        num_left, emptied = PART_BLOCKS, list[object]()
        while self._leaving and num_left:
            holding = self._leaving[0]
            while holding.node_of and num_left:
                self._disown(holding, holding.node_of.popitem()[1])
                num_left -= 1
            if not holding.node_of:
                emptied += [self._leaving.popleft().node_of, holding.hash_of]
        return emptied

    def num_blocks(self, salt: str) -> int:
        """Blocks of this salt that some worker has."""
        return self._num_owned[salt]

    def blocks(self, salt: str) -> Iterator[BlockChange]:
        """STORED for every block of this salt that some worker has, parents first. Concurrent changes may or may not be
        included."""
        tree, root = self._tree, self._roots.get(salt)
        return (self._stored(node) for node in (tree.below(root) if root else ()) if tree.num_owners[node])

    # ------------------------------------------------------------ parts

    def _store(self, holding: Holding, event: KvEvent) -> None:
        """Called for every block that a worker stores, so rare cases are in functions of their own."""
        name, key, tree = event.block_hash, event.token_ids, self._tree
        if len(key) != self._block_bytes or not name:
            return
        node_of, hash_of = holding.node_of, holding.hash_of
        if name in node_of:
            if self._store_again(holding, event):
                return
            self._disown(holding, node_of.pop(name))
        if event.parent_hash:
            parent = node_of.get(event.parent_hash)
            if parent is None:
                return
        else:
            parent = self._roots.get(event.salt, NOBODY)
            if not parent:
                parent = self._roots[event.salt] = tree.add_root(event.salt)
        node = tree.put(parent, key)
        num_owners = tree.num_owners[node]
        if (former := hash_of.get(node)) is not None:  # by another name until now
            former_tier = self._tier(node)
            del node_of[former]
        else:
            former_tier = self._tier(node) if num_owners else _DEVICE
            tree.num_owners[node] = num_owners + 1
        hash_of.put(node, name)
        node_of[name] = node
        if event.tier is _HOST or node in holding.on_host:
            self._place(node, holding, event.tier)
        if num_owners:
            self._publish_tier_change(node, former_tier)
        else:
            salt = tree.salt_of(node)
            self._num_owned[salt] += 1
            if self._feed is not None and self._feed.is_followed:
                self._feed.publish(salt, self._stored(node))
        while len(tree) > self._max_nodes:
            oldest = tree.oldest_leaf
            for owner in [each for each in (*self._holdings.values(), *self._leaving) if each.hash_of.get(oldest)]:
                self._disown(owner, owner.node_of.pop(owner.hash_of[oldest]))

    def _store_again(self, holding: Holding, event: KvEvent) -> bool:
        """A block under a known hash. Returns whether it is the same block, perhaps on another tier."""
        known = holding.node_of[event.block_hash]
        parent = holding.node_of.get(event.parent_hash) if event.parent_hash else self._roots.get(event.salt)
        if self._tree.key_of[known] != event.token_ids or self._tree.parent[known] != parent:
            return False
        former_tier = self._tier(known)
        self._place(known, holding, event.tier)
        self._publish_tier_change(known, former_tier)
        self._tree.touch((known,))
        return True

    def _tier(self, node: int) -> KvTier:
        on_host = self._tree.num_on_host[node]
        return _HOST if on_host and on_host == self._tree.num_owners[node] else _DEVICE

    def _place(self, node: int, holding: Holding, tier: KvTier) -> None:
        is_on_host = tier is _HOST
        if is_on_host != (node in holding.on_host):
            holding.on_host ^= {node}
            self._tree.num_on_host[node] += 1 if is_on_host else -1

    def _publish_tier_change(self, node: int, former: KvTier) -> None:
        """Remove, then store: subscribers that ignore tiers end up with the block."""
        if self._feed is None or not self._feed.is_followed or self._tier(node) is former:
            return
        salt, block_id = self._tree.salt_of(node), self._tree.block_id[node]
        self._feed.publish(salt, BlockChange(kind=ChangeKind.REMOVED, block_id=block_id, tier=former))
        self._feed.publish(salt, self._stored(node))

    def _disown(self, holding: Holding, node: int) -> None:
        """A node that this worker had and no longer has a hash for."""
        tree, former = self._tree, self._tier(node)
        if holding.on_host:
            self._place(node, holding, _DEVICE)
        holding.hash_of.pop(node)
        num_owners = tree.num_owners[node] = tree.num_owners[node] - 1
        if num_owners:
            self._publish_tier_change(node, former)
            return
        salt = tree.salt_of(node)
        self._num_owned[salt] -= 1
        if not self._num_owned[salt]:
            del self._num_owned[salt]
        if self._feed is not None and self._feed.is_followed:
            self._feed.publish(salt, BlockChange(kind=ChangeKind.REMOVED, block_id=tree.block_id[node], tier=former))
        if not tree.num_children[node] and tree.prune(node):
            del self._roots[salt]

    def _stored(self, node: int) -> BlockChange:
        tree, parent = self._tree, self._tree.parent[node]
        return BlockChange(
            kind=ChangeKind.STORED,
            block_id=tree.block_id[node],
            parent_id=tree.block_id[parent] if tree.parent[parent] else None,  # a root is no block
            token_ids=tree.key_of[node],
            tier=self._tier(node),
        )


def _in_the_next_turn(work: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_soon(work)


def _after_a_pause(work: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(PAUSE_S, work)


class PrefixIndexes:
    """All indexes, one per model name and block size, and one feed of changes per model.

    Each index is bounded by ``max_nodes`` and goes with its last worker; feeds stay. Events come right behind the
    tokens of their step, for which callers wait: they are applied in the next turn of the loop, after those are on
    their way, or as soon as anything is asked. now_us: see `BlockFeed`. soon(work), later(work): run work in the next
    turn of the loop, or in a later one.
    """

    def __init__(
        self,
        *,
        max_nodes: int,
        stats: PoolStats,
        now_us: Callable[[], int] = lambda: time.time_ns() // 1000,
        soon: Callable[[Callable[[], None]], object] = _in_the_next_turn,
        later: Callable[[Callable[[], None]], object] = _after_a_pause,
    ) -> None:
        self._max_nodes = max_nodes
        self._stats = stats
        self._soon = soon
        self._coming: deque[tuple[WorkerRecord, KvEvents]] = deque()
        self._later = later
        self._is_dropping = False
        self._emptied: list[object] = []  # freeing each takes a turn of the loop
        self._feeds = defaultdict[str, BlockFeed](lambda: BlockFeed(now_us))
        self._indexes: dict[tuple[str, int], PrefixIndex] = {}
        self._key_of: dict[int, tuple[str, int]] = {}

    @property
    def num_bytes(self) -> int:
        """Approximate size of all of them."""
        return BYTES_A_NODE * sum(map(len, self._indexes.values()))

    def apply(self, record: WorkerRecord, message: KvEvents) -> None:
        """Apply a worker's events, in order and soon."""
        self._coming.append((record, message))
        if len(self._coming) == 1:
            self._soon(self._apply_coming)

    def _apply_coming(self) -> None:
        while self._coming:
            try:
                self._apply(*self._coming.popleft())
            except Exception:  # nothing that a worker sends may end the gateway, or a caller's request
                self._stats.protocol_errors["internal"] += 1
                log.exception("message_failed")

    def _apply(self, record: WorkerRecord, message: KvEvents) -> None:
        key = (record.card.name, record.capacity.block_size)
        index, feed = self._indexes.get(key), self._feed(key[0])
        if index is None:
            index = self._indexes[key] = PrefixIndex(block_size=key[1], max_nodes=self._max_nodes, feed=feed)
        self._key_of[record.incarnation] = key
        index.apply(record.incarnation, *message.events)
        feed.flush()
        if index.has_leaving:
            self._drop()

    def match(self, records: Iterable[WorkerRecord], token_ids_T: np.ndarray, salt: str) -> Match:
        """Cached tokens by incarnation, for workers of one model. token_ids_T: int32."""
        self._apply_coming()
        keys = {(record.card.name, record.capacity.block_size) for record in records}
        matched = Match()
        for key in keys & self._indexes.keys():
            found = self._indexes[key].match(token_ids_T, salt)
            matched.update(found)
            matched.num_branches = max(matched.num_branches, found.num_branches)
        return matched

    def forget(self, incarnation: int) -> None:
        """The worker is gone."""
        self._apply_coming()
        key = self._key_of.pop(incarnation, None)
        if key is None:
            return
        self._indexes[key].forget(incarnation)
        self._drop()

    def _drop(self) -> None:
        if not self._is_dropping:
            self._is_dropping = True
            self._later(self._drop_part)

    def _drop_part(self) -> None:
        """Drop a part of one index, and schedule the rest."""
        self._is_dropping, used = False, set(self._key_of.values())
        if self._emptied:
            self._emptied.pop()
            self._drop()
        for key, index in [] if self._is_dropping else [*self._indexes.items()]:
            if index.has_leaving:
                self._emptied += index.drop_part()
                self._feed(key[0]).flush()
            elif key not in used:
                self._emptied += self._indexes.pop(key).parts
            else:
                continue
            self._drop()
            return

    def follow(self, model: str, salt: str) -> BlockSubscription:
        """Subscribe to the blocks of this salt that a model's workers have. Raises FeedFull."""
        self._apply_coming()
        indexes = [index for (name, _), index in self._indexes.items() if name == model]
        state = chain.from_iterable(index.blocks(salt) for index in indexes)
        return self._feed(model).follow(salt, state, sum(index.num_blocks(salt) for index in indexes))

    def end_feeds(self) -> None:
        """End every subscription."""
        for feed in self._feeds.values():
            feed.end()

    def _feed(self, model: str) -> BlockFeed:
        return self._feeds[model]
