import stat
import sys
import tomllib
from pathlib import Path

import pytest

from octavo.cli.serve.launch import (
    GatewayLinks,
    Role,
    choose_gateways,
    command_line,
    devices_of_group,
    environment,
    metrics_ports,
    plan_placed_gateway,
    plan_processes,
    with_threads,
    write_settings,
)
from octavo.cli.serve.parent import PARENT_VARIABLE
from octavo.cli.settings.groups import ALL_KEYS, GatewaySettings, ServeSettings, WorkerSettings
from octavo.cli.settings.resolve import resolve
from tests.support.full_disk import nothing_can_be_written

RUN = Path("/run/o")


def test_gateways_come_first_then_the_workers_of_each_model() -> None:
    settings = ServeSettings(model=("a", "b"), workers=2, gateways=2, admin_port=7)
    plans = plan_processes(settings, run_dir=RUN, port=5, ports=[10, 11, 12, 13, 14, 15])
    sockets = ["ipc:///run/o/gateway-0.sock", "ipc:///run/o/gateway-1.sock"]
    assert [(each.name, each.role, each.metrics_port) for each in plans] == [
        ("gateway-0", Role.GATEWAY, 10),
        ("gateway-1", Role.GATEWAY, 11),
        ("worker-0", Role.WORKER, 12),
        ("worker-1", Role.WORKER, 13),
        ("worker-2", Role.WORKER, 14),
        ("worker-3", Role.WORKER, 15),
    ]
    gateways, workers = [each.settings for each in plans[:2]], [each.settings for each in plans[2:]]
    assert [each["worker_endpoint"] for each in gateways] == [[socket] for socket in sockets]
    assert [(each["port"], each["port_sharing"], each["admin_port"]) for each in gateways] == [
        (5, "shared", 7),
        (5, "shared", None),
    ]
    controls = ["ipc:///run/o/gateway-0.peers.sock", "ipc:///run/o/gateway-1.peers.sock"]
    assert [each["expected_model"] for each in gateways] == [["a", "b"]] * 2
    assert [each["control_endpoint"] for each in gateways] == controls
    assert [each["peer_endpoint"] for each in gateways] == [[controls[1]], [controls[0]]]
    assert [each["model"] for each in workers] == [["a"], ["a"], ["b"], ["b"]]
    assert all(each["gateway_endpoint"] == sockets for each in workers)


def test_a_revision_is_told_to_workers_of_models_that_have_one() -> None:
    settings = ServeSettings(model=("a=folio-chat", "org/b"), revision="v1")
    _, *workers = plan_processes(settings, run_dir=RUN, port=5, ports=[10, 11, 12])
    assert [each.settings["revision"] for each in workers] == [None, "v1"]


def test_gateways_of_several_hosts_have_ports_side_by_side_and_know_their_neighbours() -> None:
    settings = ServeSettings(
        gateways=2,
        control_endpoint="tcp://0.0.0.0:5556",
        peer_endpoint=("tcp://10.0.0.2:5556", "tcp://10.0.0.2:5557"),
        gateway_key_file=Path("g.key"),
    )
    plans = plan_processes(settings, run_dir=RUN, port=5, ports=[10, 11, 12])[:2]
    assert [each.settings["control_endpoint"] for each in plans] == ["tcp://0.0.0.0:5556", "tcp://0.0.0.0:5557"]
    assert [each.settings["peer_endpoint"] for each in plans] == [
        [f"tcp://127.0.0.1:{near}", "tcp://10.0.0.2:5556", "tcp://10.0.0.2:5557"] for near in (5557, 5556)
    ]
    assert {each.settings["gateway_key_file"] for each in plans} == {Path("g.key")}


def test_gateways_of_a_cluster_are_told_of_each_other_by_a_file() -> None:
    """Those here are at addresses that stay; the host of the others puts its own in."""
    settings = ServeSettings(cluster="auto", cluster_gateways=2, admin_port=7, metrics_port=9, api_keys_file=Path("k"))
    links = GatewayLinks(
        endpoints=["tcp://10.0.0.1:1"], controls=["tcp://10.0.0.1:2"], of_gateways={"gateway_key_file": "g"}
    )
    here, *placed, worker = plan_processes(settings, run_dir=RUN, port=5, ports=[10, 0], links=links)
    assert (here.is_placed, here.metrics_port, here.settings["port_sharing"]) == (False, 10, "shared")
    assert here.settings["control_endpoint"] == "tcp://10.0.0.1:2"
    assert (here.settings["peer_endpoint"], here.settings["peer_endpoints_file"]) == ([], RUN / "peer-endpoints")
    assert [(each.name, each.is_placed, each.metrics_port) for each in placed] == [
        ("gateway-1", True, None),
        ("gateway-2", True, None),
    ]
    for each in placed:
        assert [each.settings[name] for name in ("port", "metrics_port", "page")] == [5, 9, "off"]
        assert [each.settings[name] for name in ("admin_port", "status_socket", "supervisor_socket")] == [None] * 3
        assert each.settings["api_keys_file"] == Path("k")
    assert worker.is_placed
    alone = plan_processes(ServeSettings(cluster="auto"), run_dir=RUN, port=5, ports=[10, 0], links=links)[0]
    assert alone.settings["port_sharing"] == "exclusive"


def test_gateways_of_other_hosts_wait_for_models_by_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their working directory is another: a folder by the way to it from here would be a name there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints" / "mine").mkdir(parents=True)
    settings = ServeSettings(model=("checkpoints/mine", "named=checkpoints/mine", "a/b"))
    plan = plan_placed_gateway(settings, 1, run_dir=RUN, port=5)
    assert plan.settings["expected_model"] == ["mine", "named", "a/b"]


def test_the_first_gateway_has_the_page_of_the_service() -> None:
    def pages(**given: object) -> list[object]:
        settings = ServeSettings(gateways=3, **given)  # type: ignore[arg-type]
        plans = plan_processes(settings, run_dir=RUN, port=5, ports=[1, 2, 3, 4])
        return [each.settings["page"] for each in plans if each.role is Role.GATEWAY]

    assert pages() == pages(page="on") == ["on", "off", "off"]
    assert pages(page="off", page_port=7) == ["off"] * 3


@pytest.mark.parametrize(
    ("cores", "workers", "on_gpu", "wanted"),
    [
        *((cores, 1, False, 1) for cores in (1, 2, 4, 16, 64, 256)),  # they would take time from the model
        *((cores, 1, True, wanted) for cores, wanted in ((1, 1), (2, 1), (4, 2), (8, 4), (12, 6), (16, 8), (26, 8))),
        *((cores, 1, True, 8) for cores in (32, 64, 256)),
        *((16, workers, True, wanted) for workers, wanted in ((2, 7), (4, 5), (8, 1), (64, 1))),
        (128, 8, True, 8),
    ],
)
def test_gateways_follow_from_cores_and_device(cores: int, workers: int, on_gpu: bool, wanted: int) -> None:
    assert choose_gateways(cores, num_workers=workers, on_gpu=on_gpu) == wanted


@pytest.mark.parametrize(
    ("cores", "workers", "ranks", "wanted"),
    [
        *((cores, 1, ranks, None) for cores in (1, 4) for ranks in (1, 2)),  # a worker divides its cores by itself
        *((4, 2, 1, 2), (4, 3, 1, 2), (4, 4, 1, 1), (4, 9, 1, 1), (64, 2, 2, 16), (1, 2, 1, 1)),
    ],
)
def test_workers_of_a_model_divide_the_cores(cores: int, workers: int, ranks: int, wanted: int | None) -> None:
    settings = ServeSettings(workers=workers, tensor_parallel_size=ranks, model=("a", "b"))
    assert with_threads(settings, cores).num_threads == wanted


def test_one_gateway_has_the_port_to_itself() -> None:
    gateway = plan_processes(ServeSettings(), run_dir=RUN, port=5, ports=[1, 2])[0]
    assert gateway.settings["port_sharing"] == "exclusive"
    assert gateway.settings.get("control_endpoint") is None


def test_metrics_ports_follow_their_setting_and_nought_stays_nought() -> None:
    assert metrics_ports(ServeSettings(gateways=2, workers=2)) == [
        ("metrics_port", 9090),
        ("metrics_port", 9190),
        ("worker_metrics_port", 9091),
        ("worker_metrics_port", 9092),
    ]
    free = ServeSettings(gateways=2, metrics_port=0, worker_metrics_port=0)
    assert [port for _, port in metrics_ports(free)] == [0, 0, 0]


def test_every_setting_of_serve_reaches_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read back as the process itself would read it."""
    monkeypatch.chdir(tmp_path)
    settings = ServeSettings(
        model=("a=b",), max_prompt_bytes=77, block_size=8, registration_token='a"b\\', num_blocks=5,
        memory_fraction=0.25, prefix_cache="off", keepalive_time_s=1.5, log_level="debug",
    )  # fmt: skip
    gateway, worker = plan_processes(settings, run_dir=tmp_path, port=5, ports=[1, 2])
    for plan, group in ((gateway, GatewaySettings), (worker, WorkerSettings)):
        file = write_settings(plan.settings, tmp_path / f"{plan.name}.toml")
        read = resolve(group, {}, file=file, known_keys=ALL_KEYS).settings
        own = {"run_dir", "port", "metrics_port", "worker_metrics_port", "worker_endpoint", "gateway_endpoint"}
        own |= {"port_sharing", "log_format", "worker_id", "page", "supervisor_socket"}
        shared = (group.model_fields.keys() & ServeSettings.model_fields.keys()) - own
        assert {name: getattr(read, name) for name in shared} == {name: getattr(settings, name) for name in shared}


def test_the_file_of_settings_is_for_its_owner_only(tmp_path: Path) -> None:
    file = write_settings({"registration_token": "word", "absent": None, "model": ["a"]}, tmp_path / "x.toml")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert tomllib.loads(file.read_text()) == {"registration_token": "word", "model": ["a"]}


def test_a_full_disk_is_told_with_the_file_of_settings(tmp_path: Path) -> None:
    with nothing_can_be_written(), pytest.raises(OSError, match=r"worker-0\.toml"):
        write_settings({"run_dir": "x"}, tmp_path / "worker-0.toml")


def test_the_file_of_settings_takes_any_character(tmp_path: Path) -> None:
    """JSON's escapes of what is beyond U+FFFF are no TOML, nor is DEL as it is."""
    values = {"model": ["\U0001f600=/models/\u8c61\x7f"], "registration_token": 'a"\\\n\x00\x1f\u2028'}
    file = write_settings(values, tmp_path / "x.toml")
    assert tomllib.loads(file.read_text("utf-8")) == values


def test_processes_get_no_settings_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_PORT", "1")
    monkeypatch.setenv("OCTAVO_DEBUG", "1")
    monkeypatch.setenv("OCTAVO_NATIVE", "off")
    ours = {name for name in environment() if name.startswith("OCTAVO_")}
    assert ours == {"OCTAVO_DEBUG", "OCTAVO_NATIVE", PARENT_VARIABLE}


def test_a_process_never_imports_from_the_working_directory() -> None:
    assert command_line("worker", Path("f.toml"))[:3] == [sys.executable, "-P", "-m"]


def test_groups_have_gpus_of_their_own() -> None:
    groups = ServeSettings(tensor_parallel_size=2, workers=2)
    named = {"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b,MIG-c,3"}
    assert [devices_of_group(groups, n, {}) for n in range(2)] == [
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        {"CUDA_VISIBLE_DEVICES": "2,3"},
    ]
    assert [devices_of_group(groups, n, named)["CUDA_VISIBLE_DEVICES"] for n in range(2)] == ["GPU-a,GPU-b", "MIG-c,3"]
    for alone in (ServeSettings(workers=2), ServeSettings(tensor_parallel_size=2, device="cpu")):
        assert devices_of_group(alone, 1, named) == {}
    plans = plan_processes(groups, run_dir=Path("run"), port=1, ports=list(range(1, 4)))
    assert [plan.variables != {} for plan in plans] == [plan.role is Role.WORKER for plan in plans]
