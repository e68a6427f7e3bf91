"""Describes what a figure was measured on: processor, threads, versions, commit, and how busy the machine was."""

import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch

_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One line of RESULTS.md. load_1m: of the whole machine when the run began; above `cpus`, others were working."""

    cpu: str
    cpus: int
    instructions: tuple[str, ...]
    threads: int
    huge_pages: str
    torch: str
    transformers: str
    commit: str
    load_1m: float

    def line(self) -> str:
        """The description as text for people."""
        return (
            f"{self.cpu}, {self.cpus} cores ({', '.join(self.instructions)}), {self.threads} threads, "
            f"huge pages {self.huge_pages}, torch {self.torch}, transformers {self.transformers}, "
            f"commit {self.commit}, load {self.load_1m:.1f}"
        )

    def as_dict(self) -> dict[str, object]:
        """The description for JSON."""
        return asdict(self)


def this_machine() -> Machine:
    """The description of this machine."""
    name, flags = _processor()
    return Machine(
        cpu=name,
        cpus=len(os.sched_getaffinity(0)),
        instructions=tuple(flag for flag in _FLAGS if flag in flags),
        threads=torch.get_num_threads(),
        huge_pages="asked for" if os.environ.get("THP_MEM_ALLOC_ENABLE") == "1" else "not asked for",
        torch=torch.__version__,
        transformers=version("transformers"),
        commit=_commit(),
        load_1m=os.getloadavg()[0],
    )


def _processor() -> tuple[str, frozenset[str]]:
    """Model name and flags from /proc/cpuinfo, if there is one."""
    name, flags = platform.processor() or platform.machine(), frozenset[str]()
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return name, flags
    for line in path.read_text().split("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        if key.strip() == "flags":
            flags = frozenset(value.split())
    return name, flags


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    return found.stdout.strip() or "unknown"
