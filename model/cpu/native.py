"""Compiles the C files of this folder with the machine's own C compiler, once per machine, and loads it.

The result is kept in $XDG_CACHE_HOME/octavo/native (or ~/.cache/octavo/native) under the hash of source, flags,
compiler and processor. Without a compiler, or with OCTAVO_NATIVE=off, there is no library and callers use torch; so it
is with a word there that is neither on nor off, and the reason then names it.
Must not know: tensors.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from octavo.model.cache_folder import VARIABLE, cache_folder, require_executable
from octavo.model.cpu.isa import compiler_flags

_UNITS = "team kernels decode matmul matmul_fp32 matmul_int8 prefill invariant largest layer"
_INCLUDED = (
    "team vectors lanes dots_x86 dots_neon tiles_amx panels_amx panels_bf16 spans_bf16 spans_fp32 heads_bf16 heads_fp32"
)
SOURCES = tuple(Path(__file__).with_name(f"{name}.c") for name in _UNITS.split())
HEADERS = tuple(Path(__file__).with_name(f"{name}.h") for name in _INCLUDED.split())
_FLAGS = (
    "-O3",
    "-pthread",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-strict-aliasing",
    "-shared",
    "-fPIC",
)
_COMPILE_TIMEOUT_S = 120.0
MOST_SAID = 200  # characters of a compiler's complaint
_TENSOR, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_SIGNATURES: dict[str, tuple[list[type], type | None]] = {
    "octavo_decode_attention": (
        [_TENSOR, _LONG, _TENSOR, _TENSOR, _TENSOR, _LONG, _TENSOR, _TENSOR, *[_LONG] * 5, _FLOAT, _INT],
        _INT,
    ),
    "octavo_rms_norm": ([_TENSOR, _TENSOR, _TENSOR, _LONG, _LONG, _FLOAT, _INT], None),
    "octavo_silu_mul": ([_TENSOR, _TENSOR, _LONG, _LONG, _INT], None),
    "octavo_arithmetic": ([], ctypes.c_char_p),
    "octavo_integer_arithmetic": ([], ctypes.c_char_p),
    "octavo_multiply": ([*[_TENSOR] * 3, _INT, _LONG, _INT], _INT),
    "octavo_largest": ([_TENSOR, _LONG, _TENSOR, _TENSOR, _LONG, _LONG, _INT], None),
    "octavo_chunk_attention": ([*[_TENSOR] * 5, *[_LONG] * 6, _FLOAT, _INT], _INT),
    "octavo_layer_rest": ([*[_TENSOR] * 5, _LONG, _TENSOR], _INT),
    "octavo_invariant_product": ([*[_TENSOR] * 4, *[_LONG] * 3, _INT], None),
    "octavo_rms_norm_f32": ([*[_TENSOR] * 3, _LONG, _LONG, _FLOAT, _INT], None),
    "octavo_silu_mul_f32": ([_TENSOR, _TENSOR, _LONG, _LONG, _INT], None),
    "octavo_attention_f32": ([*[_TENSOR] * 4, _LONG, *[_TENSOR] * 2, *[_LONG] * 5, _FLOAT, _INT], _INT),
    "octavo_rope_write": ([*[_TENSOR] * 7, *[_LONG] * 5, _INT], None),
}


ON, OFF = ("", "on", "1", "true", "yes"), ("off", "0", "false", "no")


@dataclass(frozen=True, slots=True)
class _Missing:
    """why: as part of a sentence; None if nobody wants them. by_switch: OCTAVO_NATIVE says so."""

    why: str | None
    by_switch: bool = False


@cache
def _outcome() -> ctypes.CDLL | _Missing:
    """The compiled kernels, or why there are none."""
    word = os.environ.get("OCTAVO_NATIVE", "").strip().lower()
    if word in OFF or os.name != "posix":
        return _Missing(None, by_switch=word in OFF)
    if word not in ON:
        return _Missing(f"OCTAVO_NATIVE is {word!r}, neither on nor off", by_switch=True)
    if not all(source.exists() for source in (*SOURCES, *HEADERS)):
        return _Missing("their sources are not installed")
    compiler = _compiler()
    if compiler is None:
        return _Missing("there is no C compiler (cc)")
    try:
        file = _compiled(compiler)
        with suppress(OSError, AttributeError):
            return _load(file)
        file.unlink()  # the machine stopped before all of it was on disk
        return _load(_compiled(compiler))
    except subprocess.CalledProcessError as error:
        return _Missing(f"{compiler} could not compile them{_complaint(error.stderr)}")
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        return _Missing(str(error))


def _complaint(stderr: bytes) -> str:
    """What a compiler complained of first, as the end of a sentence; empty if it said nothing."""
    lines = [line.strip() for line in stderr.decode("utf-8", "replace").splitlines() if line.strip()]
    errors = (line for line in lines if "error" in line.lower() or "fail" in line.lower())
    said = next(errors, lines[-1] if lines else "")
    return f": {said[:MOST_SAID]}" if said else ""


@cache
def native_library() -> ctypes.CDLL | None:
    """The compiled kernels, or None if they are unavailable. The first call compiles: 3 s on one machine, 19 s on
    another."""
    outcome = _outcome()
    return outcome if isinstance(outcome, ctypes.CDLL) else None


def why_missing() -> str | None:
    """Why there are no kernels, as part of a sentence; None if there are, or they were switched off."""
    outcome = _outcome()
    return outcome.why if isinstance(outcome, _Missing) else None


def is_switched_off() -> bool:
    """Whether there are no kernels for what OCTAVO_NATIVE says."""
    outcome = _outcome()
    return isinstance(outcome, _Missing) and outcome.by_switch


def kernels_arithmetic() -> str:
    """For people: what computes products of bf16 weights. Empty if there is no library."""
    library = native_library()
    return "" if library is None else bytes(library.octavo_arithmetic()).decode()


def integer_arithmetic() -> str:
    """For people: what multiplies integers by integers. Empty if nothing does."""
    library = native_library()
    return "" if library is None else bytes(library.octavo_integer_arithmetic()).decode()


def kernels_fingerprint() -> str:
    """Identifies the compiled code: sources, flags, compiler, processor. Empty if there is no library."""
    library = native_library()
    return "" if library is None else Path(library._name).stem


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc")


def _load(file: Path) -> ctypes.CDLL:
    """Raises OSError for a file that is not a library, AttributeError if a function is missing."""
    library = ctypes.CDLL(str(file))
    for name, (arguments, result) in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    return library


def _compiled(compiler: str) -> Path:
    """The library's file, compiled if necessary. Raises SubprocessError, OSError."""
    folder = _folder()
    file = folder / f"kernels-{_fingerprint(compiler)}.so"
    if not file.exists():
        require_executable(folder, VARIABLE)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            fresh = Path(scratch) / file.name
            command = [compiler, *_FLAGS, *compiler_flags(), "-o", str(fresh), *map(str, SOURCES), "-lm"]
            subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_TIMEOUT_S)
            fresh.replace(file)  # whole or not at all: other processes may compile it now
    return file


def _folder() -> Path:
    """A folder that only we may write to, because what is in it gets executed. Raises PermissionError if another user
    could."""
    folder = cache_folder("native")
    if folder.exists():
        status = folder.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise PermissionError(f"{folder} belongs to others, or others may write there")
    return folder


def _fingerprint(compiler: str) -> str:
    """A hash of everything that determines the compiler's output, since caches may be shared between machines."""
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=10.0).stdout
    parts = (
        *(source.read_bytes() for source in (*SOURCES, *HEADERS)),
        " ".join((*_FLAGS, *compiler_flags())).encode(),
        version,
        _processor().encode(),
    )
    return hashlib.blake2b(b"\0".join(parts), digest_size=12).hexdigest()


def _processor() -> str:
    """Architecture and instruction sets."""
    found = Path("/proc/cpuinfo")
    lines = found.read_text().split("\n\n")[0].splitlines() if found.exists() else []
    kept = [line for line in lines if line.partition(":")[0].strip() in ("model name", "flags", "Features", "CPU part")]
    return "\n".join([platform.machine(), *kept])
