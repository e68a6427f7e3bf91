"""A real Prometheus scrapes a running service: every expression of the dashboard is evaluated, every rule recorded."""

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from octavo import Client
from tests.support.services.service import Service, free_port, serve

pytestmark = pytest.mark.slow


def ask(port: int, path: str, **query: str) -> Any:
    url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
    with urllib.request.urlopen(url, timeout=10) as response:
        answer = json.load(response)
    assert answer["status"] == "success"
    return answer["data"]


def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            if condition():
                return
        except OSError:
            pass  # it does not listen yet
        assert time.monotonic() < deadline_s
        time.sleep(0.2)


def configuration(repository: Path, folder: Path, targets: dict[str, int]) -> Path:
    """Our own file, scraping this service's ports every half second."""
    config = yaml.safe_load((repository / "deploy/prometheus/prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
    config["rule_files"] = [str(repository / "deploy/prometheus/rules/*.yml")]
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": [f"127.0.0.1:{targets[job['job_name']]}"]}]
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    return path


@contextmanager
def prometheus(config: Path, folder: Path) -> Iterator[int]:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed (Debian: apt-get install prometheus)")
    port = free_port()
    command = [program, f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        until(lambda: ask(port, "status/buildinfo"))
        yield port
    finally:
        process.terminate()
        process.wait(20)


def metrics_ports(service: Service) -> dict[str, int]:
    log = service.log.read_text()
    found = [line.split("127.0.0.1:")[1].split("/")[0] for line in log.splitlines() if "/metrics  (" in line]
    return {"octavo-gateway": int(found[0]), "octavo-worker": int(found[1])}


def test_a_real_prometheus_finds_every_series(repository: Path, tmp_path: Path) -> None:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed (Debian: apt-get install prometheus)")
    dashboard = json.loads((repository / "deploy/grafana/dashboards/octavo.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    rules = yaml.safe_load((repository / "deploy/prometheus/rules/vllm_names.yml").read_text())["groups"][0]["rules"]
    with serve(tmp_path, "--runner=oracle", "--num-blocks=256") as service:
        until(lambda: (tmp_path / "run/ready").exists())
        config = configuration(repository, tmp_path, metrics_ports(service))
        with prometheus(config, tmp_path) as port, Client(service.target) as client:
            until(lambda: len(ask(port, "query", query="up == 1")["result"]) == 2)
            for _ in range(4):
                client.complete(text="the same prompt each time, " * 4, max_tokens=20, seed=1)
                time.sleep(0.6)
            until(lambda: ask(port, "query", query="vllm:request_success_total")["result"])
            time.sleep(1.0)
            empty = [
                expression for expression in expressions if not ask(port, "query", query=concrete(expression))["result"]
            ]
            unrecorded = [rule["record"] for rule in rules if not ask(port, "query", query=rule["record"])["result"]]
            unhealthy = [
                (rule["name"], rule.get("lastError"))
                for group in ask(port, "rules")["groups"]
                for rule in group["rules"]
                if rule["health"] == "err"
            ]
            # Not those that are only pending: a machine that pauses is late, and says so.
            alerts = [alert for alert in ask(port, "alerts")["alerts"] if alert["state"] == "firing"]
            firing = [alert["labels"]["alertname"] for alert in alerts]
            labels = ask(port, "query", query="vllm:generation_tokens_total")["result"][0]["metric"]
    assert (empty, unrecorded, unhealthy, firing) == ([], [], [], [])
    assert labels["model_name"] == "folio-chat"


def concrete(expression: str) -> str:
    """As Grafana would send it."""
    for variable, value in (("$__rate_interval", "10s"), ("$gateway", ".*"), ("$worker", ".*")):
        expression = expression.replace(variable, value)
    return expression
