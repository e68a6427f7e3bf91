"""Workers and gateways on a cluster, as far as it is known without one: addresses, what each needs, whether there is
room, where gateways are, what an actor chooses and writes; and what is told where there is no Ray."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.cli.errors import CliError
from octavo.cli.serve.cluster import check_reach
from octavo.cli.serve.parent import EXIT_NO_PLACE, EXIT_PLACE_LOST
from octavo.cli.serve.placement import (
    CLIENT_PORT,
    GatewayAddress,
    GatewayDirectory,
    Head,
    JoinMode,
    Need,
    head_of,
    need_of,
    room_beside_gateways,
    room_for,
    why_no_room,
)
from octavo.cli.serve.process_actor import ProcessActor, version_here
from octavo.cli.serve.supervisor import GiveUp, Restart, RestartHistory, RestartPolicy
from octavo.cli.settings.groups import ServeSettings
from tests.support.services.service import environment, free_port
from tests.support.waiting import until

HEAD = {"memory": 1e9, "node:10.0.0.1": 1.0}
CPU = {"CPU": 4.0}
GPU = {"CPU": 8.0, "GPU": 2.0}


@pytest.mark.parametrize(
    ("text", "head"),
    [
        ("auto", Head(mode=JoinMode.AUTO, address="auto")),
        ("ray://head", Head(mode=JoinMode.CLIENT, address="ray://head:10001", host="head", port=CLIENT_PORT)),
        ("ray://head:7", Head(mode=JoinMode.CLIENT, address="ray://head:7", host="head", port=7)),
        ("ray://[::1]", Head(mode=JoinMode.CLIENT, address="ray://[::1]:10001", host="::1", port=CLIENT_PORT)),
        ("ray://[::1]:7", Head(mode=JoinMode.CLIENT, address="ray://[::1]:7", host="::1", port=7)),
        ("10.0.0.1:6379", Head(mode=JoinMode.MEMBER, address="10.0.0.1:6379", host="10.0.0.1", port=6379)),
    ],
)
def test_an_address_is_understood(text: str, head: Head) -> None:
    assert head_of(text) == head


@pytest.mark.parametrize("text", ["ray://", "ray://:7", "ray://a:b", "ray://a/b", "head", "http://head:7", "a:0", ":7"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(CliError) as refused:
        head_of(text)
    assert refused.value.what == "bad value for --cluster"
    assert refused.value.exit_code == 2
    assert repr(text) in refused.value.numbers


@pytest.mark.parametrize(
    ("given", "hosts", "need"),
    [
        ({}, [HEAD, CPU], Need(gpus=0, cpus=1)),
        ({}, [HEAD, CPU, GPU], Need(gpus=1, cpus=1)),
        ({"device": "cpu", "num_threads": 3}, [GPU], Need(gpus=0, cpus=3)),
        ({"device": "cpu", "num_threads": 3, "tensor_parallel_size": 2}, [GPU], Need(gpus=0, cpus=6)),
        ({"device": "cuda", "tensor_parallel_size": 4}, [GPU], Need(gpus=4, cpus=4)),
        ({"runner": "oracle"}, [GPU], Need(gpus=0, cpus=1)),
    ],
)
def test_a_worker_takes_gpus_where_it_has_them_to_itself(
    given: dict[str, object], hosts: list[dict[str, float]], need: Need
) -> None:
    assert need_of(ServeSettings(**given), hosts) == need  # type: ignore[arg-type]


def test_a_cluster_without_gpus_is_told_at_once() -> None:
    with pytest.raises(CliError) as refused:
        need_of(ServeSettings(device="cuda"), [HEAD, CPU])
    assert refused.value.what == "the cluster has no GPUs"
    assert refused.value.numbers == "--device is cuda, and none of its 2 hosts has a GPU that Ray knows of"


def test_a_group_is_whole_on_one_host() -> None:
    """Four hosts with two GPUs have eight, and no room for a group of four."""
    hosts = [HEAD, *[GPU] * 4]
    assert room_for(Need(gpus=1, cpus=1), hosts) == 8
    assert room_for(Need(gpus=2, cpus=2), hosts) == 4
    assert room_for(Need(gpus=1, cpus=8), hosts) == 4
    assert room_for(Need(gpus=0, cpus=3), [HEAD, CPU, GPU]) == 3
    assert why_no_room(Need(gpus=2, cpus=2), hosts, 4) is None
    assert why_no_room(Need(gpus=4, cpus=4), hosts, 1) == (
        "a worker needs 4 GPUs and 4 CPUs on one host, and none of the cluster's 5 hosts has that"
    )
    assert why_no_room(Need(gpus=2, cpus=2), hosts, 5) == (
        "5 workers need 2 GPUs and 2 CPUs each, and the cluster's 5 hosts hold 4 of them"
    )
    assert why_no_room(Need(gpus=0, cpus=2), [{"CPU": 8.0}], 30) == (
        "30 workers need 2 CPUs each, and the cluster's 1 host holds 4 of them"
    )


def test_gateways_leave_workers_as_much_as_they_can() -> None:
    worker = Need(gpus=1, cpus=4)
    hosts = [{"CPU": 8.0, "GPU": 2.0}, {"CPU": 9.0, "GPU": 2.0}, {"CPU": 1.0}, HEAD]

    def left(num_gateways: int, is_away: list[bool]) -> list[float]:
        return [host.get("CPU", 0) for host in room_beside_gateways(hosts, is_away, worker, num_gateways)]

    assert left(0, [True] * 4) == [8, 9, 1, 0]
    assert left(1, [True] * 4) == [8, 9, 0, 0]  # one that workers have no use for
    assert left(2, [True] * 4) == [8, 8, 0, 0]  # one whose ninth CPU is of no use
    assert left(3, [True] * 4) == [7, 8, 0, 0]  # a host of its own, though a worker less has room
    assert left(4, [True] * 4) in ([6, 8, 0, 0], [7, 7, 0, 0])  # two on one host
    assert left(1, [True, True, False, True]) == [8, 8, 1, 0]  # never on the supervisor's own
    with pytest.raises(CliError) as refused:
        room_beside_gateways([HEAD, CPU], [False, True], worker, 5)
    assert refused.value.what == "the cluster is too small"
    assert refused.value.numbers == (
        "--cluster-gateways 5 needs 1 CPU for each, and the cluster's 1 host beside this one can hold 4"
    )


def test_the_board_tells_whoever_must_know_when_a_gateway_has_moved() -> None:
    here = GatewayAddress(host="10.0.0.1", port=0, worker_port=1, control=2)
    directory = GatewayDirectory({"gateway-0": here})
    told: list[str] = []
    directory.listeners.add(lambda: told.append(directory.endpoints()))
    first = GatewayAddress(host="10.0.0.2", port=50051, worker_port=11, control=12, metrics=9090, node="n2")
    directory.put("gateway-1", first)
    directory.put("gateway-1", first)  # nothing new
    assert told == ["tcp://10.0.0.1:1\ntcp://10.0.0.2:11\n"]
    assert directory.controls() == "tcp://10.0.0.1:2\ntcp://10.0.0.2:12\n"
    directory.put("gateway-2", GatewayAddress(host="fd00::3", port=50051, worker_port=21, control=22, node="n3"))
    assert directory.addresses() == {"gateway-1": "10.0.0.2:50051", "gateway-2": "[fd00::3]:50051"}
    assert (directory.nodes("gateway-1"), directory.nodes("")) == ({"n3"}, {"n2", "n3"})
    assert directory.ports(besides="gateway-2") == [1, 2, 50051, 11, 12, 9090]
    directory.drop("gateway-1")
    directory.drop("gateway-1")
    assert told[2:] == ["tcp://10.0.0.1:1\ntcp://[fd00::3]:21\n"]


def test_callers_must_be_able_to_reach_gateways_of_other_hosts() -> None:
    check_reach("0.0.0.0", "10.0.0.1")
    check_reach("10.0.0.1", "10.0.0.1")
    check_reach("127.0.0.1", "127.0.0.1")  # a cluster of one machine
    for host in ("127.0.0.1", "localhost", "::1"):
        with pytest.raises(CliError) as refused:
            check_reach(host, "10.0.0.1")
        assert f"--host is {host}, which only callers of this host reach" in refused.value.numbers


async def test_an_actor_chooses_the_ports_of_its_host() -> None:
    """Those that are wished for, where they are free."""
    free, other = free_port(), free_port()
    with socket.create_server(("127.0.0.1", 0)) as busy:
        taken = busy.getsockname()[1]
        wanted = [("", free), ("", taken), ("127.0.0.1", other), ("", 0), ("", free)]
        host, ports = await ProcessActor().choose_ports("127.0.0.1", wanted, [other], version_here())
    assert (host, ports[0]) == ("127.0.0.1", free)
    assert len(set(ports)) == 5
    assert not {taken, other, 0} & set(ports)
    with pytest.raises(ValueError, match="and the supervisor 0"):
        await ProcessActor().choose_ports("127.0.0.1", wanted, [], "0")


async def test_an_actor_writes_files_that_change_while_its_process_lives(tmp_path: Path) -> None:
    actor = ProcessActor()
    settings = {"allowed_worker_keys": [], "no_such_setting": "so that it ends at once"}
    files = {"peer_endpoints_file": "one", "allowed_worker_keys": "key"}
    await actor.start(1, "gateway", "gateway-1", settings, (1, files), {}, version_here())

    await until(lambda: actor._child)
    folder = actor._folder
    assert folder is not None
    assert (folder / "peer_endpoints_file").read_text() == "one"
    assert f'allowed_worker_keys = ["{folder}/allowed_worker_keys"]' in (folder / "gateway-1.toml").read_text()
    await actor.write(3, {"peer_endpoints_file": "three"})
    await actor.write(2, {"peer_endpoints_file": "two"})  # late
    assert (folder / "peer_endpoints_file").read_text() == "three"
    assert (folder / "peer_endpoints_file").stat().st_mode & 0o777 == 0o600
    await until(lambda: actor._code is not None)
    assert "no_such_setting" in " ".join((await actor.follow(0))[0])
    await until(lambda: not folder.exists())
    await actor.write(4, {"peer_endpoints_file": "four"})  # for its next run
    assert actor._files["peer_endpoints_file"] == "four"


def test_a_lost_host_is_no_fault_of_the_worker_and_a_full_cluster_ends_only_a_start() -> None:
    fresh = RestartHistory(name="w", policy=RestartPolicy())
    fresh.on_start(0.0)
    assert fresh.on_exit(EXIT_PLACE_LOST, 5.0) == Restart(delay_s=0.25)
    assert fresh.on_exit(EXIT_NO_PLACE, 9.0) == GiveUp(
        why="w found no host of the cluster with room for it before it was ready"
    )
    fresh.on_ready()
    assert fresh.on_exit(EXIT_NO_PLACE, 9.0) == Restart(delay_s=0.5)


def refusal(*words: str, path: Path | None = None) -> str:
    command = [sys.executable, "-m", "octavo.cli.main", "serve", "--runner=oracle", *words]
    variables = environment() | ({} if path is None else {"PYTHONPATH": str(path)})
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    return done.stderr


def test_without_ray_it_says_how_to_get_it(tmp_path: Path) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray/__init__.py").write_text("raise ImportError('there is none')\n")
    told = refusal("--cluster=auto", path=tmp_path)
    assert "error: --cluster needs Ray" in told
    assert "pip install '.[ray]'" in told


def test_mistakes_are_told_before_ray_is_asked(tmp_path: Path) -> None:
    assert "bad value for --cluster" in refusal("--cluster=head")
    assert "--cluster-address needs --cluster" in refusal("--cluster-address=127.0.0.1")
    assert "--cluster-gateways needs --cluster" in refusal("--cluster-gateways=2")
    control = ("--control-endpoint=tcp://127.0.0.1:1", "--gateway-key-file=k")
    assert "does not go with --control-endpoint" in refusal("--cluster=auto", "--cluster-gateways=2", *control)
    assert "--peer-endpoints-file needs --control-endpoint" in refusal("--peer-endpoints-file=f")
    assert "--device is cuda:1, and the cluster chooses the GPU" in refusal("--cluster=auto", "--device=cuda:1")
    for address, why in (("head", "no address that workers"), ("::", "no address that"), ("192.0.2.1", "of this host")):
        told = refusal("--cluster=auto", f"--cluster-address={address}")
        assert "bad value for --cluster-address" in told
        assert f"{address!r} is no address" in told
        assert why in told
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray/__init__.py").write_text("")
    port = free_port()
    for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}"):
        told = refusal(f"--cluster={address}", path=tmp_path)
        assert "error: the cluster's head cannot be reached" in told
        assert f"127.0.0.1:{port}: " in told
    assert os.listdir(tmp_path) == ["ray"]


def test_a_cluster_of_yesterday_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its address is still in Ray's file."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    private = tmp_path / "ray" / "_private"
    private.mkdir(parents=True)
    (tmp_path / "ray/__init__.py").write_text("def init(**asked): raise ValueError('it was asked all the same')\n")
    told = []
    for body in (f"return '127.0.0.1:{(port := free_port())}'", "raise ConnectionError('of many words')"):
        (private / "services.py").write_text(f"def canonicalize_bootstrap_address(asked): {body}\n")
        told.append(refusal("--cluster=auto", path=tmp_path))
    assert "error: the cluster cannot be joined" in told[0]
    assert f"auto: Ray takes 127.0.0.1:{port} for the cluster that runs here, and nothing answers there: " in told[0]
    assert "auto: Ray knows of no cluster that runs here" in told[1]
