"""Which worker gets a request: the one where it costs the least, in prompt tokens that somebody has to compute.

That is what the worker lacks of the prompt; what it has to compute before it; and, the fuller its cache is, what the
new tokens push out. What many prompts begin with is soon worth having everywhere, so that a worker that lacks it is
charged only the share of one of them: new conversations spread, and then stay where they are.

A hot prefix does not pin its traffic to one worker: where the holder is much busier than the idlest worker, the request
goes there instead, computes the prefix again, and from then on two workers hold it.

What workers have cached comes with their KV events: a tree over blocks of tokens, where a child is found by (parent
node, tokens) and a root by the salt. Workers name their blocks by keyed hashes that mean nothing elsewhere; they only
serve to find the node again. The tree is a hint: what it has forgotten costs a recomputation, never a wrong token.
Bounded: beyond ``max_nodes`` the end of a prefix that was used least recently goes. Pure; must not know sockets.
"""

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, count

import numpy as np

from octavo.gateway.workers.events import BlockChange, BlockFeed, BlockSubscription, ChangeKind
from octavo.gateway.workers.registry import WorkerRecord
from octavo.wire.messages import KvEvent, KvEventKind, KvEvents, KvTier

MAX_CHOICES = 3  # for one request: a worker may leave between the choice and the send
IMBALANCE_RATIO = 1.5  # a holder may be this many times busier than the idlest worker…
IMBALANCE_SLACK = 0.25  # …plus this share of its own capacity
_block_ids = count(1)  # of all indexes, so that a feed may have blocks of several


class RouteReason(StrEnum):
    """Why a worker was chosen; a closed label set."""

    ONLY = "only"
    PREFIX = "prefix"
    LOAD = "load"  # no worker had a prefix
    BALANCE = "balance"  # another one has a longer prefix, and costs more


class Match(dict[int, int]):
    """Cached tokens by worker incarnation; none for a worker without a hit. num_branches: in how many ways other
    prompts went on after the longest prefix."""

    num_branches = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A ready worker of the model. load: requests over the number that run at once (above 1: it queues).
    waiting_tokens: prompt tokens that it has to compute first. fill: share of its blocks that hold something.
    step_tokens: what it computes in a step."""

    incarnation: int
    load: float
    cached_tokens: int
    waiting_tokens: int = 0
    fill: float = 0.0
    step_tokens: int = 0


def candidates_of(
    records: Iterable[WorkerRecord], match: Mapping[int, int], waiting: Mapping[int, int]
) -> list[Candidate]:
    """match, waiting: tokens by incarnation."""
    return [
        Candidate(
            incarnation=each.incarnation,
            load=each.load,
            cached_tokens=match.get(each.incarnation, 0),
            waiting_tokens=waiting.get(each.incarnation, 0),
            fill=1 - each.num_free_blocks / each.capacity.num_blocks,
            step_tokens=each.capacity.max_batch_tokens,
        )
        for each in records
    ]


def choose(
    candidates: Sequence[Candidate], *, turn: int, num_tokens: int, num_branches: int = 0
) -> tuple[Candidate, RouteReason]:
    """The cheapest of at least one candidate for a prompt of so many tokens. turn: any counter; equals take turns by
    it. num_branches: see `Match`."""
    if len(candidates) == 1:
        return candidates[0], RouteReason.ONLY
    rotated = [candidates[(turn + offset) % len(candidates)] for offset in range(len(candidates))]
    least_load = min(candidate.load for candidate in rotated)
    longest = max(candidate.cached_tokens for candidate in rotated)

    def cost(candidate: Candidate) -> float:
        # One way to go on may be that of the same caller, whose former answer is not what the prompt has of it.
        lacking = (longest - candidate.cached_tokens) / max(num_branches, 1)
        queue = candidate.waiting_tokens + candidate.load * candidate.step_tokens
        return lacking + queue + candidate.fill * (num_tokens - candidate.cached_tokens)

    best = min((each for each in rotated if not _is_overloaded(each, least_load)), key=cost)
    if best.cached_tokens < longest:
        return best, RouteReason.BALANCE
    return best, RouteReason.PREFIX if best.cached_tokens else RouteReason.LOAD


def _is_overloaded(candidate: Candidate, least_load: float) -> bool:
    return candidate.load > IMBALANCE_RATIO * least_load + IMBALANCE_SLACK


class _Node:
    __slots__ = ("block_id", "children", "key", "on_host", "owners", "parent", "salt", "used")

    def __init__(self, parent: "_Node | None", key: bytes, salt: str) -> None:
        self.block_id = next(_block_ids)
        self.parent = parent
        self.key = key
        self.salt = salt
        self.used = 0  # which use of the index was the last of this block
        self.children: dict[bytes, _Node] = {}
        self.owners: dict[int, bytes] = {}  # worker incarnation -> its hash of this block
        self.on_host: set[int] = set()  # those that have it in host memory

    @property
    def tier(self) -> KvTier:
        return KvTier.HOST if self.owners and len(self.on_host) == len(self.owners) else KvTier.DEVICE


class PrefixIndex:
    """Prefixes of one model in blocks of one size. feed: gets every block with its first owner, and without
    its last."""

    def __init__(self, *, block_size: int, max_nodes: int, feed: BlockFeed | None = None) -> None:
        self.block_size = block_size
        self._feed = feed
        self._num_owned: Counter[str] = Counter()  # nodes with owners, by salt
        self._max_nodes = max_nodes
        self._roots: dict[str, _Node] = {}  # by salt; not counted, gone with their last child
        self._by_hash: dict[int, dict[bytes, _Node]] = {}
        self._leaves: OrderedDict[_Node, None] = OrderedDict()  # nodes without children; used least recently first
        self._num_nodes = 0
        self._num_uses = 0

    def __len__(self) -> int:
        return self._num_nodes

    def match(self, token_ids_T: np.ndarray, salt: str) -> Match:
        """Cached tokens are at most len - 1 (the last token is always computed). token_ids_T: int32."""
        path = self._walk(np.ascontiguousarray(token_ids_T, np.int32), salt)
        matched = Match()
        holders: set[int] | None = None
        for depth, node in enumerate(path, start=1):
            holders = set(node.owners) if holders is None else holders & node.owners.keys()
            if not holders:
                break
            for incarnation in holders:
                matched[incarnation] = depth * self.block_size
        self._touch(path)
        longest = max(len(token_ids_T) - 1, 0)
        matched.update({incarnation: min(tokens, longest) for incarnation, tokens in matched.items()})
        matched.num_branches = len(path[-1].children) if path else 0
        return matched

    def apply(self, incarnation: int, event: KvEvent) -> None:
        """Take one event of a worker. What does not fit (unknown parent, wrong block size) is ignored."""
        if event.kind is KvEventKind.STORED:
            self._store(incarnation, event)
        elif event.kind is KvEventKind.REMOVED:
            self._disown(incarnation, event.block_hash)
        else:
            self.forget(incarnation)

    def forget(self, incarnation: int) -> None:
        """The worker's cache is empty, or the worker is gone."""
        for block_hash in tuple(self._by_hash.get(incarnation, ())):
            self._disown(incarnation, block_hash)
        self._by_hash.pop(incarnation, None)

    def num_blocks(self, salt: str) -> int:
        """Blocks of this salt that some worker has."""
        return self._num_owned[salt]

    def blocks(self, salt: str) -> Iterator[BlockChange]:
        """STORED for every block of this salt that some worker has, parents first. What changes while it is walked may
        be in it or not."""
        root = self._roots.get(salt)
        waiting = deque(root.children.values() if root is not None else ())
        while waiting:
            node = waiting.popleft()
            waiting.extend(node.children.values())
            if node.owners:
                yield _stored(node)

    # ------------------------------------------------------------ parts

    def _walk(self, token_ids_T: np.ndarray, salt: str) -> list[_Node]:
        path: list[_Node] = []
        node = self._roots.get(salt)
        data, width = token_ids_T.tobytes(), self.block_size * token_ids_T.itemsize
        for start in range(0, len(data) - width + 1, width):
            node = node.children.get(data[start : start + width]) if node is not None else None
            if node is None:
                break
            path.append(node)
        return path

    def _store(self, incarnation: int, event: KvEvent) -> None:
        hashes = self._by_hash.setdefault(incarnation, {})
        if len(event.token_ids) != self.block_size * np.dtype(np.int32).itemsize or not event.block_hash:
            return
        known = hashes.get(event.block_hash)
        if known is not None and known.key == event.token_ids and self._is_child(known, hashes, event):
            former_tier = known.tier
            self._place(known, incarnation, event.tier)
            self._tell_tier(known, former_tier)
            self._touch([known])
            return
        if known is not None:
            self._disown(incarnation, event.block_hash)
            hashes = self._by_hash.setdefault(incarnation, {})
        parent = hashes.get(event.parent_hash) if event.parent_hash else self._root(event.salt)
        if parent is None:
            return
        node = parent.children.get(event.token_ids)
        if node is None:
            node = self._add(parent, event.token_ids)
        former = node.owners.get(incarnation)
        if former is not None:
            hashes.pop(former, None)
        is_first, former_tier = not node.owners, node.tier
        node.owners[incarnation] = event.block_hash
        self._place(node, incarnation, event.tier)
        hashes[event.block_hash] = node
        if is_first:
            self._num_owned[node.salt] += 1
            if self._feed is not None and self._feed.is_followed:
                self._feed.tell(node.salt, _stored(node))
        else:
            self._tell_tier(node, former_tier)
        self._touch([node])
        while self._num_nodes > self._max_nodes:
            oldest = next(iter(self._leaves))
            for owner, name in tuple(oldest.owners.items()):
                self._disown(owner, name)

    def _is_child(self, node: _Node, hashes: dict[bytes, _Node], event: KvEvent) -> bool:
        """Whether it follows what the event says."""
        if event.parent_hash:
            return node.parent is hashes.get(event.parent_hash)
        return node.parent is self._roots.get(event.salt)

    @staticmethod
    def _place(node: _Node, incarnation: int, tier: KvTier) -> None:
        if tier is KvTier.HOST:
            node.on_host.add(incarnation)
        else:
            node.on_host.discard(incarnation)

    def _tell_tier(self, node: _Node, former: KvTier) -> None:
        """Followers who know no tiers have it in the end."""
        if node.tier is former or self._feed is None or not self._feed.is_followed:
            return
        self._feed.tell(node.salt, BlockChange(kind=ChangeKind.REMOVED, block_id=node.block_id, tier=former))
        self._feed.tell(node.salt, _stored(node))

    def _root(self, salt: str) -> _Node:
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = _Node(None, b"", salt)
        return root

    def _add(self, parent: _Node, key: bytes) -> _Node:
        node = parent.children[key] = _Node(parent, key, parent.salt)
        self._num_nodes += 1
        self._leaves.pop(parent, None)
        self._leaves[node] = None
        return node

    def _touch(self, path: list[_Node]) -> None:
        """Make a path the most recent."""
        self._num_uses += 1
        for node in path:
            node.used = self._num_uses
        if path and not path[-1].children:
            self._leaves.move_to_end(path[-1])

    def _disown(self, incarnation: int, block_hash: bytes) -> None:
        hashes = self._by_hash.get(incarnation, {})
        node = hashes.pop(block_hash, None)
        if not hashes:
            self._by_hash.pop(incarnation, None)
        if node is None:
            return
        former = node.tier
        del node.owners[incarnation]
        node.on_host.discard(incarnation)
        if not node.owners:
            self._lost_last_owner(node, former)
        else:
            self._tell_tier(node, former)
        self._prune(node)

    def _lost_last_owner(self, node: _Node, tier: KvTier) -> None:
        salt = node.salt
        self._num_owned[salt] -= 1
        if not self._num_owned[salt]:
            del self._num_owned[salt]
        if self._feed is not None and self._feed.is_followed:
            self._feed.tell(salt, BlockChange(kind=ChangeKind.REMOVED, block_id=node.block_id, tier=tier))

    def _prune(self, node: _Node) -> None:
        """Drop nodes without owners and children, up to the root."""
        while not node.owners and not node.children and node.parent is not None:
            parent = node.parent
            del parent.children[node.key], self._leaves[node]
            self._num_nodes -= 1
            if not parent.children:
                self._became_leaf(parent, node)
            node = parent

    def _became_leaf(self, node: _Node, former: _Node) -> None:
        """former: the child that it had last. Unless the node was used after it, it goes next, as the rest of a prefix
        whose end has gone."""
        if node.parent is None:
            del self._roots[node.salt]
            return
        self._leaves[node] = None
        if node.used <= former.used:
            self._leaves.move_to_end(node, last=False)


def _stored(node: _Node) -> BlockChange:
    parent = node.parent
    is_first = parent is None or parent.parent is None  # a root is no block
    parent_id = None if is_first or parent is None else parent.block_id
    return BlockChange(
        kind=ChangeKind.STORED, block_id=node.block_id, parent_id=parent_id, token_ids=node.key, tier=node.tier
    )


class Prefixes:
    """The indexes of all models, one per model name and block size, and per model a feed of what changes in them.

    Each index is bounded by ``max_nodes``; an index goes with its last worker, a feed stays. now_us: see `BlockFeed`.
    """

    def __init__(self, *, max_nodes: int, now_us: Callable[[], int] = lambda: time.time_ns() // 1000) -> None:
        self._max_nodes = max_nodes
        self._now_us = now_us
        self._feeds: dict[str, BlockFeed] = {}
        self._indexes: dict[tuple[str, int], PrefixIndex] = {}
        self._key_of: dict[int, tuple[str, int]] = {}

    def apply(self, record: WorkerRecord, message: KvEvents) -> None:
        """Take a worker's events, in their order."""
        key = (record.card.name, record.capacity.block_size)
        index, feed = self._indexes.get(key), self._feed(key[0])
        if index is None:
            index = self._indexes[key] = PrefixIndex(block_size=key[1], max_nodes=self._max_nodes, feed=feed)
        self._key_of[record.incarnation] = key
        for event in message.events:
            index.apply(record.incarnation, event)
        feed.flush()

    def match(self, records: Iterable[WorkerRecord], token_ids_T: np.ndarray, salt: str) -> Match:
        """Cached tokens by incarnation, for workers of one model. token_ids_T: int32."""
        keys = {(record.card.name, record.capacity.block_size) for record in records}
        matched = Match()
        for key in keys & self._indexes.keys():
            found = self._indexes[key].match(token_ids_T, salt)
            matched.update(found)
            matched.num_branches = max(matched.num_branches, found.num_branches)
        return matched

    def forget(self, incarnation: int) -> None:
        """The worker is gone."""
        key = self._key_of.pop(incarnation, None)
        if key is None:
            return
        self._indexes[key].forget(incarnation)
        self._feed(key[0]).flush()
        if key not in self._key_of.values():
            del self._indexes[key]

    def follow(self, model: str, salt: str) -> BlockSubscription:
        """Subscribe to the blocks of this salt that the workers of a model have. Raises FeedFull."""
        indexes = [index for (name, _), index in self._indexes.items() if name == model]
        state = chain.from_iterable(index.blocks(salt) for index in indexes)
        return self._feed(model).follow(salt, state, sum(index.num_blocks(salt) for index in indexes))

    def leave(self, model: str, subscription: BlockSubscription) -> None:
        """Idempotent."""
        self._feed(model).leave(subscription)

    def _feed(self, model: str) -> BlockFeed:
        feed = self._feeds.get(model)
        if feed is None:
            feed = self._feeds[model] = BlockFeed(self._now_us)
        return feed
