"""Workers on a cluster, as far as it is known without one: addresses, what a worker needs, whether there is room; and
what is told where there is no Ray."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.cli.errors import CliError
from octavo.cli.serve.parent import EXIT_NO_PLACE, EXIT_PLACE_LOST
from octavo.cli.serve.placement import CLIENT_PORT, Head, Need, Way, head_of, need_of, room_for, why_no_room
from octavo.cli.serve.supervisor import GiveUp, Lifetimes, Restart, RestartPolicy
from octavo.cli.settings.groups import ServeSettings
from tests.support.services.service import environment, free_port

HEAD = {"memory": 1e9, "node:10.0.0.1": 1.0}
CPU = {"CPU": 4.0}
GPU = {"CPU": 8.0, "GPU": 2.0}


@pytest.mark.parametrize(
    ("text", "head"),
    [
        ("auto", Head(way=Way.AUTO, address="auto")),
        ("ray://head", Head(way=Way.CLIENT, address="ray://head:10001", host="head", port=CLIENT_PORT)),
        ("ray://head:7", Head(way=Way.CLIENT, address="ray://head:7", host="head", port=7)),
        ("ray://[::1]", Head(way=Way.CLIENT, address="ray://[::1]:10001", host="::1", port=CLIENT_PORT)),
        ("ray://[::1]:7", Head(way=Way.CLIENT, address="ray://[::1]:7", host="::1", port=7)),
        ("10.0.0.1:6379", Head(way=Way.MEMBER, address="10.0.0.1:6379", host="10.0.0.1", port=6379)),
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


def test_a_lost_host_is_no_fault_of_the_worker_and_a_full_cluster_ends_only_a_start() -> None:
    fresh = Lifetimes(name="w", policy=RestartPolicy())
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
