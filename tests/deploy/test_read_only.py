"""Gateway and worker on a root that nobody can write, as docker-compose.yml runs them: in mount namespaces of their
own, so that it holds for root too, whom file modes do not stop."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from octavo import Client
from tests.support.services.service import REPOSITORY, STOP_TIMEOUT_S, Service, environment, free_port, stop_by_force

# $1 is the folder of the test. Its `cache` is a volume, `tmp` and `run` are as Docker makes them, `home` has nothing.
READ_ONLY = """
set -e
mount --bind "$1/cache" "$1/cache"
mount -t tmpfs -o noexec,nosuid,nodev,mode=1777 tmpfs "$1/tmp"
mount -t tmpfs -o noexec,mode=0700 tmpfs "$1/run"
mount -t tmpfs -o noexec,mode=0700 tmpfs "$1/noexec"
mount -t tmpfs -o ro tmpfs "$1/home"
mount -o remount,bind,ro / 2>/dev/null || true
shift
exec "$@"
"""


def can_make_namespaces() -> bool:
    if shutil.which("unshare") is None:
        return False
    try:
        command = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
        return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_make_namespaces(), reason="this machine lets nobody make mount namespaces"),
]
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name in ("cache", "tmp", "run", "noexec", "home"):
        (tmp_path / name).mkdir(mode=0o700)
    return tmp_path


def variables(place: Path, **more: str) -> dict[str, str]:
    hidden = ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TRITON_HOME")
    kept = {name: value for name, value in environment().items() if name not in hidden}
    return kept | {"HOME": str(place / "home"), "TMPDIR": str(place / "tmp"), "PYTHONDONTWRITEBYTECODE": "1"} | more


def command(place: Path, *arguments: str) -> list[str]:
    return ["unshare", "-rm", "bash", "-c", READ_ONLY, "bash", str(place), *arguments]


@contextmanager
def served(place: Path, **more: str) -> Iterator[Service]:
    """Both roles, ready."""
    port, log = free_port(), place / "service.log"
    serve = [sys.executable, "-m", "octavo.cli.main", "serve", f"--port={port}", f"--run-dir={place / 'run'}"]
    serve += ["--metrics-port=0", "--worker-metrics-port=0", "--dtype=bfloat16", "--num-blocks=256", "--device=cpu"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command(place, *serve), cwd=REPOSITORY, env=variables(place, **more), stdout=output, stderr=output
        )
    try:
        service = Service(process=process, port=port, admin_port=0, log=log)
        service.wait_until_ready()
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        while "Octavo is ready" not in log.read_text():
            assert time.monotonic() < deadline_s, log.read_text()[-4000:]
            time.sleep(0.05)
        yield service
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_TIMEOUT_S) == 0, log.read_text()[-4000:]
    finally:
        stop_by_force(process)


def answers(service: Service) -> bool:
    with Client(service.target) as client:
        return (
            client.complete(messages=[("user", "Hello!")], max_tokens=3, temperature=0).finished.usage.completion_tokens
            == 3
        )


def test_the_home_of_these_tests_is_one_that_root_cannot_write(place: Path) -> None:
    script = f"touch {place}/cache/x && ! touch {place}/home/x && ! {place}/noexec/program"
    (place / "noexec" / "program").write_text("#!/bin/sh\n")
    done = subprocess.run(command(place, "bash", "-c", script), capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@needs_compiler
def test_both_roles_run_on_a_read_only_root_and_keep_what_they_compiled_in_the_volume(place: Path) -> None:
    volume, nowhere = str(place / "cache"), str(place / "home")
    with served(place, XDG_CACHE_HOME=volume, XDG_RUNTIME_DIR=nowhere) as service:
        assert answers(service)
        log = service.log.read_text()
    assert "note:" not in log
    # Where `octavo ps` looks cannot be written: told once, and nothing else was in the way.
    (told,) = [line for line in log.splitlines() if "Read-only file system" in line]
    assert "octavo ps and octavo scale do not know what runs here" in told
    (kept,) = (place / "cache/octavo/native").glob("kernels-*.so")
    before = kept.stat().st_mtime_ns
    with served(place, XDG_CACHE_HOME=volume):
        assert [each.stat().st_mtime_ns for each in (place / "cache/octavo/native").iterdir()] == [before]


@needs_compiler
@pytest.mark.parametrize(
    ("cache", "why"),
    [
        (None, "home/.cache/octavo/native cannot be written (Read-only file system)"),
        ("noexec", "noexec/octavo/native is mounted noexec, so nothing compiled there can be loaded"),
    ],
    ids=["nowhere", "noexec"],
)
def test_a_worker_on_a_cpu_goes_on_without_its_kernels_and_says_so(place: Path, cache: str | None, why: str) -> None:
    more = {} if cache is None else {"XDG_CACHE_HOME": str(place / cache)}
    with served(place, **more) as service:
        assert answers(service)
        log = service.log.read_text()
    note = next(line for line in log.splitlines() if line.strip().startswith("note:"))
    assert "steps run on torch alone, which is slower: " in note
    assert f"{place}/{why}" in note
    assert "name another folder with XDG_CACHE_HOME" in note


@pytest.mark.parametrize(
    ("folder", "why"),
    [
        (None, "home/.triton/cache cannot be written (Read-only file system)"),
        ("noexec/triton", "noexec/triton is mounted noexec, so nothing compiled there can be loaded"),
    ],
    ids=["nowhere", "noexec"],
)
def test_a_worker_on_a_gpu_does_not_start_without_a_cache_for_its_kernels(
    place: Path, folder: str | None, why: str
) -> None:
    """The device is never reached: caches are looked at first, before a checkpoint is downloaded for nothing."""
    pytest.importorskip("triton", reason="triton is not installed")
    code = (
        "from octavo.worker.config import WorkerConfig; from octavo.worker.loading.loader import load_torch; "
        "load_torch(WorkerConfig(model='nobody/no-such-model', gateway_endpoints=(), device='cuda'), print)"
    )
    more = {} if folder is None else {"TRITON_CACHE_DIR": str(place / folder)}
    done = subprocess.run(
        command(place, sys.executable, "-c", code),
        cwd=REPOSITORY, env=variables(place, **more), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    last = done.stderr.strip().splitlines()[-1]
    assert last == f"octavo.model.cache_folder.CacheUnusable: {place}/{why}: name another folder with TRITON_CACHE_DIR"


def test_a_cache_that_was_filled_before_may_be_read_only(place: Path) -> None:
    """As an image that brings its kernels along."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler here")
    code = "from octavo.model.cpu.native import native_library; assert native_library() is not None"
    cached = variables(place, XDG_CACHE_HOME=str(place / "filled"))
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, env=cached, timeout=300, check=True)
    assert os.listdir(place / "filled/octavo/native")
    (place / "filled").rename(place / "home/filled")
    read_only = 'mount --bind "$1/home/filled" "$1/cache"; mount -o remount,bind,ro "$1/cache" && exec "${@:2}"'
    done = subprocess.run(
        ["unshare", "-rm", "bash", "-c", read_only, "bash", str(place), sys.executable, "-c", code],
        cwd=REPOSITORY, env=cached | {"XDG_CACHE_HOME": str(place / "cache")}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
