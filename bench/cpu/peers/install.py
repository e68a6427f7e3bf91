"""Makes the environment of the engines that `make bench` compares with: `python -m bench.cpu.peers.install`.

OpenVINO GenAI comes as a wheel; llama.cpp is compiled from llama-cpp-python's source, with cmake and a C++ compiler, in
some five minutes. What cannot be installed is named in a sentence, and left out of the comparison. --isa: compile
llama.cpp once more without instructions above that class, for `OCTAVO_CPU_ISA=… make bench`.
"""

import argparse
import os
import subprocess
import sys
import venv

from bench.cpu.peers.sides import FOLDER, llama_folder
from octavo.model.cpu.isa import BOUNDS, Isa

PACKAGES = {
    "the models' writer": "gguf>=0.17,<1",
    "OpenVINO GenAI": "openvino-genai>=2026.1",
    "llama.cpp": "llama-cpp-python>=0.3.16,<0.4",
}
_SWITCHES = {
    Isa.AVX2: ("AVX", "AVX2", "FMA", "F16C", "BMI2"),
    Isa.AVX512: ("AVX512",),
    Isa.VNNI: ("AVX512_VNNI",),
    Isa.BF16: ("AVX512_VBMI", "AVX512_BF16"),
    Isa.AMX: ("AMX_TILE", "AMX_INT8", "AMX_BF16"),
}
"""Switches of ggml's build for each class, in addition to those of the class before."""


def cmake_arguments(isa: Isa) -> str:
    """Arguments for a build that uses no instructions above this class."""
    switches = (f"-DGGML_{name}={'ON' if each <= isa else 'OFF'}" for each in _SWITCHES for name in _SWITCHES[each])
    return " ".join(("-DGGML_NATIVE=OFF", *switches))


def install(what: str, package: str, *arguments: str, **environment: str) -> bool:
    """Install a package; whether it is there now. Prints a sentence if not."""
    pip = [str(FOLDER / "bin/python"), "-m", "pip", "--disable-pip-version-check", "install", "-q", *arguments, package]
    done = subprocess.run(pip, capture_output=True, text=True, env=os.environ | environment, check=False)
    last = (done.stderr.strip().splitlines() or ["no details"])[-1]
    print(f"{what}: installed" if done.returncode == 0 else f"{what} is left out: pip cannot install {package}: {last}")
    return done.returncode == 0


def main(arguments: list[str] | None = None) -> int:
    """The exit code is 0 even if a peer is left out: the others are compared."""
    parser = argparse.ArgumentParser(prog="python -m bench.cpu.peers.install", description=__doc__)
    parser.add_argument("--isa", choices=BOUNDS, help="compile llama.cpp for this class, too")
    options = parser.parse_args(arguments)
    if not (FOLDER / "bin/python").exists():
        venv.create(FOLDER, with_pip=True)
    for what, package in PACKAGES.items():
        install(what, package)
    if options.isa:
        isa = Isa[options.isa.upper()]
        target = ("--no-deps", "--no-cache-dir", "--no-binary", "llama-cpp-python", "--target", str(llama_folder(isa)))
        install(f"llama.cpp for {isa.word}", PACKAGES["llama.cpp"], *target, CMAKE_ARGS=cmake_arguments(isa))
    return 0


if __name__ == "__main__":
    sys.exit(main())
