"""The whole service over two tiers of blocks: small pools, copies that take their time, workers that die in the middle
of them, steps with copies that fail."""

import random

import msgspec
import pytest

from octavo.blockmgr.manager import BlockManager
from sim.scenario import Fault, FaultKind, Scenario, SimConfig
from sim.shrink import simulate_twice
from sim.swarm import COPYING_POINT, scenario_of
from sim.world import simulate


def with_tier(seed: int, *faults: FaultKind, num_requests: int = 40) -> Scenario:
    """A seed of the swarm with a pool that is too small, a tier behind it, prompts that come again, and these
    faults."""
    scenario, rng = scenario_of(seed, num_requests=num_requests), random.Random(seed)
    config: SimConfig = msgspec.structs.replace(
        scenario.config,
        num_workers=1,
        block_size=4,
        num_blocks=max(60, -(-scenario.config.max_model_len // 4) + 8),
        num_host_blocks=rng.choice((30, 300)),
        max_copies_in=rng.choice((1, 4)),
        max_in_flight=1 + seed % 2,
        copy_s=0.0001,
        step_prefill_s=0.002,
        has_prefix_cache=True,
        audit_every_steps=1,
    )
    added = [
        Fault(kind=kind, at_s=rng.uniform(0.0, 2.0), detail=COPYING_POINT if kind is FaultKind.CRASH_AT else "")
        for kind in faults
        for _ in range(4)
    ]
    return msgspec.structs.replace(scenario, config=config, faults=tuple(sorted(added, key=lambda fault: fault.at_s)))


@pytest.mark.parametrize("seed", range(3))
def test_a_worker_that_is_killed_while_it_copies_blocks_costs_nobody_a_token(seed: int) -> None:
    report = simulate_twice(with_tier(seed, FaultKind.CRASH_AT))
    assert report.violations == ()
    assert report.points[COPYING_POINT] > 0
    assert report.faults["crash_at"] > 0


@pytest.mark.parametrize("seed", range(3, 6))
def test_a_failed_step_with_copies_is_trusted_by_nobody(seed: int) -> None:
    report = simulate_twice(with_tier(seed, FaultKind.ENGINE_ERROR, FaultKind.OUT_OF_MEMORY))
    assert report.violations == ()
    assert report.points[COPYING_POINT] > 0


def test_a_block_that_is_read_before_it_is_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockManager, "is_awaited", lambda self, slot: False)
    assert any(simulate(with_tier(seed, num_requests=60)).violations for seed in range(6, 12))
