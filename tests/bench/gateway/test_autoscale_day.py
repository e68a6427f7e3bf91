"""The simulation behind the figures of `--autoscale`: what it counts, and that the policy pays on the trace."""

from pathlib import Path

import pytest

from bench.gateway.autoscale import Arrival, Machine, a_day, count_flaps, read_trace, share_at, simulate
from octavo.cli.serve.autoscale import AutoscalePolicy


def test_the_day_is_thinnest_at_four_in_the_morning_and_whole_in_the_afternoon() -> None:
    assert share_at(4 * 3600) == pytest.approx(0.15)
    assert share_at(16 * 3600) == pytest.approx(1.0)
    trace = [Arrival(float(second), 100, 10) for second in range(600)]
    times = [each.time_s for each in a_day(trace, hours=24, pace=1.0)]
    assert times == sorted(times)
    assert sum(time_s // 3600 == 16 for time_s in times) > 5 * sum(time_s // 3600 == 4 for time_s in times)


def test_a_change_that_is_taken_back_soon_is_a_flap() -> None:
    assert count_flaps([]) == count_flaps([(0.0, 1)]) == 0
    assert count_flaps([(0.0, 1), (100.0, 1), (200.0, -1), (300.0, 2), (2000.0, -1)]) == 2


def test_every_request_is_served_and_hours_are_those_of_all_workers() -> None:
    arrivals = [Arrival(second / 2, 500, 50) for second in range(1200)]
    one = simulate(iter(arrivals), Machine(), hours=0.5, name="2", fixed=2)
    assert (one.num_requests, one.gpu_hours, one.max_workers) == (1200, pytest.approx(1.0), 2)
    assert one.queue_p99_s < 1.0


def test_a_peak_is_followed_up_and_down() -> None:
    """Ten minutes of more than one worker does, then little."""
    peak = [Arrival(n / 10, 1000, 200) for n in range(6000)]
    rest = [Arrival(600.0 + n, 1000, 200) for n in range(3000)]
    policy = AutoscalePolicy(floor=1, ceiling=8)
    scaled = simulate(iter(peak + rest), Machine(), hours=1.0, name="auto", policy=policy)
    fixed = simulate(iter(peak + rest), Machine(), hours=1.0, name="1", fixed=1)
    assert scaled.num_requests == fixed.num_requests == 9000
    assert 2 < scaled.max_workers <= 8
    assert scaled.mean_workers < scaled.max_workers - 1
    assert scaled.queue_p99_s < fixed.queue_p99_s / 4


def test_on_the_trace_it_costs_less_than_the_number_that_bears_the_peak(shared: Path) -> None:
    """Four hours around four in the morning, where a fixed number would stand idle."""
    path = shared / "data/traces/AzureLLMInferenceTrace_conv.csv"
    if not path.exists():
        pytest.skip("the Azure trace is not in ../shared/data")
    trace, machine = read_trace(path), Machine()
    policy = AutoscalePolicy(floor=1, ceiling=8)
    scaled = simulate(a_day(trace, hours=4, pace=2.0), machine, hours=4, name="auto", policy=policy)
    fixed = simulate(a_day(trace, hours=4, pace=2.0), machine, hours=4, name="4", fixed=4)
    assert scaled.gpu_hours < 0.75 * fixed.gpu_hours
    assert scaled.queue_p99_s < 2.0
