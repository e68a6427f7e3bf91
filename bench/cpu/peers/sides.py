"""Other engines as sides: each in a process of the peers' environment that reads requests from its standard input.

If one is not available, a sentence says why and what to do. Must not know: what is measured.
"""

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench.cpu.workloads import Ask
from bench.shapes import Shape
from octavo.model.cpu.isa import Isa, cpu_isa, machine_isa

FOLDER = Path(".bench-peers")
_SCRIPTS = Path(__file__).parent / "scripts"
_INSTALL = "make bench-peers installs it"
_NONE = f"OpenVINO GenAI and llama.cpp are left out: there is no {FOLDER}; make bench-peers installs them"


class PeerMissing(Exception):
    """This side cannot be measured here. The message says why, and what to do."""


class PeerSide:
    """One of the sides. Raises PeerMissing if the process does not become ready; `serve` raises RuntimeError if it
    ends."""

    def __init__(self, name: str, script: str, *arguments: str, environment: dict[str, str] | None = None) -> None:
        python = FOLDER / "bin/python"
        if not python.exists():
            raise PeerMissing(_NONE)
        self.name = name
        self._process = subprocess.Popen(
            [str(python), str(_SCRIPTS / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | (environment or {}),
        )
        try:
            self.version = str(self._read()["name"])
        except RuntimeError:
            self.close()
            raise PeerMissing(f"{name} is left out: it does not start here; {_INSTALL}") from None

    def serve(self, asks: Sequence[Ask]) -> float:
        """See `Side.serve`."""
        assert self._process.stdin is not None
        what = {"prompts": [ask.prompt_ids_T.tolist() for ask in asks], "outputs": [ask.num_output for ask in asks]}
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']}")
        return float(str(answer["seconds"]))

    def close(self) -> None:
        """End the process. Idempotent."""
        self._process.kill()
        self._process.communicate()

    def _read(self) -> dict[str, object]:
        """The process's next answer; other output of its libraries is skipped."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, object] = json.loads(line)
                return found
        raise RuntimeError(f"{self.name} ended with status {self._process.wait()}")


def random_gguf(shape: Shape, weights: str) -> Path:
    """The peers' model, written once. Raises PeerMissing."""
    fields = asdict(shape) | {"head_dim": shape.head_dim}
    numbers = "-".join(str(fields[name]) for name in ("num_layers", "hidden_size", "vocab_size"))
    path = FOLDER / f"random-{numbers}-{weights}.gguf"
    if path.exists():
        return path
    if not (FOLDER / "bin/python").exists():
        raise PeerMissing(_NONE)
    part = path.with_suffix(".part")
    command = [str(FOLDER / "bin/python"), str(_SCRIPTS / "random_gguf.py"), json.dumps(fields), weights, str(part)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        raise PeerMissing(f"the peers are left out: their environment cannot write a model; {_INSTALL}") from None
    part.rename(path)
    return path


def openvino(shape: Shape, weights: str, threads: int, clock: str) -> PeerSide:
    """OpenVINO GenAI, with no better instructions than ours: bf16 arithmetic if these have it. Raises PeerMissing."""
    precision = "bf16" if cpu_isa() >= Isa.BF16 else "f32"
    name = f"OpenVINO GenAI, {weights} weights, {precision}"
    # The variable that limits oneDNN was set along with ours, if instructions are limited.
    return PeerSide(name, "serve_openvino.py", str(random_gguf(shape, weights)), str(threads), clock, precision)


def llama(shape: Shape, weights: str, threads: int, clock: str) -> PeerSide:
    """llama.cpp, compiled for this class of instructions. Raises PeerMissing."""
    name, environment = f"llama.cpp, {weights} weights", {}
    if cpu_isa() < machine_isa():
        folder = llama_folder(cpu_isa())
        if not folder.exists():
            change = f"make bench-peers ISA={cpu_isa().word} compiles one that does not"
            raise PeerMissing(f"{name} is left out: it would use instructions above {cpu_isa().word}; {change}")
        environment["PYTHONPATH"] = str(folder.absolute())
    return PeerSide(
        name, "serve_llama.py", str(random_gguf(shape, weights)), str(threads), clock, environment=environment
    )


def llama_folder(isa: Isa) -> Path:
    """The folder of llama.cpp compiled for fewer instructions than the machine has."""
    return FOLDER / f"llama-{isa.word}"
