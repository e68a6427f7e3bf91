"""Alerts about certificates and files of keys: from the files of a gateway to what Prometheus fires."""

import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from octavo.gateway.auth.expiry import SOON_S
from octavo.gateway.auth.reloader import AccessReloader
from octavo.gateway.config import AccessConfig, TlsConfig
from octavo.gateway.observability.meters import GatewayMeters
from octavo.gateway.observability.metrics import GatewayCollector
from octavo.gateway.workers.stats import PoolStats
from tests.support.gateway.certificates import Authority

EXPIRES, FAILED = "OctavoCertificateExpires", "OctavoReloadFailed"
DAY_S = 86_400


def rules_file(repository: Path) -> Path:
    return repository / "deploy/prometheus/rules/alerts.yml"


def expression(repository: Path, alert: str) -> str:
    rules = yaml.safe_load(rules_file(repository).read_text())["groups"][0]["rules"]
    return next(rule["expr"] for rule in rules if rule["alert"] == alert)


def check_with_promtool(repository: Path, folder: Path, tests: list[dict[str, Any]]) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    (folder / "test.yml").write_text(yaml.safe_dump({"rule_files": [str(rules_file(repository))], "tests": tests}))
    done = subprocess.run(
        [promtool, "test", "rules", str(folder / "test.yml")], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def is_told(at: str, alert: str, told: dict[str, Any] | None) -> dict[str, Any]:
    return {"eval_time": at, "alertname": alert, "exp_alerts": [] if told is None else [told]}


def test_the_series_of_a_gateway_with_tls_are_those_that_the_alerts_name(repository: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.sign("gateway", days=3)
    reloader = AccessReloader(AccessConfig(tls=TlsConfig(cert_file=pair.cert, key_file=pair.key)))
    reloader.load()
    collector = GatewayCollector(GatewayMeters(), PoolStats(), reloads=reloader.reloads, expiries=reloader.expiries)
    samples = [sample for family in collector.collect() for sample in family.samples]
    (end,) = [each for each in samples if each.name in expression(repository, EXPIRES)]
    assert end.labels == {"file": "cert"}
    assert 0 < end.value - time.time() < SOON_S
    failed = 'octavo_gateway_reloads_total{outcome="failed"}'
    assert failed in expression(repository, FAILED)
    assert [
        each.value
        for each in samples
        if each.name == "octavo_gateway_reloads_total" and each.labels == {"files": "tls", "outcome": "failed"}
    ] == [0]


def test_the_alert_and_the_log_begin_on_the_same_day(repository: Path) -> None:
    assert expression(repository, EXPIRES).endswith(f"- time() < {SOON_S / DAY_S:.0f} * {DAY_S}")


@pytest.mark.parametrize(
    ("file", "named", "ends_s", "left"),
    [
        ("cert", "--tls-cert-file", 15 * DAY_S, None),
        ("cert", "--tls-cert-file", 3 * DAY_S, "2d 23h 50m 0s"),
        ("client_ca", "--tls-client-ca-file", 3 * DAY_S, "2d 23h 50m 0s"),
        ("cert", "--tls-cert-file", -DAY_S, "-1d 0h 10m 0s"),
    ],
)
def test_a_certificate_in_its_last_days_is_told_by_its_flag(
    repository: Path, tmp_path: Path, file: str, named: str, ends_s: int, left: str | None
) -> None:
    """promtool's time begins at 0; the rule waits for five minutes."""
    summary = f"The certificate of {named} at g expires in {left}"
    told = {
        "exp_labels": {"severity": "warning", "instance": "g", "file": file},
        "exp_annotations": {
            "summary": summary,
            "description": "Replace the file: gateways and OpenAI's front take a new one without a restart.",
        },
    }
    series = {
        "series": f'octavo_gateway_certificate_expiry_timestamp_seconds{{instance="g", file="{file}"}}',
        "values": f"{ends_s}x20",
    }
    test = {
        "interval": "1m",
        "input_series": [series],
        "alert_rule_test": [is_told("2m", EXPIRES, None), is_told("10m", EXPIRES, told if left else None)],
    }
    check_with_promtool(repository, tmp_path, [test])


def test_a_reload_that_fails_is_told_for_an_hour(repository: Path, tmp_path: Path) -> None:
    told = {
        "exp_labels": {"severity": "warning", "instance": "g", "files": "tls", "outcome": "failed"},
        "exp_annotations": {
            "summary": "g did not take changed files (tls): what was in force stays",
            "description": "The line reload_refused of its log says which file and why.",
        },
    }
    series = [
        {
            "series": f'octavo_gateway_reloads_total{{instance="g", files="{files}", outcome="{outcome}"}}',
            "values": values,
        }
        for files, outcome, values in (
            ("tls", "failed", "0x9 1x120"),
            ("tls", "taken", "0 1 2x127"),
            ("keys", "failed", "3x129"),
        )
    ]
    moments = [("5m", None), ("12m", told), ("60m", told), ("80m", None)]
    test = {
        "interval": "1m",
        "input_series": series,
        "alert_rule_test": [is_told(at, FAILED, wanted) for at, wanted in moments],
    }
    check_with_promtool(repository, tmp_path, [test])
