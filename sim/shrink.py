"""Makes a failing scenario small: leaves out requests and faults as long as it still fails (ddmin; Zeller, 2002).

Knows nothing of what fails; any violation counts.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from sim.journal import Report
from sim.scenario import Scenario
from sim.world import simulate

T = TypeVar("T")
Fails = Callable[[Scenario], bool]


def simulate_twice(scenario: Scenario) -> Report:
    """The first report, with a violation where the second run's trace differs: what a seed shows must be repeatable."""
    first, second = simulate(scenario), simulate(scenario)
    if first.trace == second.trace:
        return first
    return replace(first, violations=(*first.violations, f"two runs differ: {first.trace[:12]}, {second.trace[:12]}"))


def _fails(scenario: Scenario) -> bool:
    return bool(simulate(scenario).violations)


def shrink(scenario: Scenario, *, fails: Fails = _fails, max_runs: int = 300) -> Scenario:
    """The smallest scenario found within ``max_runs`` runs; the same one where it does not fail."""
    budget = [max_runs]

    def still_fails(candidate: Scenario) -> bool:
        budget[0] -= 1
        return budget[0] >= 0 and fails(candidate)

    if not still_fails(scenario):
        return scenario
    for _ in range(2):
        scenario = _with_fewer("faults", scenario, still_fails)
        scenario = _with_fewer("requests", scenario, still_fails)
    return scenario


def _with_fewer(field: str, scenario: Scenario, still_fails: Fails) -> Scenario:
    def having(items: Sequence[Any]) -> Scenario:
        return msgspec.structs.replace(scenario, **{field: tuple(items)})

    return having(_minimal(getattr(scenario, field), lambda kept: still_fails(having(kept))))


def _minimal(items: Sequence[T], still_fails: Callable[[list[T]], bool]) -> list[T]:
    """Leave out ever smaller pieces."""
    kept, size = list(items), max(1, len(items) // 2)
    if kept and still_fails([]):
        return []
    while kept:
        start, has_shrunk = 0, False
        while start < len(kept):
            candidate = kept[:start] + kept[start + size :]
            if len(candidate) < len(kept) and still_fails(candidate):
                kept, has_shrunk = candidate, True
            else:
                start += size
        if size == 1 and not has_shrunk:
            break
        size = max(1, size // 2)
    return kept
