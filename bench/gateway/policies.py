"""Ways to choose a worker for a request: our router, alone or in each of several gateways, and others to compare.

They learn what a gateway learns: stored and evicted blocks, first tokens, ends, heartbeats. Must not know: time,
workers.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from bench.gateway.stand_ins import Room
from octavo.gateway.workers.prefix_index import PrefixIndex
from octavo.gateway.workers.router import Candidate, choose
from octavo.wire.messages import KvEvent, KvEventKind

BLOCK = 16


@dataclass(eq=False, kw_only=True)
class Asked:
    """One turn: the prompt, and the answer so far. lacking: tokens that the router expects to be computed."""

    conversation: int
    turn: int
    token_ids: list[int]
    num_prompt: int
    begun_ms: float
    worker: int = 0
    lacking: int = 0
    num_cached: int = 0
    num_computed: int = 0
    num_said: int = 0
    first_ms: float = 0.0
    names: list[int] = field(default_factory=list)  # of its blocks that are stored
    num_own: int = 0  # blocks that it holds but that are not stored yet


class Policy:
    """Sends requests to workers. This base class ignores all events."""

    def __init__(self, num_workers: int, room: Room) -> None:
        self.num_workers, self.room = num_workers, room

    def route(self, asked: Asked) -> int:
        """The worker that gets the request."""
        raise NotImplementedError

    def on_stored(self, worker: int, name: int, parent: int, token_ids: Sequence[int]) -> None: ...
    def on_removed(self, worker: int, name: int) -> None: ...
    def on_first(self, asked: Asked) -> None: ...
    def on_end(self, asked: Asked) -> None: ...
    def on_heartbeat(self, fills: Sequence[float]) -> None: ...


class RandomPolicy(Policy):
    """A random worker."""

    def __init__(self, num_workers: int, room: Room) -> None:
        super().__init__(num_workers, room)
        self._dice = random.Random(0)

    def route(self, asked: Asked) -> int:
        return self._dice.randrange(self.num_workers)


class Sticky(Policy):
    """By what was sent to which worker."""

    def __init__(self, num_workers: int, room: Room) -> None:
        super().__init__(num_workers, room)
        self._sent: dict[int, int] = {}
        self._num_sent = Counter(dict.fromkeys(range(num_workers), 0))

    def route(self, asked: Asked) -> int:
        names = names_of(asked.token_ids)
        known = [self._sent[name] for name in names if name in self._sent]
        chosen = known[-1] if 3 * len(known) > len(names) else min(self._num_sent, key=self._num_sent.__getitem__)
        for name in names:
            self._num_sent[chosen] += name not in self._sent
            self._sent[name] = chosen
        return chosen


class Ours(Policy):
    """The gateway's own router, fed as a gateway feeds it."""

    def __init__(self, num_workers: int, room: Room) -> None:
        super().__init__(num_workers, room)
        self._index = PrefixIndex(block_size=BLOCK, max_nodes=1_000_000)
        self._in_flight, self._waiting = Counter[int](), Counter[int]()
        self._fills: Sequence[float] = (0.0,) * num_workers
        self._turn = 0

    def route(self, asked: Asked) -> int:
        found = self._index.match(np.asarray(asked.token_ids, np.int32), "")
        candidates = [
            Candidate(
                incarnation=each,
                load=self._in_flight[each] / self.room.max_num_seqs,
                cached_tokens=found.get(each, 0),
                waiting_tokens=self._waiting[each],
                fill=self._fills[each],
                step_tokens=self.room.max_batch_tokens,
            )
            for each in range(self.num_workers)
        ]
        self._turn += 1
        best, _ = choose(candidates, turn=self._turn, num_tokens=asked.num_prompt, num_branches=found.num_branches)
        asked.lacking = asked.num_prompt - best.cached_tokens
        self._waiting[best.incarnation] += asked.lacking
        self._in_flight[best.incarnation] += 1
        return best.incarnation

    def on_stored(self, worker: int, name: int, parent: int, token_ids: Sequence[int]) -> None:
        block, ids = _bytes(name), np.asarray(token_ids, np.int32).tobytes()
        before = _bytes(parent) if parent else b""
        self._index.apply(worker, KvEvent(kind=KvEventKind.STORED, block_hash=block, parent_hash=before, token_ids=ids))

    def on_removed(self, worker: int, name: int) -> None:
        self._index.apply(worker, KvEvent(kind=KvEventKind.REMOVED, block_hash=_bytes(name)))

    def on_first(self, asked: Asked) -> None:
        self._waiting[asked.worker] -= asked.lacking

    def on_end(self, asked: Asked) -> None:
        self._in_flight[asked.worker] -= 1

    def on_heartbeat(self, fills: Sequence[float]) -> None:
        self._fills = tuple(fills)


class Several(Policy):
    """Several gateways, each with our router; a conversation stays with one. Each knows what is cached and what it
    sent."""

    def __init__(self, num_workers: int, room: Room, *, num_gateways: int) -> None:
        super().__init__(num_workers, room)
        self._all = [Ours(num_workers, room) for _ in range(num_gateways)]

    def _of(self, asked: Asked) -> Ours:
        return self._all[asked.conversation % len(self._all)]

    def route(self, asked: Asked) -> int:
        return self._of(asked).route(asked)

    def on_stored(self, worker: int, name: int, parent: int, token_ids: Sequence[int]) -> None:
        for each in self._all:
            each.on_stored(worker, name, parent, token_ids)

    def on_removed(self, worker: int, name: int) -> None:
        for each in self._all:
            each.on_removed(worker, name)

    def on_first(self, asked: Asked) -> None:
        self._of(asked).on_first(asked)

    def on_end(self, asked: Asked) -> None:
        self._of(asked).on_end(asked)

    def on_heartbeat(self, fills: Sequence[float]) -> None:
        for each in self._all:
            each.on_heartbeat(fills)


class SharedLoads(Several):
    """The same, but each learns at once what the others sent: the best that sharing loads could achieve."""

    def __init__(self, num_workers: int, room: Room, *, num_gateways: int) -> None:
        super().__init__(num_workers, room, num_gateways=num_gateways)
        for each in self._all[1:]:
            each._in_flight, each._waiting = self._all[0]._in_flight, self._all[0]._waiting


class Dynamo(RandomPolicy):
    """The cost function of NVIDIA Dynamo's KV router with its defaults, according to its documentation: blocks that a
    worker has to compute, those of earlier requests included, and blocks that its requests would hold, shared ones
    counted once, answers left out. CREDIT: for a cached block. ACTIVE: for a held one."""

    CREDIT, ACTIVE = 1.0, 1.0

    def __init__(self, num_workers: int, room: Room) -> None:
        super().__init__(num_workers, room)
        self._stored = [set[int]() for _ in range(num_workers)]
        self._held = [Counter[int]() for _ in range(num_workers)]
        self._computing = [0] * num_workers
        self._alone = [0] * num_workers  # the last, incomplete block of each request

    def route(self, asked: Asked) -> int:
        names = names_of(asked.token_ids)
        cached = [next((n for n, name in enumerate(names) if name not in has), len(names)) for has in self._stored]
        has_rest = len(asked.token_ids) > BLOCK * len(names)

        def cost(worker: int) -> float:
            lacking = max(0.0, asked.num_prompt - self.CREDIT * BLOCK * cached[worker])
            held = self._held[worker]
            active = len(held) + self._alone[worker] + sum(name not in held for name in names) + has_rest
            return (self._computing[worker] + lacking) / BLOCK + self.ACTIVE * active

        costs = [cost(worker) for worker in range(self.num_workers)]
        chosen = self._dice.choice([worker for worker, each in enumerate(costs) if each == min(costs)])
        asked.lacking = asked.num_prompt - BLOCK * cached[chosen]
        self._computing[chosen] += asked.lacking
        self._held[chosen].update(names)
        self._alone[chosen] += has_rest
        return chosen

    def on_stored(self, worker: int, name: int, parent: int, token_ids: Sequence[int]) -> None:
        self._stored[worker].add(name)

    def on_removed(self, worker: int, name: int) -> None:
        self._stored[worker].discard(name)

    def on_first(self, asked: Asked) -> None:
        self._computing[asked.worker] -= asked.lacking

    def on_end(self, asked: Asked) -> None:
        names = names_of(asked.token_ids[: asked.num_prompt])
        self._held[asked.worker] -= Counter(names)
        self._alone[asked.worker] -= asked.num_prompt > BLOCK * len(names)


class DynamoByPrompt(Dynamo):
    """The same without the blocks that requests hold."""

    ACTIVE = 0.0


POLICIES: dict[str, Callable[[int, Room], Policy]] = {
    "ours": Ours, "sticky": Sticky, "lot": RandomPolicy, "dynamo": Dynamo, "dynamo, by prompt alone": DynamoByPrompt,
} | {
    f"{num} {name}": partial(kind, num_gateways=num)
    for num in (4, 8)
    for name, kind in (("own", Several), ("told", SharedLoads))
}  # fmt: skip


def names_of(token_ids: Sequence[int]) -> list[int]:
    """A name for each whole block, which depends on all tokens up to its end."""
    names, name = list[int](), 0
    for begin in range(0, len(token_ids) - BLOCK + 1, BLOCK):
        name = hash((name, *token_ids[begin : begin + BLOCK]))
        names.append(name)
    return names


def _bytes(name: int) -> bytes:
    return (name & (2**64 - 1)).to_bytes(8, "big")
