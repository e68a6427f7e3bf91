"""Tests this repository's alerts with promtool: series in, alerts out, in simulated time."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.services.service import REPOSITORY

ALERTS = REPOSITORY / "deploy/prometheus/rules/alerts.yml"


def alert_rules() -> dict[str, Any]:
    """The alert rules by alert name."""
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def is_told(at: str, alert: str, *told: dict[str, Any]) -> dict[str, Any]:
    """The expectation that the alert fires at that time with these labels and annotations; none: that it does not
    fire."""
    return {"eval_time": at, "alertname": alert, "exp_alerts": list(told)}


def check_with_promtool(folder: Path, tests: list[dict[str, Any]]) -> None:
    """Run these tests. folder: for the test file. Skips if there is no promtool."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    content = {"rule_files": [str(ALERTS)], "evaluation_interval": "5s", "tests": tests}  # as in prometheus.yml
    (folder / "test.yml").write_text(yaml.safe_dump(content))
    done = subprocess.run(
        [promtool, "test", "rules", str(folder / "test.yml")], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
