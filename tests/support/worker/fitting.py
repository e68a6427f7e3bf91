"""Finds, without a GPU, kernels of a start that a GPU could not run.

Compiles every kernel that a start on a device of some compute capability launches (compiled.py). Prints a line for each
that does not compile, or needs more shared memory or warps than the device has; then the number of kernels. Of kernels
that differ in nothing but sizes, one goes through to machine code: what the others need is known before, and the
optimiser and the assembler, most of the work, would be asked for the same instructions again.
"""

import hashlib
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia

from octavo.model.kernels.small_batch.launch import MAX_WARPS
from tests.support.worker.compiled import CASES, HEADS_OF_64, HEADS_OF_128, pretend, start

SHORT_ROWS = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
OTHER_CASES: dict[str, dict[str, Any]] = {
    "short rows": {"shape": HEADS_OF_64 | SHORT_ROWS},
    "heads of 256": {"shape": HEADS_OF_64 | {"hidden_size": 1024, "num_attention_heads": 4}},
    "float32": {"dtype": torch.float32},
    "float32, heads of 128": {"dtype": torch.float32, "shape": HEADS_OF_128},
}
"""In addition to compiled.py's cases."""

SHARED_BYTES = {(8, 0): 163 << 10, (8, 6): 99 << 10, (8, 9): 99 << 10, (9, 0): 227 << 10, (12, 0): 99 << 10}
"""Of shared memory per thread block, by compute capability (CUDA C++ programming guide, technical specifications)."""


class Launches:
    """Keeps the kernels that are launched. kinds: of each, what it has in common with those of other sizes."""

    def __init__(self) -> None:
        self.kernels: list[tuple[Any, Any, dict[str, Any], GPUTarget]] = []
        self.kinds: list[str] = []

    def note(self, kernel: Any, signature: Any, constexprs: Any, options: Any, attrs: Any, target: GPUTarget) -> None:
        source = kernel.ASTSource(kernel, signature, constexprs, attrs)
        choices = {path: None if type(value) is int else value for path, value in constexprs.items()}
        kind = str((kernel.fn.__module__, kernel.fn.__name__, signature, choices, target))
        self.kernels.append((kernel, source, dict(options.__dict__), target))
        self.kinds.append(hashlib.sha256(kind.encode()).hexdigest())


launches = Launches()


class Lowered(Exception):
    """The compiler has come to where memory and warps are known. Its arguments are both."""


def stop(module: Any, context: Any) -> None:
    """Takes the place of the step that follows."""
    raise Lowered(module.get_int_attr("ttg.shared"), module.get_int_attr("ttg.total-num-warps"))


def needs_of(index: int, known: Path) -> tuple[int, int]:
    """Shared memory in bytes, and warps, of a program of one kernel. Raises whatever the compiler raises. known: a
    folder with a file for each kind of which one has been through, for this case or another."""
    _, source, options, target = launches.kernels[index]
    kind = launches.kinds[index]
    is_known = kind in launches.kinds[:index] or (known / kind).exists()
    with mock.patch.object(nvidia.llvm, "to_module", stop) if is_known else nullcontext():
        try:
            metadata = triton.compile(source, target=target, options=options).metadata
        except Lowered as needs:
            shared, num_warps = needs.args
            return shared, num_warps or options["num_warps"]
    (known / kind).touch()
    return metadata.shared, metadata.num_warps


def fault_of(index: int, shared_bytes: int, known: Path) -> str | None:
    """What is wrong with one kernel; None if the device can run it."""
    name = launches.kernels[index][0].fn.__name__
    try:
        shared, num_warps = needs_of(index, known)
    except Exception as error:  # whatever the compiler raises
        return f"{name} does not compile: {error!r}"
    if shared > shared_bytes:
        return f"{name} takes {shared} bytes of shared memory, of {shared_bytes}"
    if num_warps > MAX_WARPS:
        return f"{name} has {num_warps} warps"
    return None


def tell_faults(device: str, name: str) -> None:
    """See the module."""
    major, _, minor = device.partition(".")
    capability = int(major), int(minor)
    shared_bytes = SHARED_BYTES[capability]
    np.random.seed(0)
    case = (CASES | OTHER_CASES)[name]
    start(pretend(launches, capability=capability, shared_bytes=shared_bytes), **case)
    num_kernels = len(launches.kernels)
    known = Path(os.environ["TRITON_CACHE_DIR"]) / "known"
    known.mkdir(exist_ok=True)
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1), mp_context=get_context("fork")) as pool:
        faults = list(pool.map(fault_of, range(num_kernels), repeat(shared_bytes), repeat(known)))
    sys.stdout.writelines(f"{fault}\n" for fault in faults if fault)
    sys.stdout.write(f"{num_kernels}\n")
