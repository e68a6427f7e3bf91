"""The dashboard and vLLM's own board, with the answers of a real Prometheus that scrapes a service under load."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.services.dashboard_load import watched
from tests.support.services.dashboard_picture import (
    RATE_INTERVAL,
    Drawn,
    dashboard,
    evaluated,
    legend,
    picture,
    tick,
    titles,
)
from tests.support.services.prometheus import HOW_TO_GET, Line, concrete, is_installed

SECONDS = 14.0
needs_prometheus = pytest.mark.skipif(not is_installed(), reason=HOW_TO_GET)

STILL = {"Blocks leaked, audit violations": "anything but 0 is a defect, and no load causes one"}
"""Panels that show 0 and nothing else, and why."""


def quantiles(name: str) -> tuple[str, ...]:
    """What vLLM's board asks of a histogram of seconds: four quantiles and the mean."""
    bucket, total, count = (
        f'rate(vllm:{name}_{part}{{model_name="$model_name"}}[$__rate_interval])' for part in _PARTS
    )
    return (
        *(f"histogram_quantile({q}, sum by(le) ({bucket}))" for q in (0.99, 0.95, 0.9, 0.5)),
        f"{total}\n/\n{count}",
    )


def per_second(name: str) -> str:
    return f'rate(vllm:{name}{{model_name="$model_name"}}[$__rate_interval])'


def more_of(name: str, by: str) -> str:
    return f'sum by({by}) (increase(vllm:{name}{{model_name="$model_name"}}[$__rate_interval]))'


def value_of(name: str) -> str:
    return f'vllm:{name}{{model_name="$model_name"}}'


_PARTS = ("bucket", "sum", "count")
VLLM_PANELS: Mapping[str, tuple[str, ...]] = {
    "E2E Request Latency": quantiles("e2e_request_latency_seconds"),
    "Token Throughput": (per_second("prompt_tokens_total"), per_second("generation_tokens_total")),
    "Inter Token Latency": quantiles("inter_token_latency_seconds"),
    "Time Per Output Token Latency (before)": quantiles("time_per_output_token_seconds"),
    "Scheduler State": (value_of("num_requests_running"), value_of("num_requests_waiting")),
    "Time To First Token Latency": quantiles("time_to_first_token_seconds"),
    "Cache Utilization": (value_of("kv_cache_usage_perc"),),
    "Cache Utilization (before)": (value_of("gpu_cache_usage_perc"),),
    "Request Prompt Length": (more_of("request_prompt_tokens_bucket", "le"),),
    "Request Generation Length": (more_of("request_generation_tokens_bucket", "le"),),
    "Finish Reason": (more_of("request_success_total", "finished_reason"),),
    "Queue Time": (per_second("request_queue_time_seconds_sum"),),
    "Requests Prefill and Decode Time": (
        per_second("request_prefill_time_seconds_sum"),
        per_second("request_decode_time_seconds_sum"),
    ),
    "Max Generation Token in Sequence Group": (per_second("request_max_num_generation_tokens_sum"),),
}
"""vLLM's board (examples/observability/prometheus_grafana), and what two of its panels asked for in former releases."""


def over_the_range(name: str) -> tuple[str, ...]:
    """What the board of performance asks of a histogram."""
    bucket, total, count = (f"vllm:{name}_{part}[$__range]" for part in _PARTS)
    quantiles = (f"histogram_quantile({q}, sum by(le) (rate({bucket})))" for q in (0.99, 0.90, 0.50))
    return (*quantiles, f"(sum(increase({total})) / sum(increase({count})))")


_ANY = '{model_name=~"$model_name"}[$__rate_interval]'
VLLM_STATISTICS: Mapping[str, tuple[str, ...]] = {
    "Performance: E2E Latency": over_the_range("e2e_request_latency_seconds"),
    "Performance: TTFT": over_the_range("time_to_first_token_seconds"),
    "Performance: ITL": over_the_range("inter_token_latency_seconds"),
    "Query: Successful Requests": (f"sum by (model_name) (\n  rate(vllm:request_success_total{_ANY})\n)",),
    "Query: Latency": tuple(
        f"histogram_quantile({q}, sum by(le, model_name) (rate(vllm:e2e_request_latency_seconds_bucket{_ANY})))"
        for q in (0.50, 0.90, 0.99)
    ),
    "Query: Input Token Size": (
        f"sum by (le, model_name) (rate(vllm:request_prompt_tokens_bucket{_ANY}))",
        f"histogram_quantile(0.90, sum by(le, model_name) (rate(vllm:request_prompt_tokens_bucket{_ANY})))",
        f"sum(rate(vllm:prompt_tokens_total{_ANY}))\n/\nsum(rate(vllm:request_success_total{_ANY}))",
    ),
    "Query: Tokens Over Time": (
        f"sum by (model_name) (rate(vllm:prompt_tokens_total{_ANY}))",
        f"sum(rate(vllm:generation_tokens_total{_ANY}))",
    ),
}
"""vLLM's boards of statistics (examples/observability/dashboards/grafana), panels that ask alike together."""
ALL_OF_VLLM = {**VLLM_PANELS, **VLLM_STATISTICS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the boards show. vllm: by expression. models: what vLLM's board offers to choose from."""

    drawn: list[Drawn]
    vllm: dict[str, list[Line]]
    models: list[str]
    start_s: float
    end_s: float


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    with watched(tmp_path_factory.mktemp("service"), seconds=SECONDS) as service:
        prometheus, start_s, end_s = service.prometheus, service.start_s, service.end_s
        (labels,) = prometheus.now('count by (model_name) ({__name__=~"vllm:.*"})')
        model = labels["metric"]["model_name"]
        variables = {"rate_interval": RATE_INTERVAL, "model_name": model, "__range": f"{round(end_s - start_s)}s"}
        asked = {each: concrete(each, **variables) for each in _vllm_expressions()}
        yield Seen(
            drawn=evaluated(service),
            vllm={each: prometheus.over(expression, start_s, end_s) for each, expression in asked.items()},
            models=prometheus.ask("label/model_name/values"),
            start_s=start_s,
            end_s=end_s,
        )


def _vllm_expressions() -> list[str]:
    return [expression for panel in ALL_OF_VLLM.values() for expression in panel]


def is_moving(lines: list[Line]) -> bool:
    return any(value and math.isfinite(value) for line in lines for _, value in line.points)


@needs_prometheus
@pytest.mark.slow
def test_every_expression_of_every_panel_has_data(seen: Seen) -> None:
    assert {each.title: each.empty for each in seen.drawn if each.empty} == {}


@needs_prometheus
@pytest.mark.slow
def test_every_panel_shows_what_the_load_does(seen: Seen) -> None:
    still = {each.title for each in seen.drawn if each.panel["type"] != "row" and not each.moves}
    assert still == STILL.keys()


@needs_prometheus
@pytest.mark.slow
@pytest.mark.parametrize("title", ALL_OF_VLLM)
def test_every_panel_of_vllms_boards_shows_octavo(seen: Seen, title: str) -> None:
    assert [expression for expression in ALL_OF_VLLM[title] if not is_moving(seen.vllm[expression])] == []
    assert seen.models == ["folio-chat"]


@needs_prometheus
@pytest.mark.slow
def test_the_picture_has_every_panel_with_its_lines(seen: Seen, tmp_path: Path) -> None:
    figure = picture(seen.drawn, seen.start_s, seen.end_s)
    figure.savefig(tmp_path / "dashboard.png")
    assert (tmp_path / "dashboard.png").read_bytes().startswith(b"\x89PNG")
    drawn = {
        axes.get_label(): [line.get_label() for line in axes.lines] for axes in figure.axes if axes.get_title("left")
    }
    assert drawn == {each.title: [name for name, _ in each.lines] for each in seen.drawn if each.panel["type"] != "row"}
    assert not any("{{" in name for names in drawn.values() for name in names)


def test_the_picture_of_the_page_is_of_the_present_dashboard(repository: Path) -> None:
    """Else: `python -m tests.support.services.dashboard_picture docs/pictures/dashboard.png`."""
    stored = (repository / "docs/pictures/dashboard.png").read_bytes()
    assert b"Description\x00" + titles(dashboard()["panels"]).encode("latin-1") in stored


def test_legends_are_filled_in_as_grafana_does() -> None:
    assert legend("{{code}} {{ reason }}", {"code": "OK", "reason": ""}) == "OK"
    assert legend("p50", {}) == "p50"


@pytest.mark.parametrize(
    ("unit", "value", "text"),
    [
        ("s", 0.0, "0 s"), ("s", 0.00025, "250 µs"), ("s", 0.2, "200 ms"), ("s", 12.0, "12 s"),
        ("percentunit", 0.25, "25%"), ("bytes", 2**21, "2 MiB"), ("Bps", 1500.0, "1.5 kB/s"),
        ("reqps", 0.5, "0.5 req/s"), ("short", 1200.0, "1.2 K"), ("short", 3.0, "3"),
    ],
)  # fmt: skip
def test_values_have_the_units_of_the_dashboard(unit: str, value: float, text: str) -> None:
    assert tick(unit)(value, None) == text


def test_every_unit_of_the_dashboard_is_known() -> None:
    """Another one would be drawn as a bare number."""
    units = {panel["fieldConfig"]["defaults"]["unit"] for panel in dashboard()["panels"] if panel["type"] != "row"}
    assert units <= {"s", "percentunit", "bytes", "Bps", "reqps", "short"}
    assert {panel["type"] for panel in dashboard()["panels"]} == {"row", "timeseries"}
