"""Any order of calls keeps invariants I1 to I13."""

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.support.blockmgr.machine import KvMachine
from tests.support.blockmgr.walk import walk


def test_any_order_of_calls_keeps_every_invariant() -> None:
    run_state_machine_as_test(KvMachine, settings=settings(max_examples=150, stateful_step_count=50))


@pytest.mark.parametrize("decade", range(10))
def test_a_long_walk_keeps_every_invariant(decade: int) -> None:
    for seed in range(10 * decade, 10 * decade + 10):
        walk(seed)
