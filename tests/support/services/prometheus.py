"""A real Prometheus that scrapes a service on loopback, with the rules of this repository."""

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.support.services.service import REPOSITORY, free_port

HOW_TO_GET = "prometheus is not installed (Debian: apt-get install prometheus)"
SCRAPE_S = 0.5
TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One series over a range of time. points: (seconds since 1970, value)."""

    labels: Mapping[str, str]
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prometheus:
    """A running Prometheus."""

    port: int

    def ask(self, path: str, **query: str) -> Any:
        """The data that GET /api/v1/PATH returns. Raises OSError if it does not listen yet."""
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            answer = json.load(response)
        assert answer["status"] == "success"
        return answer["data"]

    def now(self, expression: str) -> list[Any]:
        """The result of an expression now."""
        found: list[Any] = self.ask("query", query=expression)["result"]
        return found

    def over(self, expression: str, start_s: float, end_s: float) -> list[Line]:
        """The results of an expression at each scrape in that time."""
        answer = self.ask("query_range", query=expression, start=f"{start_s}", end=f"{end_s}", step=f"{SCRAPE_S}")
        return [
            Line(labels=each["metric"], points=[(at, float(value)) for at, value in each["values"]])
            for each in answer["result"]
        ]


def is_installed() -> bool:
    """Whether Prometheus is installed on this machine."""
    return shutil.which("prometheus") is not None


@contextmanager
def scraping(folder: Path, targets: Mapping[str, Sequence[int]]) -> Iterator[Prometheus]:
    """A Prometheus with our own configuration and rules that scrapes these jobs' ports every half second. folder: for
    its files."""
    config = yaml.safe_load((REPOSITORY / "deploy/prometheus/prometheus.yml").read_text())
    config["global"] = dict.fromkeys(("scrape_interval", "evaluation_interval"), f"{round(SCRAPE_S * 1000)}ms")
    config["rule_files"] = [str(REPOSITORY / "deploy/prometheus/rules/*.yml")]
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": [f"127.0.0.1:{port}" for port in targets[job["job_name"]]]}]
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    prometheus = Prometheus(port=free_port())
    command = ["prometheus", f"--config.file={path}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, f"--web.listen-address=127.0.0.1:{prometheus.port}"], stdout=log, stderr=log
        )
    try:
        until(lambda: prometheus.ask("status/buildinfo"))
        yield prometheus
    finally:
        process.terminate()
        process.wait(STOP_TIMEOUT_S)


def concrete(expression: str, *, rate_interval: str = "10s", **variables: str) -> str:
    """The expression as Grafana would send it. variables: of the dashboard; gateway and worker match all."""
    known = {"__rate_interval": rate_interval, "gateway": ".*", "worker": ".*", **variables}
    for variable, value in known.items():
        expression = expression.replace(f"${variable}", value)
    return expression


def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Wait until the condition holds; an OSError counts as no. Raises AssertionError."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            if condition():
                return
        except OSError:
            pass  # it does not listen yet
        assert time.monotonic() < deadline_s
        time.sleep(0.2)
