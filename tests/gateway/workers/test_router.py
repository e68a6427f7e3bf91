"""Routing: what a request would cost each worker, and a guard against hot prefixes."""

from collections import Counter
from itertools import count

import numpy as np

from octavo.gateway.workers.prefix_index import PrefixIndex
from octavo.gateway.workers.router import Candidate, choose
from octavo.gateway.workers.stats import RouteReason
from octavo.wire.messages import KvEvent, KvEventKind

BLOCK = 16


def worker(incarnation: int, load: float = 0.0, cached: int = 0, *, waiting: int = 0, fill: float = 0.0) -> Candidate:
    return Candidate(
        incarnation=incarnation, load=load, cached_tokens=cached, waiting_tokens=waiting, fill=fill, step_tokens=512
    )


def test_the_only_worker_is_chosen_however_busy() -> None:
    assert choose([worker(1, load=9.0)], turn=5, num_tokens=8) == (worker(1, load=9.0), RouteReason.ONLY)


def test_the_longest_prefix_wins_over_a_little_less_load() -> None:
    candidates = [worker(1, 0.2, cached=640), worker(2, 0.0, cached=320), worker(3)]
    assert choose(candidates, turn=0, num_tokens=700) == (candidates[0], RouteReason.PREFIX)


def test_a_few_cached_tokens_are_worth_no_queue() -> None:
    candidates = [worker(1, 0.2, cached=16), worker(2), worker(3, cached=16, waiting=500)]
    assert choose(candidates, turn=0, num_tokens=700) == (candidates[1], RouteReason.BALANCE)


def test_without_a_prefix_the_least_load_wins() -> None:
    candidates = [worker(1, 0.2), worker(2, 0.1), worker(3, 0.3)]
    assert choose(candidates, turn=0, num_tokens=100) == (candidates[1], RouteReason.LOAD)


def test_a_worker_with_less_to_compute_before_it_is_sooner_ready() -> None:
    candidates = [worker(1, waiting=300), worker(2, waiting=100), worker(3, waiting=200)]
    assert choose(candidates, turn=0, num_tokens=100) == (candidates[1], RouteReason.LOAD)


def test_the_emptier_cache_wins_where_all_else_is_equal() -> None:
    candidates = [worker(1, fill=0.6), worker(2, fill=0.9), worker(3, fill=0.1)]
    assert choose(candidates, turn=0, num_tokens=100) == (candidates[2], RouteReason.LOAD)


def test_among_equal_prefixes_the_least_load_wins() -> None:
    candidates = [worker(1, 0.2, cached=640), worker(2, 0.1, cached=640), worker(3)]
    assert choose(candidates, turn=0, num_tokens=700) == (candidates[1], RouteReason.PREFIX)


def test_what_many_prompts_begin_with_binds_less_than_what_is_a_conversations_own() -> None:
    candidates = [worker(1, fill=0.8, cached=640), worker(2)]
    assert choose(candidates, turn=0, num_tokens=700, num_branches=1)[0] is candidates[0]
    assert choose(candidates, turn=0, num_tokens=700, num_branches=40)[0] is candidates[1]


def test_equals_take_turns() -> None:
    candidates = [worker(1), worker(2), worker(3)]
    turns = [choose(candidates, turn=turn, num_tokens=8)[0].incarnation for turn in range(6)]
    assert turns == [1, 2, 3, 1, 2, 3]


def test_a_hot_prefix_does_not_pin_its_traffic_to_a_busy_worker() -> None:
    hot, idle = worker(1, 0.26, cached=1024), worker(2, 0.0)
    assert choose([hot, idle], turn=0, num_tokens=1025) == (idle, RouteReason.BALANCE)
    assert choose([worker(1, 0.25, cached=1024), idle], turn=0, num_tokens=1025)[0].incarnation == 1


def test_where_all_are_busy_the_prefix_counts_again() -> None:
    candidates = [worker(1, 1.7, cached=1024), worker(2, 1.0)]
    assert choose(candidates, turn=0, num_tokens=1025) == (candidates[0], RouteReason.PREFIX)


def test_the_second_best_prefix_is_better_than_none() -> None:
    candidates = [worker(1, 2.0, cached=1024), worker(2, 0.1, cached=512), worker(3, 0.0)]
    assert choose(candidates, turn=0, num_tokens=1025) == (candidates[1], RouteReason.BALANCE)


def test_a_stream_of_one_hot_prompt_spreads_by_itself() -> None:
    loads, cached = {1: 0, 2: 0, 3: 0, 4: 0}, {1: 64}
    for turn in range(400):
        candidates = [worker(each, loads[each] / 64, cached.get(each, 0)) for each in loads]
        chosen = choose(candidates, turn=turn, num_tokens=65)[0].incarnation
        loads[chosen] += 1
        cached[chosen] = 64  # it has computed the prefix now
    assert max(loads.values()) <= 1.5 * min(loads.values()) + 0.25 * 64


# ---------------------------------------------------------------- conversations, one request at a time


class Caches:
    """Four workers that never forget, as their gateway sees them, with nobody else about."""

    def __init__(self, num_blocks: int) -> None:
        self.index = PrefixIndex(block_size=BLOCK, max_nodes=100_000)
        self._num_blocks = num_blocks
        self._held: Counter[int] = Counter()
        self._names = count(1)
        self._turn = 0

    def route(self, prompt: list[int]) -> int:
        """The worker of a prompt, which has it from then on."""
        ids_T = np.asarray(prompt, np.int32)
        found = self.index.match(ids_T, "")
        candidates = [
            worker(each, cached=found.get(each, 0), fill=self._held[each] / self._num_blocks) for each in (1, 2, 3, 4)
        ]
        self._turn += 1
        chosen, _ = choose(candidates, turn=self._turn, num_tokens=len(prompt), num_branches=found.num_branches)
        self._store(chosen.incarnation, ids_T)
        return chosen.incarnation

    def _store(self, incarnation: int, ids_T: np.ndarray) -> None:
        parent = b""
        known = self.index.match(np.append(ids_T, 0).astype(np.int32), "").get(incarnation, 0) // BLOCK
        names = self.index._holdings[incarnation].node_of if incarnation in self.index._holdings else {}
        for number in range(len(ids_T) // BLOCK):
            block = ids_T[BLOCK * number : BLOCK * (number + 1)].tobytes()
            name = next(self._names).to_bytes(8, "big")
            if number < known:
                name = next(each for each, node in names.items() if self.index._tree.key_of[node] == block)
            else:
                self._held[incarnation] += 1
                self.index.apply(
                    incarnation,
                    KvEvent(kind=KvEventKind.STORED, block_hash=name, parent_hash=parent, token_ids=block),
                )
            parent = name


def test_conversations_with_one_system_prompt_spread_and_stay_where_they_began() -> None:
    """Also where no worker is ever busy: else one worker has them all, and forgets what the others had room for."""
    rng, caches = np.random.default_rng(0), Caches(num_blocks=2000)
    system = rng.integers(0, 9999, 20 * BLOCK).tolist()
    talks = [[*system, *rng.integers(0, 9999, 8 * BLOCK).tolist()] for _ in range(64)]
    homes = [caches.route(talk) for talk in talks]
    assert len(set(homes)) == 4
    assert max(Counter(homes).values()) <= 2 * min(Counter(homes).values())
    for _ in range(3):
        for number, talk in enumerate(talks):
            talk += rng.integers(0, 9999, 8 * BLOCK).tolist()
            assert caches.route(talk) == homes[number]
