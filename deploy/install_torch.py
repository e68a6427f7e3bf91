"""Installs torch into an environment: the build for CUDA where there is a GPU, else the one for CPUs, far smaller.
`make install` and deploy/worker.Dockerfile run it; any Python 3.11 does, with nothing installed.

torch on PyPI is the build for CUDA. The one for CPUs is `torch==X+cpu`; PyTorch's own index has it, and mirrors may.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TORCH = "2.13.0"
"""What is installed where no torch is there; pyproject.toml has the range that may be there already."""

PYTORCH_INDEX = "https://download.pytorch.org/whl/cpu"
PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
CUDA_SIZE = "2.7 GB to download, about 5 GB on disk"
CPU_SIZE = "0.2 GB to download"


def main(arguments: list[str] | None = None) -> int:
    """0, or 1 where no torch could be installed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", default=sys.executable, help="the environment's Python; default: this one")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where a GPU is")
    parser.add_argument("--sha256", default="", help="of the build for CPUs: no other file will do, nor another build")
    options = parser.parse_args(arguments)
    if options.sha256 and not re.fullmatch("[0-9a-f]{64}", options.sha256):
        parser.error(f"--sha256: {options.sha256!r} is not 64 hexadecimal digits")
    there = installed(options.python)
    if there and is_allowed(there):
        say(f"torch {there} is there")
        return 0
    wants_cuda = options.device == "cuda" or (options.device == "auto" and has_gpu())
    if wants_cuda:
        say(f"torch {TORCH} with CUDA's libraries: {CUDA_SIZE}")
    if wants_cuda or sys.platform != "linux":
        done = install_plain(options.python)
    elif options.sha256:
        done = install_file(options.python, options.sha256)
    else:
        done = install_for_cpu(options.python)
    there = installed(options.python) if done else ""
    say(f"torch {there} is installed" if there else f"no torch could be installed in {options.python}'s environment")
    return 0 if there else 1


def installed(python: str) -> str:
    """The version of torch in that environment; empty where there is none that can be imported."""
    done = subprocess.run(
        [python, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else ""


def is_allowed(version: str) -> bool:
    """Whether it is in pyproject.toml's range; pip would else take another one, the build for CUDA."""
    lowest, end = re.findall(r'"torch>=([\d.]+),<([\d.]+)"', PYPROJECT.read_text())[0]
    return numbers(lowest) <= numbers(version) < numbers(end)


def numbers(version: str) -> tuple[int, ...]:
    """Major and minor."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def has_gpu() -> bool:
    """Whether the driver knows of one. The program alone says nothing: images have it where no GPU is."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return False
    try:
        done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and "GPU" in done.stdout


def install_for_cpu(python: str) -> bool:
    """The exact build where pip's indexes have it; else from PyTorch's, which uv knows; else the build for CUDA."""
    say(f"no GPU here: torch {TORCH} for CPUs, {CPU_SIZE}; first, whether pip's indexes have it")
    if pip(python, f"torch=={TORCH}+cpu", shows_errors=False):
        return True
    say("they have not; now from PyTorch's index, with uv")
    with uv() as program:
        if program and ran([program, "pip", "install", "--python", python, "--torch-backend=cpu", f"torch=={TORCH}"]):
            return True
    say(f"warning: no build for CPUs can be had here; torch {TORCH} is installed with CUDA's libraries ({CUDA_SIZE})")
    return install_plain(python)


def install_file(python: str, sha256: str) -> bool:
    """The build for CPUs, if it is the file that was named; from pip's indexes or PyTorch's. What it needs is not
    installed with it: the locks have that."""
    say(f"no GPU here: torch {TORCH} for CPUs, {CPU_SIZE}, the file {sha256[:12]}…")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "torch.txt")
        file.write_text(f"torch=={TORCH}+cpu --hash=sha256:{sha256}\n")
        options = ["--require-hashes", "--no-deps", "--extra-index-url", PYTORCH_INDEX, "-r", str(file)]
        return ran([python, "-m", "pip", "--disable-pip-version-check", "install", "--progress-bar", "on", *options])


def install_plain(python: str) -> bool:
    """What pip takes by itself: on Linux the build for CUDA."""
    return pip(python, f"torch=={TORCH}", shows_errors=True)


def pip(python: str, requirement: str, *, shows_errors: bool) -> bool:
    """Whether pip installed it."""
    command = [python, "-m", "pip", "--disable-pip-version-check", "install", "--progress-bar", "on", requirement]
    return ran(command, stderr=None if shows_errors else subprocess.DEVNULL)


@contextmanager
def uv() -> Iterator[str | None]:
    """The program, which is fetched for the moment where the machine has none; None where it cannot be had."""
    program = shutil.which("uv")
    if program:
        yield program
        return
    with tempfile.TemporaryDirectory() as folder:
        fetch = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--target", folder, "uv"]
        program = str(Path(folder, "bin", "uv"))
        yield program if ran(fetch, stderr=subprocess.DEVNULL) and os.access(program, os.X_OK) else None


def ran(command: list[str], stderr: int | None = None) -> bool:
    """Whether the command ended well. An index that is not reached is given up within a minute."""
    patience = {"UV_HTTP_TIMEOUT": "20", "UV_HTTP_RETRIES": "1"}
    try:
        return subprocess.run(command, stderr=stderr, env=patience | os.environ, check=False).returncode == 0
    except OSError:
        return False


def say(text: str) -> None:
    """To people who watch an installation."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
