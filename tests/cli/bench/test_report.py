"""From outcomes to vLLM's columns, and arrivals to their times."""

import math
import statistics
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from octavo.cli.bench.load import Measured, Outcome, due_times
from octavo.cli.bench.picture import picture
from octavo.cli.bench.report import Plan, figures_of, latencies_ms, report, sweep_table

# Two requests that succeed, one second apart, and one that fails.
OUTCOMES = [
    Outcome(begin_s=0.0, latency_s=1.0, arrivals_s=(0.2, 0.4, 1.0), num_prompt=10, num_output=5),
    Outcome(begin_s=1.0, latency_s=1.5, arrivals_s=(0.4, 1.4), num_prompt=20, num_output=3),
    Outcome(begin_s=0.5, latency_s=0.1, error="QUEUE_FULL"),
]
MEASURED = Measured(outcomes=OUTCOMES, client_cpu_share=0.5)
PLAN = Plan(rate=math.inf, burstiness=1.0, max_concurrency=None)


def test_figures_are_those_of_vllm() -> None:
    found = figures_of(PLAN, MEASURED)
    expected = {
        "request_rate": "inf",
        "duration": 2.5,
        "completed": 2,
        "failed": 1,
        "total_input_tokens": 30,
        "total_output_tokens": 8,
        "request_throughput": 2 / 2.5,
        "output_throughput": 8 / 2.5,
        "total_token_throughput": 38 / 2.5,
        "max_concurrent_requests": 1,
        "mean_ttft_ms": 300.0,
        "median_ttft_ms": 300.0,
        "p99_ttft_ms": 398.0,  # linear between the two, as numpy has it
        "mean_tpot_ms": (800 / 4 + 1000 / 2) / 2,
        "median_itl_ms": 600.0,
        "mean_itl_ms": 600.0,
        "p99_e2el_ms": 1495.0,
    }
    assert found["errors_by_reason"] == {"QUEUE_FULL": 1}
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_the_table_has_the_rows_of_vllm_bench_serve() -> None:
    text = report(figures_of(PLAN, MEASURED))
    labels = [line.partition(":")[0] for line in text.splitlines() if ":" in line]
    latencies = [
        f"{kind} {name} (ms)" for name in ("TTFT", "TPOT", "ITL", "E2EL") for kind in ("Mean", "Median", "P99")
    ]
    assert labels == [
        "Successful requests",
        "Failed requests",
        "Benchmark duration (s)",
        "Total input tokens",
        "Total generated tokens",
        "Request throughput (req/s)",
        "Output token throughput (tok/s)",
        "Peak output token throughput (tok/s)",
        "Peak concurrent requests",
        "Total Token throughput (tok/s)",
        *latencies,
        "note",
    ]
    assert text.splitlines()[1] == "Successful requests:                     2"
    assert text.splitlines()[-1] == "note: 1 requests failed: QUEUE_FULL"


def test_a_client_that_was_the_bottleneck_is_told() -> None:
    text = report(figures_of(PLAN, Measured(outcomes=OUTCOMES, client_cpu_share=0.97)))
    assert "note: a client process was busy 97% of the time: measure again with more --processes" in text


def test_where_nothing_succeeded_the_figures_are_zero() -> None:
    found = figures_of(PLAN, Measured(outcomes=OUTCOMES[2:], client_cpu_share=0.0))
    assert (found["completed"], found["mean_ttft_ms"], found["output_throughput"]) == (0, 0.0, 0.0)
    assert figures_of(PLAN, Measured(outcomes=[], client_cpu_share=0.0))["duration"] == 0.0


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_burstiness_asked_for(burstiness: float) -> None:
    """A gamma distribution of shape k: the gaps' deviation is their mean by the root of k."""
    times = due_times(20_001, 50.0, burstiness, seed=3)
    gaps = [after - before for before, after in pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1 / 50 / math.sqrt(burstiness), rel=0.1)
    assert times[0] == 0.0


def test_at_an_infinite_rate_all_come_at_once() -> None:
    assert due_times(3, math.inf, 1.0, seed=0) == [0.0, 0.0, 0.0]


def test_pictures_are_whole_svg_for_one_run_and_for_a_sweep() -> None:
    runs = [
        figures_of(
            Plan(rate=rate, burstiness=1.0, max_concurrency=None), Measured(outcomes=OUTCOMES, client_cpu_share=0)
        )
        for rate in (1.0, 10.0, math.inf)
    ]
    for count in (1, 3):
        text = picture("a <model> & more", runs[:count], latencies_ms(OUTCOMES[:2]))
        root = ElementTree.fromstring(text)
        lines = [element for element in root.iter() if element.tag.endswith("polyline")]
        assert len(lines) == (4 if count == 1 else 7)
        numbers = [
            float(part) for line in lines for point in line.attrib["points"].split() for part in point.split(",")
        ]
        assert all(0 <= number <= 400 for number in numbers)
    empty = figures_of(PLAN, Measured(outcomes=[], client_cpu_share=0.0))
    assert ElementTree.fromstring(picture("nothing", [empty], latencies_ms([]))) is not None


def test_a_sweep_is_a_line_a_run() -> None:
    runs = [
        figures_of(
            Plan(rate=4.0, burstiness=1.0, max_concurrency=limit), Measured(outcomes=OUTCOMES, client_cpu_share=0)
        )
        for limit in (1, None)
    ]
    head, *lines = sweep_table(runs).splitlines()
    assert head.split()[:3] == ["rate", "concurrency", "req/s"]
    assert [line.split()[:5] for line in lines] == [["4.0", "1", "0.8", "3.2", "1"], ["4.0", "-", "0.8", "3.2", "1"]]
