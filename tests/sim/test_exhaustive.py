"""Every state of a small scope over scheduler and block manager: two requests, three or four blocks of two tokens."""

import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from octavo.blockmgr.ids import PrefixCache
from octavo.blockmgr.manager import BlockManager
from octavo.worker.runners.interface import RunnerError, RunnerOutOfMemory
from octavo.worker.scheduler.planner import Admission, InFlight, Planner
from tests.support.worker.scheduling import World, WorldConfig, key

BLOCK_SIZE = 2
State = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """prompts: of the requests, by handle. budget: how often the environment may do each thing in all."""

    num_blocks: int
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int = 3
    max_in_flight: int = 1
    max_num_seqs: int = 2
    max_batch_tokens: int = 4
    priorities: tuple[int, ...] = (0, 0)
    budget: tuple[tuple[str, int], ...] = (("cancel", 1), ("preempt", 1), ("fail", 1), ("oom", 1))
    prefix_cache: PrefixCache = PrefixCache.ON


@dataclass(slots=True, kw_only=True)
class Exploration:
    """What was seen. cycles, deadlocks: as sequences of actions from the start."""

    num_states: int = 0
    num_transitions: int = 0
    depth: int = 0
    deadlocks: list[str] = field(default_factory=list)
    cycles: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Node:
    world: World
    left: dict[str, int]  # of the environment's budget
    added: frozenset[int] = frozenset()
    path: tuple[str, ...] = ()

    def clone(self) -> "_Node":
        world = copy.deepcopy(self.world, {id(self.world.config): self.world.config})
        world.blocks.table_SM = world.blocks._tables.table_SM  # a view would come apart
        world.trace.clear()
        return _Node(world, dict(self.left), self.added, self.path)


def explore(scope: Scope, max_states: int) -> Exploration:
    """Visit all states. AssertionError where an invariant breaks, OverflowError beyond ``max_states``."""
    first = _Node(World(_config(scope)), {"add": len(scope.prompts), **dict(scope.budget)})
    seen, queue, found = {state_of(first): 0}, deque([first]), Exploration()
    own_moves: dict[int, list[int]] = {}
    paths = {0: first.path}
    while queue:
        node = queue.popleft()
        number = seen[state_of(node)]
        is_stuck = node.world.scheduler.has_work
        for action, handle in _actions(node, scope):
            successor = node.clone()
            _do(successor, action, handle, scope)
            state = state_of(successor)
            found.num_transitions += 1
            is_own = action in ("launch", "ack")
            if state not in seen:
                seen[state] = len(seen)
                paths[seen[state]] = successor.path
                found.depth = max(found.depth, len(successor.path))
                queue.append(successor)
            if is_own and seen[state] != number:
                is_stuck = False
                own_moves.setdefault(number, []).append(seen[state])
        if is_stuck:
            found.deadlocks.append(" ".join(node.path))
        if len(seen) > max_states:
            raise OverflowError(f"more than {max_states} states")
    found.num_states = len(seen)
    found.cycles = [" ".join(paths[number]) for number in _on_cycles(own_moves, len(seen))]
    return found


def _config(scope: Scope) -> WorldConfig:
    return WorldConfig(
        num_blocks=scope.num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=scope.max_num_seqs,
        max_batch_tokens=scope.max_batch_tokens,
        max_model_len=16,
        max_in_flight=scope.max_in_flight,
        prefix_cache=scope.prefix_cache,
    )


# ---------------------------------------------------------------- moves


def _actions(node: _Node, scope: Scope) -> Iterator[tuple[str, int]]:
    world, left = node.world, node.left
    if len(world.plans) < scope.max_in_flight and world.scheduler.has_work:
        yield "launch", 0
    if world.plans:
        yield "ack", 0
        for failure in ("fail", "oom"):
            if left.get(failure):
                yield failure, 0
    yield from (("add", handle) for handle in range(len(scope.prompts)) if handle not in node.added)
    for handle in node.added:
        request = world.scheduler.requests.find(key(handle))
        if request is not None and left.get("cancel"):
            yield "cancel", handle
        if request is not None and request.is_paused:
            yield "resume", handle
        elif request is not None and left.get("pause"):
            yield "pause", handle
        if request is not None and left.get("preempt") and request.is_running and not world.plans:
            yield "preempt", handle


def _do(node: _Node, action: str, handle: int, scope: Scope) -> None:
    world = node.world
    node.path = (*node.path, f"{action}{handle}" if action not in ("launch", "ack", "fail", "oom") else action)
    if action in node.left:
        node.left[action] -= 1
    match action:
        case "add":
            node.added |= {handle}
            prompt, priority = list(scope.prompts[handle]), scope.priorities[handle]
            world.add(handle, prompt, priority=priority, max_tokens=scope.max_tokens, ignore_eos=True)
        case "launch":
            world.launch()
        case "ack":
            world.collect()
        case "cancel":
            world.cancel(handle)
        case "pause":
            world.pause(handle)
        case "resume":
            world.resume(handle)
        case "preempt":
            request = world.scheduler.requests.find(key(handle))
            assert request is not None
            world.scheduler.requests.preempt(request, world.now_s)
        case "fail" | "oom":
            _fail_step(world, RunnerError("planted") if action == "fail" else RunnerOutOfMemory("planted"))
    world.take(world.scheduler.flush())
    _check(world)


def _fail_step(world: World, error: RunnerError) -> None:
    """The oldest step fails while it runs."""
    world.runner._faults.collect_errors[world.plans[0].step] = error  # type: ignore[index]
    world.collect()


def _check(world: World) -> None:
    assert world.blocks.audit().violations == ()
    counters, unfinished = world.scheduler.counters, len(world.scheduler.requests)
    assert counters.num_accepted == counters.num_ended.total() + unfinished
    for which, stream in world.streams.items():
        assert stream.tokens == world.expected(which)[: len(stream.tokens)], which
    if world.scheduler.is_empty:
        world.check_quiet()
        world.check_complete()


# ---------------------------------------------------------------- states


def state_of(node: _Node) -> State:
    """All that matters to the future: no times, no counters, blocks named in the order in which they are met."""
    world = node.world
    table, rows = world.scheduler.requests, world.scheduler.requests.slots
    requests: list[State] = []
    for handle in sorted(node.added):
        request = table.find(key(handle))
        if request is None:
            requests.append((handle, "ended"))
            continue
        slot = request.slot
        known = tuple(rows.known_tokens(slot).tolist()) if slot is not None else tuple(request.token_ids_T.tolist())
        figures = (
            ()
            if slot is None
            else (int(rows.num_scheduled_S[slot]), int(rows.num_computed_S[slot]), bool(rows.is_decoding_S[slot]))
        )
        resumes_as = request.resumes_as.value if request.resumes_as is not None else None
        requests.append((handle, request.order, request.phase.value, resumes_as, slot, known, figures))
    flights = tuple(
        (
            tuple(flight.slots_A.tolist()),
            tuple(flight.is_live_A(rows).tolist()),
            tuple(flight.num_computed_A.tolist()),
            flight.num_sampled,
        )
        for flight in world.scheduler._in_flight
    )
    admission = world.scheduler._planner._admission
    index, (looked_up, in_use) = world.blocks._index, world.blocks._looked_up or (None, ())
    digests = tuple(index.digest_of[block] for block in in_use)
    refused = (admission._failed, looked_up and (looked_up, digests, index._watched, index.has_watched_entered))
    left = tuple(sorted(node.left.items()))
    return tuple(requests), flights, refused, left, _blocks_state(world.blocks)


def _blocks_state(manager: BlockManager) -> State:
    names: dict[int, int] = {}

    def named(blocks: list[int]) -> tuple[int, ...]:
        return tuple(names.setdefault(block, len(names)) for block in blocks)

    tables, pool, index = manager._tables, manager._pool, manager._index
    rows = tuple(
        (slot, named(tables.table_SM[slot, : tables.num_blocks_S[slot]].tolist())) for slot in sorted(tables.owners)
    )
    lru, held = named(pool.lru.to_array().tolist()), named(pool.fence.to_array().tolist())
    open_steps = sorted(pool.fence._open)
    holds = tuple(
        (open_steps.index(last) if last in open_steps else -1, named(alive))
        for last, hold, blocks in pool.fence._holds
        if (alive := blocks[pool.fence._hold_P[blocks] == hold].tolist())
    )
    entries = {int(index.entry_P[block]): block for block in index.block_of.values()} | {0: -1}
    links = tuple(
        (
            names[block],
            index._salt_of[block],
            index._tokens_PB[block].tobytes(),
            names.get(entries.get(int(index.parent_entry_P[block]), -2), -1),
        )
        for block in sorted(index.block_of.values(), key=lambda block: names.get(block, 99))
        if block in names
    )
    chains = tuple(
        (slot, len(chain), chain.is_tainted, tuple(named([entries.get(entry, -2)]) for entry in chain.entries))
        for slot, chain in sorted(manager._chains.items())
    )
    tainted = named(np.flatnonzero(index.is_tainted_P).tolist())
    return rows, lru, held, holds, links, chains, tainted


def _on_cycles(moves: dict[int, list[int]], num_states: int) -> list[int]:
    """States from which the given moves lead back to themselves: what is left when all that ends is taken away."""
    incoming: dict[int, list[int]] = {}
    num_outgoing = [0] * num_states
    for source, targets in moves.items():
        num_outgoing[source] = len(targets)
        for target in targets:
            incoming.setdefault(target, []).append(source)
    ends = [state for state in range(num_states) if not num_outgoing[state]]
    while ends:
        for source in incoming.get(ends.pop(), ()):
            num_outgoing[source] -= 1
            if not num_outgoing[source]:
                ends.append(source)
    return [state for state in range(num_states) if num_outgoing[state]]


LONG, SHORT = (5, 6, 7), (5, 6, 8)
SCOPES = {
    "the same prompt twice": Scope(num_blocks=3, prompts=(LONG, LONG)),
    "two plans in flight": Scope(num_blocks=3, prompts=(LONG, SHORT), max_in_flight=2, budget=(("cancel", 1),)),
    "readers stop": Scope(num_blocks=3, prompts=(LONG, SHORT), budget=(("pause", 2),)),
    "readers stop, one slot": Scope(
        num_blocks=3, prompts=(LONG, SHORT), max_in_flight=2, max_num_seqs=1, budget=(("pause", 2),)
    ),
}
# Larger ones, by hand, all without deadlock and cycle: the second scope with preemptions, failed steps and lack of
# memory: 3,009 states, 6,899 transitions; 4 blocks, two plans, prompts of 5 and 3 tokens, the second of
# higher priority: 7,579 states, 17,861 transitions, depth 23; the same with chunks of two tokens: 6,620 states;
# without prefix cache: 4,117 states.


@pytest.mark.parametrize("name", SCOPES)
def test_there_is_no_deadlock_and_no_way_round_in_circles(name: str) -> None:
    seen = explore(SCOPES[name], max_states=10_000)
    assert (seen.deadlocks, seen.cycles) == ([], [])
    assert seen.num_states > 250
    assert seen.depth > 10


TIGHT = Scope(
    num_blocks=3,
    prompts=((5, 6, 7, 8), (6, 6, 7, 8)),
    max_batch_tokens=2,
    budget=(),
    prefix_cache=PrefixCache.OFF,
)


def test_it_finds_requests_that_are_displaced_again_before_their_prompt_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert explore(TIGHT, max_states=1000).cycles == []

    def displace_all(self: Planner, step: int, pipeline: InFlight, now_s: float) -> None:
        for request in self._requests.running:
            self._requests.preempt(request, now_s)

    monkeypatch.setattr(Planner, "_disturb", displace_all)
    assert explore(TIGHT, max_states=1000).cycles != []


def test_it_finds_a_queue_that_nobody_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Admission, "_may_fit", lambda self, head: self._requests.num_running == 1)
    assert explore(TIGHT, max_states=1000).deadlocks != []


def test_it_finds_those_who_wait_for_the_slot_of_one_whose_caller_does_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scope = SCOPES["readers stop, one slot"]
    monkeypatch.setattr(Admission, "preempt_for_head", lambda self, pipeline, now_s: None)
    assert explore(scope, max_states=10_000).deadlocks != []
