"""Named places for faults: nothing until they are armed."""

import timeit
from collections.abc import Iterator

import pytest

from sim.edges import fault_points
from sim.edges.fault_points import fault_point


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    fault_points.disarm()


def test_an_armed_point_calls_with_its_name_and_may_raise() -> None:
    passed: list[str] = []
    fault_points.arm(passed.append)
    fault_point("here")
    assert passed == ["here"]

    def fail(name: str) -> None:
        raise RuntimeError(name)

    fault_points.arm(fail)
    with pytest.raises(RuntimeError, match="there"):
        fault_point("there")


def test_a_disarmed_point_does_nothing_and_costs_next_to_nothing() -> None:
    fault_points.arm(lambda name: pytest.fail(name))
    fault_points.disarm()
    fault_point("here")
    seconds = min(timeit.repeat(lambda: fault_point("here"), number=20_000, repeat=5)) / 20_000
    assert seconds < 2e-6  # some tens of nanoseconds, on a machine that does other things too
