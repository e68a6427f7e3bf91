"""Any mix of swap, eviction, fork, cancel, pause and preemption gives the tokens of a pool that never evicts: the
oracle's tokens are a hash of what blocks really hold, so a block that is read before it is back, or is another's,
shows."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from octavo.blockmgr.host_tier import HostTier
from octavo.blockmgr.ids import PrefixCache
from octavo.blockmgr.manager import BlockManager
from octavo.blockmgr.prefix_index import PrefixIndex
from octavo.worker.runners.interface import RunnerError, RunnerOutOfMemory
from octavo.worker.runners.oracle.faults import OracleFaults
from octavo.worker.runners.oracle.runner import OracleStore
from octavo.worker.scheduler.request import Request
from octavo.worker.scheduler.request_table import RequestTable
from tests.support.blockmgr.host_mutants import give_up_the_queue_only, move_and_leave_the_name, pop_and_keep
from tests.support.worker.host_traffic import drive
from tests.support.worker.scheduling import World, WorldConfig


def world_of(seed: int) -> World:
    """Small pools of every kind; in some seeds steps fail."""
    chance = np.random.default_rng(seed)
    errors = [RunnerError("broken"), RunnerOutOfMemory("short")] if seed % 4 == 3 else []
    failing = {int(step): errors[i % 2] for i, step in enumerate(chance.integers(5, 90, 3)) if errors}
    return World(
        WorldConfig(
            num_blocks=int(chance.integers(18, 40)),
            num_host_blocks=int(chance.choice([5, 20, 200])),
            max_copies_in=int(chance.choice([1, 3, 64])),
            block_size=int(chance.choice([1, 2, 4])),
            max_num_seqs=4,
            max_batch_tokens=int(chance.integers(4, 30)),
            max_model_len=16 + 16 * int(chance.integers(0, 2)),
            max_in_flight=1 + seed % 2,
            prefix_cache=PrefixCache.OFF if seed % 9 == 8 else PrefixCache.ON,
            faults=OracleFaults(collect_errors=failing if seed % 8 == 3 else {}, launch_errors=failing)
            if errors
            else OracleFaults(),
        )
    )


def run(seed: int) -> Counter[str]:
    world = world_of(seed)
    drive(world, seed)
    world.check_complete()
    host, counters = world.blocks.host, world.scheduler.counters
    return Counter(
        copied_out=host.num_copied_out,
        copied_in=host.num_copied_in,
        swaps=counters.num_swaps,
        recomputed=counters.num_preemptions - counters.num_swaps,
        failed=counters.num_ended["ENGINE_ERROR"] + counters.num_ended["OUT_OF_MEMORY"],
    )


@pytest.mark.parametrize("decade", range(8))
def test_any_traffic_over_two_tiers_gives_the_tokens_of_one_that_never_evicts(decade: int) -> None:
    seen = sum((run(seed) for seed in range(10 * decade, 10 * decade + 10)), Counter[str]())
    assert all(seen[name] > 0 for name in ("copied_out", "copied_in", "swaps", "recomputed", "failed")), seen


@pytest.mark.parametrize("seed", [12, 16, 24])
def test_requests_that_start_over_while_blocks_wait_to_come_back_leave_no_wrong_block_behind(seed: int) -> None:
    short = {step: RunnerOutOfMemory("short") for step in range(3 + seed % 5, 200, 5)}
    config = replace(
        world_of(seed).config, num_host_blocks=20, max_copies_in=1, faults=OracleFaults(collect_errors=short)
    )
    world = World(config)
    drive(world, seed)
    world.check_complete()


def _nothing(*_: object) -> None:
    """Left out."""


def _copied_in_part(store: OracleStore, copies_C2: np.ndarray) -> None:
    for host_block, block in copies_C2.tolist()[1:]:
        store.tokens_PB[block], store.positions_PB[block] = store.host_H2B[host_block]


def _always_back(*_: object) -> bool:
    return False


def _trust_all(*_: object) -> list[int]:
    return []


def _release_alone(table: RequestTable, request: Request) -> None:
    """Forgets that the request has blocks on the host."""
    drop_swapped, table.blocks.drop_swapped = table.blocks.drop_swapped, _nothing  # type: ignore[method-assign]
    try:
        _forget(table, request)
    finally:
        table.blocks.drop_swapped = drop_swapped  # type: ignore[method-assign]


_forget = RequestTable._forget

PLANTED: dict[str, list[tuple[type, str, Any]]] = {
    "a block is read before it is back": [(BlockManager, "is_awaited", _always_back)],
    "a host block is freed twice": [(HostTier, "pop_swapped", pop_and_keep)],
    "an entry points to the wrong tier": [(PrefixIndex, "move", move_and_leave_the_name)],
    "a cancel in the middle of a copy leaves the promise": [(HostTier, "cancel_copies_in", give_up_the_queue_only)],
    "a cancel leaves blocks on the host": [(RequestTable, "_forget", _release_alone)],
    "one block of a copy is left out": [(OracleStore, "copy_in", _copied_in_part)],
    "nothing is copied out": [(OracleStore, "copy_out", _nothing)],
    "copies of a failed plan are trusted": [(BlockManager, "invalidate_copies", _trust_all)],
}


@pytest.mark.parametrize("mutant", PLANTED)
def test_a_planted_bug_is_found(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, attribute, replacement in PLANTED[mutant]:
        monkeypatch.setattr(owner, attribute, replacement)
    for seed in sorted(range(120), key=lambda seed: seed % 4 != 3):  # first those in which steps fail: they show most
        try:
            run(seed)
        except Exception:
            return
    pytest.fail("no traffic shows it")
