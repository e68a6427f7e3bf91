"""Alerts about certificates and files of keys: from the files of a gateway to what Prometheus fires."""

import time
from pathlib import Path

import pytest

from octavo.gateway.auth.expiry import SOON_S
from octavo.gateway.auth.reloader import AccessReloader
from octavo.gateway.config import AccessConfig, TlsConfig
from octavo.gateway.observability.meters import GatewayMeters
from octavo.gateway.observability.metrics import GatewayCollector
from octavo.gateway.workers.stats import PoolStats
from tests.support.gateway.certificates import Authority
from tests.support.services.promtool import alert_rules, check_with_promtool, is_told

EXPIRES, FAILED = "OctavoCertificateExpires", "OctavoReloadFailed"
DAY_S = 86_400


def expression(alert: str) -> str:
    return str(alert_rules()[alert]["expr"])


def test_the_series_of_a_gateway_with_tls_are_those_that_the_alerts_name(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.sign("gateway", days=3)
    reloader = AccessReloader(AccessConfig(tls=TlsConfig(cert_file=pair.cert, key_file=pair.key)))
    reloader.load()
    collector = GatewayCollector(GatewayMeters(), PoolStats(), reloads=reloader.reloads, expiries=reloader.expiries)
    samples = [sample for family in collector.collect() for sample in family.samples]
    (end,) = [each for each in samples if each.name in expression(EXPIRES)]
    assert end.labels == {"file": "cert"}
    assert 0 < end.value - time.time() < SOON_S
    failed = 'octavo_gateway_reloads_total{outcome="failed"}'
    assert failed in expression(FAILED)
    assert [
        each.value
        for each in samples
        if each.name == "octavo_gateway_reloads_total" and each.labels == {"files": "tls", "outcome": "failed"}
    ] == [0]


def test_the_alert_and_the_log_begin_on_the_same_day() -> None:
    assert expression(EXPIRES).endswith(f"- time() < {SOON_S / DAY_S:.0f} * {DAY_S}")


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
    tmp_path: Path, file: str, named: str, ends_s: int, left: str | None
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
        "alert_rule_test": [is_told("2m", EXPIRES), is_told("10m", EXPIRES, *([told] if left else []))],
    }
    check_with_promtool(tmp_path, [test])


def test_a_reload_that_fails_is_told_for_an_hour(tmp_path: Path) -> None:
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
    moments = [("5m", []), ("12m", [told]), ("60m", [told]), ("80m", [])]
    test = {
        "interval": "1m",
        "input_series": series,
        "alert_rule_test": [is_told(at, FAILED, *wanted) for at, wanted in moments],
    }
    check_with_promtool(tmp_path, [test])
