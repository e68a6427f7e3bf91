"""Every state that two requests can bring a tiny block manager into, breadth first, up to the names of blocks.

Actions: add, step (committing at once or at its end), acknowledge, cancel, fork, crash. In every state the invariants
hold, and the way out is open: when steps end and requests go, every block is free or cached."""

import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from blockmgr import PrefixCache
from tests.support.kv_machine import KvMachine
from tests.support.kv_walk import check

PROMPTS = {"x": [0, 0, 0], "y": [0, 0, 1]}
MAX_LIVE, MAX_TOKENS, MAX_IN_FLIGHT = 2, 5, 2
_FIELDS = ("hash", "manager", "shadow", "requests", "steps", "mirror_SM", "joined", "router")
_FIELDS += ("num_admitted", "num_steps", "has_toggled", "has_twins")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exploration:
    """What was seen: states up to block names, transitions between them, the longest shortest path."""

    num_states: int
    num_transitions: int
    depth: int


def explore(num_blocks: int, max_states: int) -> Exploration:
    """Visit all states; AssertionError where an invariant breaks. OverflowError beyond ``max_states``."""
    first = KvMachine()
    first.start(num_blocks=num_blocks, max_slots=2, cache=PrefixCache.ON, max_events=1000)
    seen, queue, num_transitions, depth = {state_of(first)}, deque([(first, 0)]), 0, 0
    while queue:
        machine, distance = queue.popleft()
        for action, arguments in _actions(machine):
            successor = clone(machine)
            getattr(successor, action)(*arguments) if hasattr(successor, action) else _crash(successor)
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
    twin = KvMachine()
    twin.__dict__.update(copy.deepcopy({name: machine.__dict__[name] for name in _FIELDS}))
    twin.manager.table_SM = twin.manager._tables.table_SM
    return twin


def state_of(machine: KvMachine) -> tuple[Any, ...]:
    """All that matters to the future, with blocks named in the order in which they are met, steps by age."""
    manager, names = machine.manager, {}  # type: ignore[var-annotated]

    def named(blocks: list[int]) -> tuple[int, ...]:
        return tuple(names.setdefault(block, len(names)) for block in blocks)

    requests = sorted(machine.requests.values(), key=lambda r: r.slot)
    rows = [(r.slot, tuple(r.tokens), r.num_computed, r.is_tainted, named(machine._row(r))) for r in requests]
    slot_of = {id(request): request.slot for request in requests}
    steps = tuple(
        (
            named(sorted(s.blocks, key=lambda b: names.get(b, 99))),
            tuple((slot_of.get(id(r)), n) for _, r, n in s.commits),
        )
        for s in machine.steps
    )
    fence = manager._pool.fence
    begun = [step.number for step in machine.steps]
    holds = tuple(
        (begun.index(last) if last in begun else -1, named(blocks.tolist())) for last, _, blocks in fence._holds
    )
    lru, held = named(manager._pool.lru.to_array().tolist()), named(fence.to_array().tolist())
    index = manager._index
    entries = {int(index.entry_P[b]): b for b in index.block_of.values()} | {0: -1}
    links = tuple(
        (names[b], index.content(b), names.get(entries.get(int(index.parent_entry_P[b]), -2), -1))
        for b in sorted(index.block_of.values(), key=lambda b: names.get(b, 99))
        if b in names
    )
    chains = tuple(
        (slot, len(c), tuple(named([entries.get(e, -2)]) for e in c.entries))
        for slot, c in sorted(manager._chains.items())
    )
    copies = tuple(named(list(pair)) for pair in manager._growth.copies.pending)
    return tuple(rows), steps, holds, lru, held, links, chains, copies, machine.has_twins, frozenset(machine.joined)


def _actions(machine: KvMachine) -> Iterator[tuple[str, tuple[Any, ...]]]:
    if len(machine.requests) < MAX_LIVE:
        for tokens in PROMPTS.values():
            yield "admit", (list(tokens), "", None)
    if machine.requests and len(machine.requests) < MAX_LIVE:
        yield "fork", (0, 3)
    can_step = machine.requests and len(machine.steps) < MAX_IN_FLIGHT
    if can_step and all(len(r.tokens) < MAX_TOKENS for r in machine.requests.values()):
        everybody = [(i, 2, 0) for i in range(len(machine.requests))]
        yield "plan", (everybody, "plan")
        yield "plan", (everybody, "end")
    if machine.steps:
        yield "end_step", ()
    for i in range(len(machine.requests)):
        yield "release", (i, "once")
    if machine.steps:
        yield "crash", ()


def _crash(machine: KvMachine) -> None:
    """A step failed: what its requests hold is garbage, all of them end."""
    for name in list(machine.requests):
        machine._taint(machine.requests[name])
        machine.manager.release(machine.requests.pop(name).slot, name)
    machine.joined.clear()
    while machine.steps:
        machine.end_step()
