"""Dashboards and rules: every expression parses, and names only what gateway and worker export."""

import importlib.util
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from octavo.gateway.streams.stream import MOST_INTERVAL_S

SCRAPED_ANYWAY = {"up"}


def dashboard(repository: Path) -> dict[str, Any]:
    return json.loads((repository / "deploy/grafana/dashboards/octavo.json").read_text())


def rules(repository: Path) -> list[dict[str, Any]]:
    files = sorted((repository / "deploy/prometheus/rules").glob("*.yml"))
    groups = [group for file in files for group in yaml.safe_load(file.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"]]


def expressions(repository: Path) -> list[str]:
    panels = [panel for panel in dashboard(repository)["panels"] if panel["type"] != "row"]
    return [target["expr"] for panel in panels for target in panel["targets"]] + [
        rule["expr"] for rule in rules(repository)
    ]


def parse(expression: str) -> Any:
    return promql_parser.parse(expression.replace("$__rate_interval", "1m"))


def selectors(node: Any) -> Iterator[Any]:
    """Every series selector in an expression."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    for name in ("vector_selector", "expr", "lhs", "rhs", "args"):
        child = getattr(node, name, None)
        for each in child if isinstance(child, list) else [child] if child is not None else []:
            yield from selectors(each)


def names(expression: str) -> set[str]:
    return {str(selector.name) for selector in selectors(parse(expression))}


def test_the_walk_finds_names_wherever_they_stand() -> None:
    assert names("sum by (le) (rate(a_bucket[1m])) / (b or absent(c)) > 2") == {"a_bucket", "b", "c"}


def test_every_expression_names_only_series_that_are_exported(
    repository: Path, gateway_series: set[str], worker_series: set[str]
) -> None:
    known = gateway_series | worker_series | SCRAPED_ANYWAY
    unknown = {expression: missing for expression in expressions(repository) if (missing := names(expression) - known)}
    assert len(expressions(repository)) > 60
    assert unknown == {}


def test_panels_about_gateways_and_workers_select_the_right_ones(
    repository: Path, gateway_series: set[str], worker_series: set[str]
) -> None:
    panels = [panel for panel in dashboard(repository)["panels"] if panel["type"] != "row"]
    wrong = {
        target["expr"]
        for panel in panels
        for target in panel["targets"]
        for selector in selectors(parse(target["expr"]))
        if selector.name not in (gateway_series if "$gateway" in target["expr"] else worker_series)
    }
    assert wrong == set()


def test_the_dashboard_is_what_its_script_makes(repository: Path) -> None:
    spec = importlib.util.spec_from_file_location("build", repository / "deploy/grafana/build.py")
    assert spec is not None
    assert spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    assert dashboard(repository) == build.dashboard()


def test_a_panel_says_how_far_apart_rounds_of_tokens_may_be(repository: Path) -> None:
    (panel,) = [each for each in dashboard(repository)["panels"] if each["title"] == "Gateway event loop lag"]
    assert f"in rounds of up to {1e3 * MOST_INTERVAL_S:g} ms" in panel["description"]


def test_panels_do_not_overlap(repository: Path) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard(repository)["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_alias_has_vllms_spelling_and_is_recorded_once(repository: Path) -> None:
    aliases = [rule["record"] for rule in rules(repository) if "record" in rule]
    assert len(aliases) == len(set(aliases)) > 30
    assert all(alias.startswith("vllm:") for alias in aliases)


@pytest.mark.parametrize("command", ["config", "rules"])
def test_promtool_accepts_the_files(repository: Path, command: str) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    folder = repository / "deploy/prometheus"
    files = [folder / "prometheus.yml"] if command == "config" else sorted((folder / "rules").glob("*.yml"))
    done = subprocess.run(
        [promtool, "check", command, *map(str, files)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_gateway_that_never_had_a_worker_is_told_beside_one_that_has(repository: Path, tmp_path: Path) -> None:
    """It has no series of workers: they begin with the first."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    worker = 'octavo_worker_up{job="octavo-gateway", instance="INSTANCE", worker_id="w"}'
    cases = [
        (["a", "b"], {"a": 1}, ["b"]),
        (["a", "b"], {"a": 1, "b": 0}, ["b"]),
        (["a"], {"a": 1}, []),
        (["a"], {}, ["a"]),
        ([], {}, [""]),
    ]
    tests = [
        {
            "interval": "5s",
            "input_series": [
                *({"series": f'up{{job="octavo-gateway", instance="{each}"}}', "values": "1x30"} for each in gateways),
                *({"series": worker.replace("INSTANCE", each), "values": f"{up}x30"} for each, up in workers.items()),
            ],
            "promql_expr_test": [],
            "alert_rule_test": [
                {
                    "eval_time": "1m",
                    "alertname": "OctavoNoWorker",
                    "exp_alerts": [
                        {
                            "exp_labels": {"severity": "critical"} | ({"instance": each} if each else {}),
                            "exp_annotations": {
                                "summary": f"Gateway {each} has no worker: every request is refused with NO_WORKER"
                            },
                        }
                        for each in told
                    ],
                }
            ],
        }
        for gateways, workers, told in cases
    ]
    rules_file = repository / "deploy/prometheus/rules/alerts.yml"
    (tmp_path / "test.yml").write_text(yaml.safe_dump({"rule_files": [str(rules_file)], "tests": tests}))
    done = subprocess.run(
        [promtool, "test", "rules", str(tmp_path / "test.yml")], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
