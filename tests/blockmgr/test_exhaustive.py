"""Every state of a small scope: two requests, three or four blocks of two tokens."""

import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from octavo.blockmgr import PrefixCache
from tests.support.blockmgr.machine import KvMachine
from tests.support.blockmgr.walk import check

MAX_LIVE, MAX_TOKENS = 2, 4
ALL_ACTIONS = frozenset({"admit", "fork", "plan", "end_step", "release", "crash"})
_DEEP = ("hash", "manager", "shadow", "requests", "steps")
_SHALLOW = ("mirror_SM", "joined", "router", "swapped", "to_spoil")
_PLAIN = ("num_admitted", "num_steps", "has_toggled", "has_duplicates")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """How much is tried: blocks of two tokens, prompts that a request may have, steps in flight at once."""

    num_blocks: int
    prompts: tuple[tuple[int, ...], ...]
    max_in_flight: int
    actions: frozenset[str] = ALL_ACTIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class Exploration:
    """What was seen: states up to block names, transitions between them, the longest shortest path."""

    num_states: int
    num_transitions: int
    depth: int


def explore(scope: Scope, max_states: int) -> Exploration:
    """Visit all states; AssertionError where an invariant breaks. OverflowError beyond ``max_states``."""
    first = KvMachine()
    first.start(num_blocks=scope.num_blocks, max_slots=2, cache=PrefixCache.ON, max_events=1000)
    seen, queue, num_transitions, depth = {state_of(first)}, deque([(first, 0)]), 0, 0
    while queue:
        machine, distance = queue.popleft()
        for action, arguments in _actions(machine, scope):
            successor = clone(machine)
            _crash(successor) if action == "crash" else getattr(successor, action)(*arguments)
            check(successor)
            num_transitions += 1
            state = state_of(successor)
            if state not in seen:
                seen.add(state)
                clone(successor).teardown()
                queue.append((successor, distance + 1))
                depth = max(depth, distance + 1)
        if len(seen) > max_states:
            raise OverflowError(f"more than {max_states} states")
    return Exploration(num_states=len(seen), num_transitions=num_transitions, depth=depth)


def clone(machine: KvMachine) -> KvMachine:
    """An independent copy."""
    clone = KvMachine()
    state = machine.__dict__
    memo = {id(machine.manager.config): machine.manager.config}
    clone.__dict__.update(copy.deepcopy({name: state[name] for name in _DEEP}, memo))
    clone.__dict__.update({name: state[name].copy() for name in _SHALLOW})
    clone.__dict__.update({name: state[name] for name in _PLAIN})
    clone.manager.table_SM = clone.manager._tables.table_SM
    return clone


def state_of(machine: KvMachine) -> tuple[Any, ...]:
    """All that matters to the future, with blocks named in the order in which they are met, steps by age."""
    manager, names = machine.manager, {}  # type: ignore[var-annotated]

    def named(blocks: list[int]) -> tuple[int, ...]:
        return tuple(names.setdefault(block, len(names)) for block in blocks)

    requests = sorted(machine.requests.values(), key=lambda r: r.slot)
    rows = [(r.slot, tuple(r.tokens), r.num_computed, r.is_tainted, named(machine._row(r))) for r in requests]
    slot_of = {id(request): request.slot for request in requests}
    fence = manager._pool.fence
    lru, held = named(manager._pool.lru.to_array().tolist()), named(fence.to_array().tolist())
    steps = tuple(
        (
            named(sorted(s.blocks, key=lambda b: names.get(b, 99))),
            tuple((slot_of[id(r)], n) for _, r, n in s.commits if id(r) in slot_of),
        )
        for s in machine.steps
    )
    begun = [step.number for step in machine.steps]
    holds = tuple(
        (begun.index(last), named(alive))
        for last, hold, blocks in fence._holds
        if (alive := blocks[fence._hold_P[blocks] == hold].tolist())
    )
    index = manager._index
    entries = {int(index.entry_P[b]): b for b in index.block_of.values()} | {0: -1}
    links = tuple(
        (
            names[b],
            (index._salt_of[b], index._tokens_PB[b].tobytes()),
            names.get(entries.get(int(index.parent_entry_P[b]), -2), -1),
        )
        for b in sorted(index.block_of.values(), key=lambda b: names.get(b, 99))
        if b in names
    )
    chains = tuple(
        (slot, len(c), tuple(named([entries.get(e, -2)]) for e in c.entries))
        for slot, c in sorted(manager._chains.items())
    )
    copies = tuple(named(list(pair)) for pair in manager._growth.copies.pending)
    return (
        tuple(rows),
        steps,
        holds,
        lru,
        held,
        links,
        chains,
        copies,
        machine.has_duplicates,
        frozenset(machine.joined),
    )


def _actions(machine: KvMachine, scope: Scope) -> Iterator[tuple[str, tuple[Any, ...]]]:
    return (action for action in _possible_actions(machine, scope) if action[0] in scope.actions)


def _possible_actions(machine: KvMachine, scope: Scope) -> Iterator[tuple[str, tuple[Any, ...]]]:
    num_live = len(machine.requests)
    if num_live < MAX_LIVE:
        yield from (("admit", (list(tokens), "", None)) for tokens in scope.prompts)
    if num_live == 1:
        yield "fork", (0, 3)
    may_grow = all(len(r.tokens) < MAX_TOKENS for r in machine.requests.values())
    if num_live and may_grow and len(machine.steps) < scope.max_in_flight:
        yield from (("plan", ([(i, 2, 0) for i in range(num_live)], when)) for when in ("plan", "end"))
    if machine.steps:
        yield "end_step", ()
        yield "crash", ()
    yield from (("release", (i, "once")) for i in range(num_live))


def _crash(machine: KvMachine) -> None:
    """A step failed: what its requests hold is garbage, all of them end."""
    for name in list(machine.requests):
        machine._taint(machine.requests[name])
        machine.manager.release(machine.requests.pop(name).slot, name)
    machine.joined.clear()
    while machine.steps:
        machine.end_step()


SAME = ((0, 0, 0),)
SCOPES = {
    "copy-on-write": Scope(num_blocks=3, prompts=SAME, max_in_flight=1),
    "two plans in flight": Scope(num_blocks=3, prompts=SAME, max_in_flight=2, actions=ALL_ACTIONS - {"fork", "crash"}),
}
# Larger ones, by hand: 4 blocks, two plans, no fork: 4,278 states; 3 blocks, two plans, fork: 11,812 states (45 s).


@pytest.mark.slow
@pytest.mark.parametrize("name", SCOPES)
def test_no_order_of_actions_breaks_an_invariant_or_strands_a_block(name: str) -> None:
    seen = explore(SCOPES[name], max_states=20_000)
    assert seen.num_states > 1000
    assert seen.depth > 10
