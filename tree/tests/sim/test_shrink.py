"""Failing scenarios become small, and survive as files."""

from pathlib import Path

from sim.scenario import Fault, FaultKind, RequestSpec, Scenario, SimConfig, load, save
from sim.shrink import shrink
from sim.swarm import scenario_of


def scenario() -> Scenario:
    requests = tuple(RequestSpec(index=i, at_s=i, prompt=(3,), max_tokens=1, seed=i) for i in range(50))
    faults = tuple(Fault(kind=FaultKind.CRASH, at_s=i) for i in range(9))
    return Scenario(seed=1, config=SimConfig(), requests=requests, faults=faults)


def needs(scenario: Scenario) -> bool:
    indexes = {spec.index for spec in scenario.requests}
    return {7, 33} <= indexes and any(fault.at_s == 4 for fault in scenario.faults)


def test_only_what_is_needed_is_left() -> None:
    small = shrink(scenario(), fails=needs)
    assert [spec.index for spec in small.requests] == [7, 33]
    assert [fault.at_s for fault in small.faults] == [4]


def test_what_does_not_fail_stays_as_it_is() -> None:
    assert shrink(scenario(), fails=lambda _: False) == scenario()


def test_it_ends_within_its_runs_with_something_that_fails() -> None:
    runs: list[Scenario] = []

    def fails(candidate: Scenario) -> bool:
        runs.append(candidate)
        return needs(candidate)

    assert needs(shrink(scenario(), fails=fails, max_runs=10))
    assert len(runs) <= 10


def test_a_scenario_comes_back_from_its_file(tmp_path: Path) -> None:
    original = scenario_of(11, num_requests=30)
    save(original, tmp_path / "seed.json")
    assert load(tmp_path / "seed.json") == original
