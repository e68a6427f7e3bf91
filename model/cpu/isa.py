"""Which instructions of this CPU are used: all that it has, or no more than the variable OCTAVO_CPU_ISA allows.

Classes of CPUs are ordered, each has all that the ones before it have. The variable is an upper bound, so that what
runs on lesser CPUs can be tested and measured on a better one: instructions beyond it are hidden from the compiler of
our kernels, and from torch with the libraries in it. These read their variables when they compute for the first time.

Must not know: torch (it is imported later), tensors.
"""

import ctypes
import os
import platform
from enum import IntEnum
from functools import cache
from pathlib import Path

VARIABLE = "OCTAVO_CPU_ISA"
UNBOUND = ("", "auto")


class Isa(IntEnum):
    """Classes of x86-64 CPUs by the instructions for matrix products; BASELINE is every other CPU, too."""

    BASELINE = 0
    AVX2 = 1
    AVX512 = 2
    VNNI = 3
    BF16 = 4
    AMX = 5

    @property
    def word(self) -> str:
        """Its name in the variable."""
        return self.name.lower()


BOUNDS = tuple(isa.word for isa in Isa if isa is not Isa.BASELINE)
"""What the variable may say besides auto."""

_ADDED = {
    Isa.AVX2: ("avx2", "fma", "f16c", "bmi1", "bmi2"),
    Isa.AVX512: ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
    Isa.VNNI: ("avx512_vnni",),
    Isa.BF16: ("avx512_bf16",),
    Isa.AMX: ("amx_tile", "amx_bf16"),
}
"""Flags of /proc/cpuinfo that make a class, beyond those of the class before."""

_COMPILED = {
    Isa.AVX2: ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2"),
    Isa.AVX512: ("-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl"),
    Isa.VNNI: ("-mavx512vnni",),
    Isa.BF16: ("-mavx512bf16", "-mavx512vbmi"),  # every CPU that has more, and so is bounded here, has VBMI
}

_HIDDEN = {
    Isa.AVX2: {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    Isa.AVX512: {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "MKL_ENABLE_INSTRUCTIONS": "AVX512"},
    Isa.VNNI: {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI", "MKL_ENABLE_INSTRUCTIONS": "AVX512_E1"},
    Isa.BF16: {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "MKL_ENABLE_INSTRUCTIONS": "AVX512_E3"},
}
"""Variables of torch, oneDNN and MKL."""


_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18
"""See arch_prctl(2) and Documentation/arch/x86/xstate.rst of Linux."""

_NO_TILES = ("-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8")


class CpuIsaError(ValueError):
    """OCTAVO_CPU_ISA names an unknown class, or one that this CPU does not have. In three parts, as command lines show
    errors."""

    exit_code = 2

    def __init__(self, numbers: str, change: str) -> None:
        super().__init__(f"{numbers}; {change}")
        self.what, self.numbers, self.change = "bad value for --cpu-isa", numbers, change


@cache
def machine_isa() -> Isa:
    """The class of this CPU, according to Linux; with AMX only if this process may use its tiles."""
    flags, found = cpu_flags(), Isa.BASELINE
    for isa, added in _ADDED.items():
        if not flags.issuperset(added) or (isa is Isa.AMX and not _may_use_tiles()):
            break
        found = isa
    return found


def _may_use_tiles() -> bool:
    """Ask Linux for AMX's tiles, for this process and its forks: using them without permission kills the process. False
    if the kernel is older than 5.16, or a sandbox refuses."""
    if platform.machine() != "x86_64":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0


def cpu_flags() -> frozenset[str]:
    """Instruction sets by their names in /proc/cpuinfo; empty if it lists none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.split()[2:]) for line in lines if line.startswith("flags")), frozenset())


def bound() -> Isa | None:
    """The class that OCTAVO_CPU_ISA asks for; None if it hides nothing. Raises CpuIsaError."""
    return hidden_above(os.environ.get(VARIABLE, "").strip().lower())


def hidden_above(word: str) -> Isa | None:
    """The class of this name, above which instructions are hidden; None if that hides none. Raises CpuIsaError."""
    if word in UNBOUND:
        return None
    if word not in BOUNDS:
        raise CpuIsaError(f"{VARIABLE} is {word!r}", f"give one of {', '.join(BOUNDS)}, or auto")
    wanted, there = Isa[word.upper()], machine_isa()
    if wanted > there:
        has = f"this CPU has {there.word}" if there else "this CPU has none of them (or does not tell)"
        raise CpuIsaError(f"{VARIABLE} is {word!r}, but {has}", "it can only hide instructions: give less, or auto")
    return wanted if wanted < there else None


def cpu_isa() -> Isa:
    """The class of instructions that this process uses. Raises CpuIsaError."""
    limit = bound()
    return machine_isa() if limit is None else limit


def compiler_flags() -> tuple[str, ...]:
    """For our kernels: everything that the machine has, up to the bound. Raises CpuIsaError."""
    limit = bound()
    if limit is None:
        has_tiles_in_vain = machine_isa() is not Isa.AMX and "amx_tile" in cpu_flags()
        return ("-march=native", *(_NO_TILES if has_tiles_in_vain else ()))
    return (
        "-march=x86-64",
        "-mtune=native",
        *(flag for isa, flags in _COMPILED.items() if isa <= limit for flag in flags),
    )


def hide_instructions() -> None:
    """Apply the bound to torch and its libraries too; call it before they compute for the first time. Idempotent.
    Raises CpuIsaError."""
    limit = bound()
    if limit is not None:
        os.environ.update(_HIDDEN[limit])
