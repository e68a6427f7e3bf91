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
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain

import numpy as np

from octavo.gateway.workers.events import BlockChange, BlockFeed, BlockSubscription, ChangeKind
from octavo.gateway.workers.prefix_tree import NOBODY, PrefixTree
from octavo.gateway.workers.registry import WorkerRecord
from octavo.wire.messages import KvEvent, KvEventKind, KvEvents, KvTier

_TOKEN_BYTES = np.dtype(np.int32).itemsize
MAX_CHOICES = 3  # for one request: a worker may leave between the choice and the send
IMBALANCE_RATIO = 1.5  # a holder may be this many times busier than the idlest worker…
IMBALANCE_SLACK = 0.25  # …plus this share of its own capacity


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


class _Holding:
    """What one worker has: nodes by its hashes and its hashes by nodes, and which nodes lie in host memory."""

    __slots__ = ("hash_of", "node_of", "on_host")

    def __init__(self) -> None:
        self.node_of, self.hash_of, self.on_host = dict[bytes, int](), dict[int, bytes](), set[int]()


class PrefixIndex:
    """Prefixes of one model in blocks of one size. feed: gets every block with its first owner, and without
    its last."""

    def __init__(self, *, block_size: int, max_nodes: int, feed: BlockFeed | None = None) -> None:
        self.block_size = block_size
        self._feed = feed
        self._num_owned: Counter[str] = Counter()  # nodes with owners, by salt
        self._max_nodes = max_nodes
        self._tree = PrefixTree()
        self._roots: dict[str, int] = {}  # by salt; not counted, gone with their last child
        self._holdings: dict[int, _Holding] = {}  # by worker incarnation

    def __len__(self) -> int:
        return len(self._tree)

    def match(self, token_ids_T: np.ndarray, salt: str) -> Match:
        """Cached tokens are at most len - 1 (the last token is always computed). token_ids_T: int32."""
        path = self._walk(np.ascontiguousarray(token_ids_T, np.int32), salt)
        matched = Match()
        holders = self._holdings
        for depth, node in enumerate(path, start=1):
            holders = {incarnation: each for incarnation, each in holders.items() if node in each.hash_of}
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
        holding = self._holdings.get(incarnation)
        for block_hash in tuple(holding.node_of) if holding is not None else ():
            self._disown(incarnation, block_hash)
        self._holdings.pop(incarnation, None)

    def num_blocks(self, salt: str) -> int:
        """Blocks of this salt that some worker has."""
        return self._num_owned[salt]

    def blocks(self, salt: str) -> Iterator[BlockChange]:
        """STORED for every block of this salt that some worker has, parents first. What changes while it is walked may
        be in it or not."""
        tree, root = self._tree, self._roots.get(salt)
        waiting = deque((node, tree.block_id[node]) for node in (tree.children(root) if root is not None else ()))
        while waiting:
            node, block_id = waiting.popleft()
            if tree.block_id[node] != block_id:
                continue  # gone meanwhile, and its row perhaps another's
            waiting.extend((child, tree.block_id[child]) for child in tree.children(node))
            if tree.num_owners[node]:
                yield self._stored(node)

    # ------------------------------------------------------------ parts

    def _walk(self, token_ids_T: np.ndarray, salt: str) -> list[int]:
        path: list[int] = []
        node = self._roots.get(salt, NOBODY)
        data, width = token_ids_T.tobytes(), self.block_size * token_ids_T.itemsize
        for start in range(0, len(data) - width + 1, width):
            node = self._tree.find(node, data[start : start + width]) if node else NOBODY
            if not node:
                break
            path.append(node)
        return path

    def _store(self, incarnation: int, event: KvEvent) -> None:
        if len(event.token_ids) != self.block_size * _TOKEN_BYTES or not event.block_hash:
            return
        tree, holding = self._tree, self._holding(incarnation)
        known = holding.node_of.get(event.block_hash)
        if known is not None and tree.key_of[known] == event.token_ids and self._is_child(known, holding, event):
            former_tier = self._tier(known)
            self._place(known, holding, event.tier)
            self._tell_tier(known, former_tier)
            tree.touch([known])
            return
        if known is not None:
            self._disown(incarnation, event.block_hash)
            holding = self._holding(incarnation)
        parent = holding.node_of.get(event.parent_hash) if event.parent_hash else self._root(event.salt)
        if parent is None:
            return
        salt = tree.salt_of[parent] if event.parent_hash else event.salt
        node = tree.find(parent, event.token_ids) or tree.add(parent, event.token_ids, salt)
        former = holding.hash_of.get(node)
        former_tier, is_first = self._tier(node), not tree.num_owners[node]
        if former is None:
            tree.num_owners[node] += 1
        else:
            holding.node_of.pop(former, None)
        holding.hash_of[node] = event.block_hash
        holding.node_of[event.block_hash] = node
        self._place(node, holding, event.tier)
        if not is_first:
            self._tell_tier(node, former_tier)
        else:
            self._num_owned[salt] += 1
            if self._feed is not None and self._feed.is_followed:
                self._feed.tell(salt, self._stored(node))
        tree.touch([node])
        while len(tree) > self._max_nodes:
            oldest = tree.oldest_leaf
            owned = [(each, of.hash_of[oldest]) for each, of in self._holdings.items() if oldest in of.hash_of]
            for owner, name in owned:
                self._disown(owner, name)

    def _holding(self, incarnation: int) -> _Holding:
        if incarnation not in self._holdings:
            self._holdings[incarnation] = _Holding()
        return self._holdings[incarnation]

    def _is_child(self, node: int, holding: _Holding, event: KvEvent) -> bool:
        """Whether it follows what the event says."""
        parent = holding.node_of.get(event.parent_hash) if event.parent_hash else self._roots.get(event.salt)
        return self._tree.parent[node] == parent

    def _tier(self, node: int) -> KvTier:
        owners = self._tree.num_owners[node]
        return KvTier.HOST if owners and self._tree.num_on_host[node] == owners else KvTier.DEVICE

    def _place(self, node: int, holding: _Holding, tier: KvTier) -> None:
        is_on_host = tier is KvTier.HOST
        if is_on_host != (node in holding.on_host):
            holding.on_host ^= {node}
            self._tree.num_on_host[node] += 1 if is_on_host else -1

    def _tell_tier(self, node: int, former: KvTier) -> None:
        """Followers who know no tiers have it in the end."""
        if self._tier(node) is former or self._feed is None or not self._feed.is_followed:
            return
        salt, block_id = self._tree.salt_of[node], self._tree.block_id[node]
        self._feed.tell(salt, BlockChange(kind=ChangeKind.REMOVED, block_id=block_id, tier=former))
        self._feed.tell(salt, self._stored(node))

    def _root(self, salt: str) -> int:
        if salt not in self._roots:
            self._roots[salt] = self._tree.add_root()
        return self._roots[salt]

    def _disown(self, incarnation: int, block_hash: bytes) -> None:
        holding = self._holdings.get(incarnation)
        node = holding.node_of.pop(block_hash, None) if holding is not None else None
        if holding is None or node is None:
            return
        if not holding.node_of:
            del self._holdings[incarnation]
        former = self._tier(node)
        self._place(node, holding, KvTier.DEVICE)
        del holding.hash_of[node]
        self._tree.num_owners[node] -= 1
        tell = self._tell_tier if self._tree.num_owners[node] else self._lost_last_owner
        tell(node, former)
        self._prune(node)

    def _lost_last_owner(self, node: int, tier: KvTier) -> None:
        salt = self._tree.salt_of[node]
        self._num_owned[salt] -= 1
        if not self._num_owned[salt]:
            del self._num_owned[salt]
        if self._feed is not None and self._feed.is_followed:
            block_id = self._tree.block_id[node]
            self._feed.tell(salt, BlockChange(kind=ChangeKind.REMOVED, block_id=block_id, tier=tier))

    def _prune(self, node: int) -> None:
        """Drop nodes without owners and children, up to the root."""
        tree = self._tree
        while not tree.num_owners[node] and not tree.num_children[node] and tree.parent[node]:
            parent, salt = tree.parent[node], tree.salt_of[node]
            tree.remove(node)
            if not tree.parent[parent] and not tree.num_children[parent]:
                tree.remove(self._roots.pop(salt))
                return
            node = parent

    def _stored(self, node: int) -> BlockChange:
        tree, parent = self._tree, self._tree.parent[node]
        return BlockChange(
            kind=ChangeKind.STORED,
            block_id=tree.block_id[node],
            parent_id=tree.block_id[parent] if tree.parent[parent] else None,  # a root is no block
            token_ids=tree.key_of[node],
            tier=self._tier(node),
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
