"""A scenario run twice: the same seed must give the same trace, or nothing that the simulation says can be repeated."""

from dataclasses import replace

from sim.journal import Report
from sim.scenario import Scenario
from sim.world import simulate


def simulate_twice(scenario: Scenario) -> Report:
    """The first report, with a violation where the second run's trace differs."""
    first, second = simulate(scenario), simulate(scenario)
    if first.trace == second.trace:
        return first
    return replace(first, violations=(*first.violations, f"two runs differ: {first.trace[:12]}, {second.trace[:12]}"))
