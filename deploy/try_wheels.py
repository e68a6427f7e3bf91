"""Installs Octavo's wheels into new environments of every Python that it is for, and runs `octavo tour` there.

    python deploy/try_wheels.py [3.12 …]        (make test-wheels)

The versions are the classifiers of pyproject.toml. An interpreter is looked for on PATH, below ~/.pyenv and with uv;
those that are not found are named at the end, and are no failure. A Python older than `requires-python` has to be
refused. Packages come from pip's indexes; the tour itself runs with every proxy pointing nowhere and in an empty
folder, so that it can need neither a network nor this checkout. Where pipx is installed, `pipx run` does the same once.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MINORS = tuple(each.rpartition(" ")[2] for each in PROJECT["classifiers"] if re.fullmatch(r".*:: 3\.\d+", each))
TOO_OLD = "3.10"
NOWHERE = "http://127.0.0.1:9"
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
OFFLINE = {"HF_HUB_OFFLINE": "1"} | dict.fromkeys(PROXIES, NOWHERE)
NO_PROXY = dict.fromkeys(("no_proxy", "NO_PROXY"), "127.0.0.1,localhost")
TIMEOUT_S = 1800.0


def interpreter(minor: str) -> Path | None:
    """A Python of this version that can make environments."""
    for candidate in candidates(minor):
        code = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
        try:
            done = subprocess.run([candidate, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        except OSError:
            continue
        if done.stdout.strip() == minor:
            return candidate
    return None


def candidates(minor: str) -> Iterator[Path]:
    """Where it may be."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    yield from sorted(versions.glob(f"{minor}.*/bin/python"), reverse=True)
    if found := shutil.which(f"python{minor}"):
        yield Path(found)
    if uv := shutil.which("uv"):
        done = subprocess.run([uv, "python", "find", minor], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            yield Path(done.stdout.strip())


def build(into: Path) -> Path:
    """The wheels of both distributions; the server's."""
    for project in (ROOT / "proto", ROOT):
        copy = into / "source" / project.name
        # A copy, since building leaves folders behind.
        shutil.copytree(
            project, copy, ignore=shutil.ignore_patterns(".*", "build", "dist", "out", "*.egg-info", "tests")
        )
        run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(into), str(copy)], into)
    return next(into.glob("octavo-[0-9]*.whl"))


def run(command: Sequence[str | Path], cwd: Path, **variables: str) -> str:
    """Its output. Raises CalledProcessError, TimeoutExpired."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OCTAVO_", "PYTHON", "OTEL_"))}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=kept | {"OMP_NUM_THREADS": "1"} | variables,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, done.args, output=done.stdout)
    return done.stdout


def try_tour(python: Path, wheel: Path, folder: Path) -> str:
    """Install and run; what was installed."""
    run([python, "-m", "venv", folder / "venv"], folder)
    own = folder / "venv" / "bin" / "python"
    run([sys.executable, ROOT / "deploy" / "install_torch.py", "--python", own, "--device", "cpu"], folder)
    pip = [own, "-m", "pip", "--disable-pip-version-check", "-q"]
    run([*pip, "install", "--find-links", wheel.parent, wheel], folder)
    run([*pip, "check"], folder)
    empty = folder / "empty"
    empty.mkdir()
    check_tour(run([folder / "venv" / "bin" / "octavo", "tour"], empty, **OFFLINE, **NO_PROXY))
    return run([own, "-c", "import torch; print('torch', torch.__version__)"], empty).strip()


def check_tour(output: str) -> None:
    """The model has told its name, and the tour came to its end. Raises ValueError."""
    if "Folio" not in output:
        raise ValueError(f"the tour ended without an answer:\n{output[-2000:]}")


def try_pipx(pipx: str, wheel: Path, folder: Path) -> None:
    """The same by `pipx run`, which makes and forgets an environment; torch comes from wherever pip finds it."""
    pip_args = f"--find-links {wheel.parent}"
    home = {"PIPX_HOME": str(folder / "pipx")}
    run([pipx, "run", "--spec", wheel, f"--pip-args={pip_args}", "octavo", "--version"], folder, **home)
    check_tour(run([pipx, "run", "--spec", wheel, f"--pip-args={pip_args}", "octavo", "tour"], folder, **home))


def check_refusal(python: Path, wheel: Path, folder: Path) -> None:
    """An older Python does not get it. Raises ValueError."""
    run([python, "-m", "venv", folder / "venv"], folder)
    pip = folder / "venv" / "bin" / "pip"
    done = subprocess.run([pip, "install", "--no-deps", wheel], capture_output=True, text=True, check=False)
    if done.returncode == 0 or "requires a different Python" not in done.stderr:
        raise ValueError(f"Python {TOO_OLD} was not refused: {done.stderr[-500:]}")


def main(wanted: list[str]) -> int:
    """0 where every Python that was found is served, else 1; 2 for a version that Octavo is not for."""
    if unknown := [each for each in wanted if each not in MINORS]:
        sys.stderr.write(f"error: Python {unknown[0]} is none of {', '.join(MINORS)}\n")
        return 2
    failed, missing = [], []
    with tempfile.TemporaryDirectory(prefix="octavo-wheels-") as made:
        wheels = Path(made) / "wheels"
        wheels.mkdir()
        wheel = build(wheels)
        say(f"built {wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB")
        jobs = [(f"Python {each}", interpreter(each), try_tour) for each in wanted or MINORS]
        jobs.append((f"Python {TOO_OLD}, to be refused", interpreter(TOO_OLD), check_refusal))
        pipx = shutil.which("pipx")
        jobs.append(("pipx", Path(pipx) if pipx else None, lambda path, *rest: try_pipx(str(path), *rest)))
        for name, program, attempt in jobs:
            if program is None:
                missing.append(name)
                continue
            folder = Path(tempfile.mkdtemp(dir=made))
            try:
                told = attempt(program, wheel, folder)
                say(f"{name}: good" + (f", {told}" if told else ""))
            except (subprocess.SubprocessError, ValueError) as error:
                failed.append(name)
                say(f"{name}: FAILED: {error}\n{getattr(error, 'output', None) or ''}"[-4000:])
            shutil.rmtree(folder, ignore_errors=True)
    say("not found here: " + (", ".join(missing) or "nothing"))
    return int(bool(failed))


def say(text: str) -> None:
    """To people who watch."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
