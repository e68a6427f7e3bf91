"""Some seeds, and twice one of six and every reproduction that was ever kept. The many run by `make sim`."""

from collections import Counter
from pathlib import Path

import pytest

from sim.scenario import FaultKind, load
from sim.shrink import simulate_twice
from sim.swarm import scenario_of
from sim.world import simulate

SEEDS = range(100_000, 100_018)
REGRESSIONS = sorted((Path(__file__).parent / "regressions").glob("*.json"))


@pytest.mark.parametrize("first", range(SEEDS.start, SEEDS.stop, 6))
def test_every_seed_ends_and_balances_and_one_of_six_repeats(first: int) -> None:
    scenarios = [scenario_of(seed, num_requests=20) for seed in range(first, first + 6)]
    reports = [simulate_twice(scenarios[0]), *map(simulate, scenarios[1:])]
    assert {report.seed: report.violations for report in reports if report.violations} == {}
    assert sum(report.outcomes["OK"] for report in reports) > 25


def test_the_swarm_has_odd_pools_and_every_kind_of_fault() -> None:
    scenarios = [scenario_of(seed, num_requests=1) for seed in range(300)]
    kinds = Counter(fault.kind for scenario in scenarios for fault in scenario.faults)
    assert set(kinds) == set(FaultKind)
    assert {scenario.config.block_size for scenario in scenarios} >= {1, 2, 3, 5, 7, 13, 31}
    assert min(scenario.config.num_blocks for scenario in scenarios) < 10
    assert max(scenario.config.num_blocks for scenario in scenarios) > 3500
    assert any(not scenario.faults for scenario in scenarios)


@pytest.mark.parametrize("path", REGRESSIONS, ids=lambda path: path.stem)
def test_what_failed_once_does_not_fail_again(path: Path) -> None:
    assert simulate_twice(load(path)).violations == ()
