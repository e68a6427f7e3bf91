"""A real Prometheus scrapes a running service that is at peace: every rule is recorded, and no alert fires."""

import time
from pathlib import Path

import pytest
import yaml

from octavo import Client
from tests.support.services.prometheus import HOW_TO_GET, is_installed, scraping, until
from tests.support.services.service import Service, serve

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not is_installed(), reason=HOW_TO_GET)]


def metrics_ports(service: Service) -> dict[str, list[int]]:
    log = service.log.read_text()
    found = [line.split("127.0.0.1:")[1].split("/")[0] for line in log.splitlines() if "/metrics  (" in line]
    return {"octavo-gateway": [int(found[0])], "octavo-worker": [int(found[1])]}


def test_a_real_prometheus_records_every_rule_and_no_alert_fires(repository: Path, tmp_path: Path) -> None:
    rules = yaml.safe_load((repository / "deploy/prometheus/rules/vllm_names.yml").read_text())["groups"][0]["rules"]
    with serve(tmp_path, "--runner=oracle", "--num-blocks=256") as service:
        until(lambda: (tmp_path / "run/ready").exists())
        with scraping(tmp_path, metrics_ports(service)) as prometheus, Client(service.target) as client:
            until(lambda: len(prometheus.now("up == 1")) == 2)
            for _ in range(4):
                client.complete(text="the same prompt each time, " * 4, max_tokens=20, seed=1)
                time.sleep(0.6)
            until(lambda: prometheus.now("vllm:request_success_total"))
            time.sleep(1.0)
            unrecorded = [rule["record"] for rule in rules if not prometheus.now(rule["record"])]
            unhealthy = [
                (rule["name"], rule.get("lastError"))
                for group in prometheus.ask("rules")["groups"]
                for rule in group["rules"]
                if rule["health"] == "err"
            ]
            # Not those that are only pending: a machine that pauses is late, and says so.
            alerts = [alert for alert in prometheus.ask("alerts")["alerts"] if alert["state"] == "firing"]
            firing = [alert["labels"]["alertname"] for alert in alerts]
            labels = prometheus.now("vllm:generation_tokens_total")[0]["metric"]
    assert (unrecorded, unhealthy, firing) == ([], [], [])
    assert labels["model_name"] == "folio-chat"
