"""Other projects' clients and gateways, each in a virtual environment of its own, made on demand and kept between runs.

python -m tests.support.services.interop makes them all.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

from tests.support.services.service import Service

REPOSITORY = Path(__file__).resolve().parents[3]
PINS = REPOSITORY / "tests" / "interop"
INSTALL_TIMEOUT_S = 600.0  # even beside processes that compute


class NoEnvironment(Exception):
    """The environment could not be made, mostly for lack of a network."""


def environments_folder() -> Path:
    """Where the environments are kept: OCTAVO_INTEROP_DIR, else a folder of the checkout that git ignores."""
    return Path(os.environ.get("OCTAVO_INTEROP_DIR", REPOSITORY / ".interop"))


@cache
def interop_python(name: str) -> Path:
    """The interpreter of an environment with the packages of `tests/interop/NAME.txt` and, without their requirements,
    those of `NAME-alone.txt` if it exists. Raises NoEnvironment."""
    files = [file for file in (PINS / f"{name}.txt", PINS / f"{name}-alone.txt") if file.exists()]
    pins = b"".join(file.read_bytes() for file in files)
    digest = hashlib.sha256(pins + sys.version.encode()).hexdigest()[:12]
    folder = environments_folder() / f"{name}-{digest}"
    python = folder / "bin" / "python"
    with _one_at_a_time(folder):
        if not (folder / ".complete").exists():
            shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted run
            _make(folder, python, files)
            (folder / ".complete").touch()
    return python


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """A lock: several test processes share these folders, and any of them may need one first."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make(folder: Path, python: Path, files: list[Path]) -> None:
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--retries=1"]
    try:
        _run([sys.executable, "-m", "venv", str(folder)])
        for file in files:
            _run([*pip, *(["--no-deps"] if file.stem.endswith("-alone") else []), "-r", str(file)])
    except (NoEnvironment, subprocess.TimeoutExpired) as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise NoEnvironment(f"{files[0].name} could not be installed: {error}") from None


@cache
def interop_node() -> Path:
    """The `node_modules` of `tests/interop/node/package.json`. Raises NoEnvironment."""
    node, npm, wanted = shutil.which("node"), shutil.which("npm"), PINS / "node" / "package.json"
    if node is None or npm is None:
        raise NoEnvironment("there is no node or no npm here")
    folder = environments_folder() / f"node-{hashlib.sha256(wanted.read_bytes()).hexdigest()[:12]}"
    with _one_at_a_time(folder):
        if not (folder / ".complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            shutil.copy(wanted, folder)
            try:
                _run([npm, "install", "--prefix", str(folder), "--ignore-scripts", "--no-audit", "--no-fund"])
            except (NoEnvironment, subprocess.TimeoutExpired) as error:
                shutil.rmtree(folder, ignore_errors=True)
                raise NoEnvironment(f"what {wanted.name} names could not be installed: {error}") from None
            (folder / ".complete").touch()
    return folder / "node_modules"


def run_node(modules: Path, script: str, *arguments: str, timeout_s: float = 120.0) -> str:
    """The output of a script of the checkout, run with these modules."""
    done = subprocess.run(
        ["node", script, *arguments],
        cwd=REPOSITORY,
        env={"PATH": os.environ.get("PATH", ""), "NODE_PATH": str(modules)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise NoEnvironment(last[-1] if last else f"exit status {done.returncode}")


def run_inside(python: Path, driver: str, *, timeout_s: float, **settings: str) -> None:
    """Run a test file (`tests/interop/DRIVER.py`) with an environment's pytest, passing the settings as variables. Its
    output is shown if a test fails or is skipped there."""
    command = [str(python), "-m", "pytest", "-q", "-ra", "--tb=short", "-p", "no:cacheprovider", "-c", os.devnull]
    command += ["--rootdir", str(PINS), "--confcutdir", str(PINS / "drivers"), str(PINS / "drivers" / f"{driver}.py")]
    done = subprocess.run(
        command,
        cwd=PINS / "drivers",
        env={"PATH": os.environ.get("PATH", ""), "PYTHONDONTWRITEBYTECODE": "1"} | settings,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    assert "skipped" not in done.stdout, done.stdout


def leave_a_stream(python: Path, service: Service, **settings: str) -> None:
    """Let `drivers/leaving.py` read a stream and leave in the middle of it: the service must free its blocks."""
    service.wait_until_idle()
    with subprocess.Popen(
        [str(python), str(PINS / "drivers" / "leaving.py")],
        env=settings,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as caller:
        assert caller.stdin is not None
        assert caller.stdout is not None
        try:
            assert caller.stdout.readline() == "streaming\n", caller.stdout.read()
            (before,) = service.audit()
            assert before.num_active_blocks > 0
            caller.stdin.write("leave\n")
            caller.stdin.flush()
            assert caller.stdout.readline() == "left\n"
            service.wait_until_idle()
        finally:
            caller.kill()
    (after,) = service.audit()
    assert (list(after.violations), after.num_active_blocks) == ([], 0)


def make_all() -> None:
    """Make all environments; says which cannot be made."""
    names = sorted({each.stem.removesuffix("-alone") for each in PINS.glob("*.txt")})
    makers: list[Callable[[], object]] = [*(partial(interop_python, name) for name in names), interop_node]
    for make in makers:
        try:
            make()
        except NoEnvironment as error:
            sys.stdout.write(f"left out: {error}\n")


if __name__ == "__main__":
    make_all()
