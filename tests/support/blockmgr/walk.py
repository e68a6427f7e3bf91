"""Long seeded walks through the state machine of the block manager, without Hypothesis's bookkeeping: no shrinking,
but many times the steps per second, and weights that keep the pool busy."""

import random

from octavo.blockmgr import PrefixCache
from tests.support.blockmgr.machine import MAX_REQUESTS, KvMachine

_WEIGHTS = {
    "admit": 4, "grow": 1, "grow_many": 1, "plan": 10, "end_step": 7, "fork": 1, "release": 3, "rare": 1, "swap": 3,
}  # fmt: skip


def walk(seed: int, num_rules: int = 120) -> KvMachine:
    """One walk; AssertionError where an invariant breaks. Everything follows from the seed."""
    rng = random.Random(seed)
    machine = KvMachine()
    machine.start(
        num_blocks=rng.randint(4, 12),
        max_slots=rng.randint(3, 6),
        cache=PrefixCache.OFF if rng.random() < 0.1 else PrefixCache.ON,
        max_events=rng.choice([3, 1000, 1000]),
        num_host_blocks=rng.choice([0, 0, 2, 6, 20, 20]),
        max_copies_in=rng.choice([1, 2, 100]),
    )
    rare = rng.sample(["nothing", "taint", "flush", "toggle weak hash"], 2)
    for _ in range(num_rules):
        _step(machine, rng, rare)
        check(machine)
    machine.teardown()
    return machine


def check(machine: KvMachine) -> None:
    """Every invariant."""
    machine.audit_is_clean_and_counts_agree()
    machine.every_row_is_as_long_as_asked()
    machine.the_index_tells_the_truth()
    machine.tails_are_given_up_before_heads()
    machine.events_rebuild_the_index()


def _step(machine: KvMachine, rng: random.Random, rare: list[str]) -> None:
    rule = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
    pick, has_requests = rng.randrange(100), bool(machine.requests)
    has_room = len(machine.requests) < MAX_REQUESTS
    if rule == "admit" and has_room:
        machine.admit(
            _tokens(rng), rng.choice(["", "", "A"]), rng.choice([None, None, 1, 4, 7, 12]), rng.choice([9, 9, 1])
        )
    elif rule == "grow" and has_requests:
        machine.grow(pick, rng.randint(0, 12))
    elif rule == "grow_many" and has_requests:
        machine.grow_many({rng.randrange(100) for _ in range(3)}, rng.randint(0, 4))
    elif rule == "plan" and has_requests and len(machine.steps) < 3:
        work = [(rng.randrange(100), rng.choice([1, 2, 9]), rng.randrange(2)) for _ in range(rng.randint(1, 4))]
        machine.plan(work, rng.choice(["plan", "end"]))
    elif rule == "end_step" and machine.steps:
        machine.end_step()
    elif rule == "fork" and has_requests and has_room:
        machine.fork(pick, rng.randint(1, 12))
    elif rule == "release" and has_requests:
        machine.release(pick, rng.choice(["once", "once", "once", "twice", "stranger"]))
    elif rule == "swap" and machine.manager.config.num_host_blocks:
        _swap(machine, rng, pick)
    elif rule == "rare" and rng.random() < 0.5:
        machine.disturb(pick, rng.choice(rare))


def _swap(machine: KvMachine, rng: random.Random, pick: int) -> None:
    what = rng.choice(["out", "out", "in", "in", "away"])
    if what == "out" and machine.requests:
        while machine.steps and rng.random() < 0.9:
            machine.end_step()
        machine.swap_out(pick)
    elif what == "in" and machine.swapped and len(machine.requests) < MAX_REQUESTS:
        machine.swap_in(pick)
    elif what == "away" and machine.swapped and rng.random() < 0.5:
        machine.drop_swapped(pick, rng.choice(["once", "twice"]))


def _tokens(rng: random.Random) -> list[int]:
    head = [0] * rng.randint(0, 8)
    return head + [rng.randrange(2) for _ in range(rng.randint(1, 9 - len(head)))]
