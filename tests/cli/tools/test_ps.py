"""`octavo ps` beside real services on the oracle."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from octavo import Client
from octavo.cli.serve.readiness import Samples
from octavo.cli.serve.record import ProcessRecord, ServiceRecord
from octavo.cli.tools import ps as ps_module
from octavo.cli.tools.ps import HEADS, ProcessState, ServiceState, rows_of, shown_duration
from octavo.client.errors import OctavoError
from tests.support.services.service import Service, environment, launch, wait_for

ORACLE = ("--runner=oracle", "--num-blocks=64", "--workers=2", "--oracle-step-delay-s=0.02")


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run directory of this module: other services of this user are none of its business."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("runtime")
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        yield folder


@pytest.fixture(scope="module")
def service(runtime: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with launch(tmp_path_factory.mktemp("service"), *ORACLE, "--oracle-eos-every=1000000") as running:
        running.wait_until_supervised()
        yield running


def ps(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "octavo.cli.main", "ps", *words]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)


def listed(*words: str) -> list[dict[str, Any]]:
    done = ps("--json", *words)
    assert (done.returncode, done.stderr) == (0, "")
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_where_nothing_serves_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    done = ps()
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "nothing of this user serves here; `octavo serve` starts a service\n"
    assert listed() == []


def test_a_pipe_gets_a_row_for_the_service_and_each_process(service: Service) -> None:
    done = ps()
    head, own, *processes = [line.split() for line in done.stdout.splitlines()]
    pid = str(service.process.pid)
    assert head == [name.upper() for name in HEADS]
    assert own[:10] == [pid, service.target, "-", pid, "-", "-", "ready", "0", "-", "-"]
    assert [(row[0], row[1], row[2], *row[4:9]) for row in processes] == [
        (pid, service.target, "gateway-0", "-", "-", "ready", "0", "-"),
        (pid, service.target, "worker-0", "folio-chat", "1", "ready", "0", "0%"),
        (pid, service.target, "worker-1", "folio-chat", "1", "ready", "0", "0%"),
    ]
    workers = {str(each.pid) for each in service.children("worker")}
    assert {row[3] for row in processes[1:]} == workers
    assert "\x1b" not in done.stdout


def test_requests_are_those_of_now(service: Service) -> None:
    with Client(service.target) as client:
        stream = client.stream(text="once upon", max_tokens=900)

        def read() -> None:
            with contextlib.suppress(OctavoError):  # cancelled below
                for _ in stream.deltas():
                    pass

        reader = threading.Thread(target=read)
        reader.start()
        wait_for(lambda: listed()[0]["requests"] == 1)
        (found,) = listed()
        workers = [each for each in found["processes"] if each["role"] == "worker"]
        assert sum(each["requests"] for each in workers) == 1
        assert sum(each["kv_usage"] for each in workers) > 0
        assert [each["cache_hit_rate"] for each in workers if each["cache_hit_rate"] is not None]
        stream.cancel()
        reader.join(60)
    wait_for(lambda: listed()[0]["requests"] == 0)


def test_a_worker_that_died_is_down_until_another_is_there(service: Service) -> None:
    service.wait_until_supervised()
    victim = service.children("worker")[0]
    victim.kill()
    seen = set()
    while True:
        (found,) = listed()
        seen.add(found["state"])
        pids = {each["pid"] for each in found["processes"]}
        if found["state"] == "ready" and victim.pid not in pids and None not in pids:
            break
    assert seen <= {"ready", "down", "loading", "waiting"}


def test_the_service_at_an_address_is_asked_itself(service: Service, tmp_path: Path) -> None:
    (found,) = listed(f"--port={service.port}")
    assert (found["address"], found["state"], found["pid"]) == (service.target, "ready", None)
    assert [(each["name"], each["model"], each["state"]) for each in found["processes"]] == [
        ("gateway-0", "", "ready"),
        ("worker-0", "folio-chat", "ready"),
        ("worker-1", "folio-chat", "ready"),
    ]
    assert found["requests"] == 0
    done = ps("--port=1")
    assert (done.returncode, done.stdout, done.stderr.splitlines()[0]) == (1, "", "error: no service answers")


def test_what_loads_is_listed_and_what_was_killed_is_not(runtime: Path, tmp_path: Path, service: Service) -> None:
    with launch(tmp_path, *ORACLE) as second:
        file = runtime / "octavo" / "services" / f"{second.process.pid}.json"
        wait_for(file.exists)
        other = next(each for each in listed() if each["pid"] == second.process.pid)
        assert other["state"] in ("down", "loading", "waiting", "ready")  # as far as it is
        second.wait_until_supervised()
        assert [each["pid"] for each in listed()] == [service.process.pid, second.process.pid]
        second.process.kill()
        second.process.wait(60)
        assert file.exists()
        assert [each["pid"] for each in listed()] == [service.process.pid]
        assert not file.exists()


def test_another_process_with_the_same_id_is_no_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = tmp_path / "octavo" / "services"
    folder.mkdir(parents=True)
    for each in (folder.parent, folder):
        each.chmod(0o700)
    fields = {"pid": os.getpid(), "address": "x:1", "run_dir": "/", "processes": []}
    begun_s = psutil.Process().create_time()
    (folder / "1.json").write_text(json.dumps(fields | {"started_s": begun_s - 60}))
    (folder / "2.json").write_text("{")
    assert listed() == []
    (folder / "3.json").write_text(json.dumps(fields | {"started_s": begun_s}))
    assert [each["address"] for each in listed()] == ["x:1"]
    folder.chmod(0o755)
    done = ps()
    assert (done.returncode, done.stderr.splitlines()[0]) == (1, "error: the run directory cannot be used")


def test_a_gateway_that_waits_for_a_host_has_no_address() -> None:
    processes = (
        ProcessState(name="gateway-0", role="gateway", state="ready"),
        ProcessState(name="gateway-1", role="gateway", state="ready", address="10.0.0.2:1"),
        ProcessState(name="gateway-2", role="gateway", state="waiting"),
        ProcessState(name="worker-0", role="worker", state="waiting"),
    )
    rows = rows_of(ServiceState(address="10.0.0.1:1", state="waiting", processes=processes))
    assert [row[1] for row in rows] == ["10.0.0.1:1", "10.0.0.1:1", "10.0.0.2:1", "-", "10.0.0.1:1"]


def test_workers_of_other_hosts_are_told_by_the_gateways_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their own metrics are where the cluster has put them."""

    def rows(name: str, **values: float) -> Samples:
        return {name: [({"worker_id": f"worker-{n}"}, value) for n, value in values.items()]}

    pages = {
        "http://h:1/metrics": rows("octavo_worker_up", **{"0": 1.0, "1": 0.0, "3": 1.0})
        | rows("octavo_worker_in_flight_requests", **{"0": 2.0, "1": 0.0, "3": 1.0}),
        "http://h:2/metrics": rows("octavo_worker_up", **{"0": 1.0})
        | rows("octavo_worker_in_flight_requests", **{"0": 3.0}),
    }
    monkeypatch.setattr(ps_module, "read_metrics", lambda url: pages[url])
    gateways = [_process(f"gateway-{n}", "gateway", metrics=f"h:{n + 1}") for n in range(2)]
    workers = [_process(f"worker-{n}", "worker", is_placed=True, is_leaving=n == 3) for n in range(4)]
    record = ServiceRecord(
        pid=os.getpid(), started_s=time.time(), address="h:5", run_dir="/", processes=(*gateways, *workers)
    )
    with ThreadPoolExecutor() as asking:
        found = ps_module._look(record, asking).processes[2:]
    assert [(each.name, each.state, each.requests) for each in found] == [
        ("worker-0", "ready", 5),
        ("worker-1", "loading", 0),
        ("worker-2", "waiting", None),
        ("worker-3", "draining", 1),
    ]


def _process(name: str, role: str, **more: Any) -> ProcessRecord:
    return ProcessRecord(
        **({"name": name, "role": role, "model": "", "metrics": "", "url": "", "settings_file": "f"} | more)
    )


def test_durations_are_read_at_a_glance() -> None:
    assert [shown_duration(each) for each in (None, 0.4, 3723.0, 266706.0)] == [
        "-",
        "00:00:00",
        "01:02:03",
        "3 d 02:05:06",
    ]
