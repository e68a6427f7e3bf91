"""The file by which `octavo ps` and `octavo scale` find a service: kept there, told of where it cannot be, and read by
other versions."""

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from octavo.cli.serve import record
from octavo.cli.serve.launch import ProcessPlan, Role
from octavo.cli.serve.placement import GatewayAddress, GatewayDirectory
from octavo.cli.serve.record import Listing, ProcessRecord, ServiceRecord, running_services
from octavo.cli.serve.service import SupervisedProcess
from tests.support.waiting import until

GATEWAY: dict[str, Any] = {
    "name": "gateway-1",
    "role": "gateway",
    "model": "",
    "metrics": "",
    "url": "",
    "settings_file": "f",
    "address": "10.0.0.2:1",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of the files; there once a service was listed."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "octavo" / "services"


def own(address: str = "x:1") -> ServiceRecord:
    process = ProcessRecord(**GATEWAY)
    started_s = psutil.Process().create_time()
    return ServiceRecord(pid=os.getpid(), started_s=started_s, address=address, run_dir="/", processes=(process,))


def addresses() -> list[str]:
    return [each.address for each in running_services()]


def test_what_a_later_version_says_more_is_passed_over_and_its_file_stays(folder: Path) -> None:
    """Whoever looks with another version must not take a service that runs out of everybody's sight."""
    listing = Listing(print)
    listing.put(own())
    (file,) = folder.iterdir()
    told = json.loads(file.read_text())
    told["is_new"] = True
    told["processes"][0]["speed"] = 3
    file.write_text(json.dumps(told))
    assert addresses() == ["x:1"]
    told["processes"] = "another form"
    file.write_text(json.dumps(told))
    assert addresses() == []
    assert file.exists()
    file.rename(folder / "no_number.json")
    assert addresses() == []
    assert list(folder.iterdir()) == []


@pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="only Linux says when a process began by another clock"
)
def test_a_clock_that_was_set_takes_no_service_out_of_sight(folder: Path) -> None:
    """What psutil says of a process's start moves with the clock."""
    listing = Listing(print)
    of_now = record.record_of("x:1", folder, (), metrics_host="h", directory=GatewayDirectory({}))
    listing.put(replace(of_now, started_s=of_now.started_s - 3600))
    assert addresses() == ["x:1"]
    assert 0 <= running_services()[0].uptime_s < 3600
    listing.put(replace(of_now, began_s=of_now.began_s - 60))  # another process had this id
    assert addresses() == []


def test_a_system_that_shows_no_processes_lists_the_service_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> None:
        raise psutil.NoSuchProcess(1)

    monkeypatch.setattr(psutil, "Process", gone)
    monkeypatch.setattr(record, "_began_s", lambda pid: 0.0)
    assert record.record_of("x:1", Path("/"), (), metrics_host="h", directory=GatewayDirectory({})).pid == os.getpid()


async def test_a_file_that_somebody_took_away_is_written_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "LOOK_S", 0.01)
    listing = Listing(print)
    listing.put(own())
    keeping = asyncio.create_task(listing.keep())
    for spoil in (Path.unlink, lambda file: file.write_text("{"), lambda file: file.write_bytes(b"\xff")):
        spoil(folder / f"{os.getpid()}.json")
        await until(lambda: addresses() == ["x:1"])
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    listing.remove()
    assert addresses() == []


async def test_where_it_cannot_be_written_people_are_told_once_and_again_when_it_can(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "LOOK_S", 0.01)
    notices: list[str] = []
    listing = Listing(notices.append)
    folder.parent.mkdir(mode=0o755)
    folder.parent.chmod(0o755)
    listing.put(own())
    listing.put(own("x:2"))
    keeping = asyncio.create_task(listing.keep())
    await asyncio.sleep(0.05)
    assert notices == [
        "octavo ps and octavo scale do not know what runs here, and it is tried again: "
        f"run directory {folder.parent} has mode 0755; others must not enter: chmod 700 {folder.parent}"
    ]
    folder.parent.chmod(0o700)
    await until(lambda: len(notices) == 2)
    assert notices[1] == "octavo ps and octavo scale know what runs here again"
    assert addresses() == ["x:2"]
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


def test_a_full_disk_is_told_with_its_reason(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notices: list[str] = []
    listing = Listing(notices.append)

    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("octavo.cli.serve.record.write_whole", full)
        listing.put(own())
    assert "No space left on device" in notices[0]
    listing.put(own())
    assert addresses() == ["x:1"]


def test_workers_on_hosts_of_a_cluster_are_listed_without_metrics() -> None:
    """Where those are, the cluster knows; `octavo ps` asks the gateways."""
    plans = (
        ProcessPlan(name="gateway-0", role=Role.GATEWAY, settings={}, metrics_port=9090),
        ProcessPlan(name="worker-0", role=Role.WORKER, settings={"model": ["m"]}, is_placed=True, metrics_port=None),
    )
    kept = [SupervisedProcess(plan=plan, child=cast(Any, None), history=cast(Any, None)) for plan in plans]
    found = record.record_of(
        "h:1", Path("/run"), kept, metrics_host="0.0.0.0", directory=GatewayDirectory({})
    ).processes
    assert [(each.name, each.model, each.metrics, each.is_placed) for each in found] == [
        ("gateway-0", "", "127.0.0.1:9090", False),
        ("worker-0", "m", "", True),
    ]


def test_a_gateway_of_another_host_is_listed_with_the_addresses_of_models(folder: Path) -> None:
    plan = ProcessPlan(name="gateway-1", role=Role.GATEWAY, settings={}, is_placed=True, metrics_port=None)
    kept = SupervisedProcess(plan=plan, child=cast(Any, None), history=cast(Any, None))
    directory = GatewayDirectory({})
    directory.put("gateway-1", GatewayAddress(host="10.0.0.2", port=5, worker_port=6, control=7, models=(("two", 8),)))
    Listing([].append).put(record.record_of("x:1", folder, [kept], metrics_host="0.0.0.0", directory=directory))
    (found,) = running_services()[0].processes
    assert (found.address, found.model_addresses) == ("10.0.0.2:5", {"two": "10.0.0.2:8"})


def test_a_worker_is_listed_by_the_name_of_its_model_with_the_checkpoint_beside_it(
    folder: Path, tmp_path: Path
) -> None:
    model = tmp_path / "my-model"
    model.mkdir()
    asked = (str(model), f"two={model}", "Qwen/Qwen2.5-0.5B-Instruct")
    plans = [
        ProcessPlan(name=f"worker-{n}", role=Role.WORKER, settings={"model": [each]}, metrics_port=1 + n)
        for n, each in enumerate(asked)
    ]
    kept = [SupervisedProcess(plan=plan, child=cast(Any, None), history=cast(Any, None)) for plan in plans]
    found = record.record_of(
        "h:1", Path("/run"), kept, metrics_host="0.0.0.0", directory=GatewayDirectory({})
    ).processes
    assert [(each.model, each.checkpoint) for each in found] == [
        ("my-model", str(model)),
        ("two", str(model)),
        ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct"),
    ]
