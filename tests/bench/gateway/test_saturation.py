"""The bench of saturation: what it names as being at its end, how the stand-in keeps its pace, a real run in small."""

import pytest

from bench.gateway.saturation import Load, Used, limiter, measure, table
from bench.gateway.stand_ins import Pace

LAZY = Used(thread_s=1.0, waited_s=0.5, all_s=1.0)


@pytest.mark.parametrize(
    ("arrived", "gateway", "idle", "named"),
    [
        (0.96, Used(thread_s=10.0, waited_s=0.0, all_s=10.0), 0.5, "pace"),
        (0.5, Used(thread_s=9.0, waited_s=0.5, all_s=9.0), 0.5, "gateway"),
        (0.5, Used(thread_s=3.0, waited_s=6.5, all_s=3.0), 0.0, "cores"),
        (0.5, LAZY, 0.0, "cores"),
        (0.5, LAZY, 0.5, "unknown"),
    ],
)
def test_what_is_at_its_end_is_named(arrived: float, gateway: Used, idle: float, named: str) -> None:
    spent = {"gateway": [LAZY, gateway], "worker": [LAZY], "caller": [LAZY]}
    assert limiter(arrived, spent, 10.0, idle=idle) == named


def test_a_late_step_is_made_up_for_as_far_as_it_may_be() -> None:
    pace = Pace(step_ms=10.0, prompt_token_us=100.0)
    assert pace.ends_s(5.0, 4.0, 50) == pytest.approx(5.015)
    assert Pace(step_ms=10.0, late_ms=200.0).ends_s(5.0, 4.9, 0) == pytest.approx(4.91)
    assert Pace(step_ms=10.0, late_ms=200.0).ends_s(5.0, 1.0, 0) == pytest.approx(4.81)


@pytest.mark.slow
def test_a_run_in_small() -> None:
    run = measure(2, 2, Load(streams=4, steps_per_s=20.0, seconds=0.5, callers=1))
    assert (run["streams"], run["asked_tokens_per_s"]) == (8, 160)
    assert run["tokens_per_s"] > 0
    assert run["us_per_token"]["gateway"] > 0
    assert run["limiter"] in table([run])
