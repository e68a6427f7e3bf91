"""Finds, without a GPU, kernels of a start that a GPU could not run.

Compiles every kernel that a start on a device of some compute capability launches (compiled.py). Prints a line for each
that does not compile, or needs more shared memory or warps than the device has; then the number of kernels.
"""

import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget

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
    """Keeps the kernels that are launched."""

    def __init__(self) -> None:
        self.kernels: list[tuple[Any, Any, dict[str, Any], GPUTarget]] = []

    def note(self, kernel: Any, signature: Any, constexprs: Any, options: Any, attrs: Any, target: GPUTarget) -> None:
        source = kernel.ASTSource(kernel, signature, constexprs, attrs)
        self.kernels.append((kernel, source, dict(options.__dict__), target))


launches = Launches()


def fault_of(index: int, shared_bytes: int) -> str | None:
    """What is wrong with one kernel; None if the device can run it."""
    kernel, source, options, target = launches.kernels[index]
    name = kernel.fn.__name__
    try:
        compiled = triton.compile(source, target=target, options=options)
    except Exception as error:  # whatever the compiler raises
        return f"{name} does not compile: {error!r}"
    if compiled.metadata.shared > shared_bytes:
        return f"{name} takes {compiled.metadata.shared} bytes of shared memory, of {shared_bytes}"
    if compiled.metadata.num_warps > MAX_WARPS:
        return f"{name} has {compiled.metadata.num_warps} warps"
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
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1), mp_context=get_context("fork")) as pool:
        faults = list(pool.map(fault_of, range(num_kernels), [shared_bytes] * num_kernels))
    sys.stdout.writelines(f"{fault}\n" for fault in faults if fault)
    sys.stdout.write(f"{num_kernels}\n")
