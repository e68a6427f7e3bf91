"""Kernels that are compiled beside each other for a Hopper GPU, told without one.

    TRITON_INTERPRET=0 python -m tests.support.model.precompiled

Prints what came of it as JSON.
"""

import json
import sys
import threading
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
import triton.runtime
from triton.runtime.jit import JITFunction

from octavo.model.kernels.precompile import compiling, is_compiling, wake_compiler
from tests.support.model.hopper import HopperDriver


class Launcher:
    """Stands for what a C compiler would build."""

    def __init__(self, source: Any, metadata: Any) -> None:
        built.append(source.fn.__name__)


built: list[str] = []
"""For which kernels."""


class Driver(HopperDriver):
    """With what compiling asks for, too."""

    launcher_cls = Launcher


@triton.jit
def one_kernel(x_1, N: tl.constexpr):
    tl.store(x_1, N)


@triton.jit
def like_it_kernel(y_1, M: tl.constexpr):
    tl.store(y_1, M + 1)


@triton.jit
def other_kernel(x_1, y_1):
    tl.store(x_1, tl.load(y_1))


@triton.jit
def mistaken_kernel(x_1):
    tl.store(x_1, unknown)  # type: ignore[name-defined]  # noqa: F821


def main() -> None:
    """See the module."""
    triton.runtime.driver.set_active(Driver())
    asked: list[str] = []
    compile_one = JITFunction._do_compile

    def note(kernel: Any, *rest: Any) -> Any:
        asked.append(kernel.fn.__name__)
        return compile_one(kernel, *rest)

    progress: list[tuple[int, int]] = []
    whole, half = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.float16)
    with mock.patch.object(JITFunction, "_do_compile", note):
        with compiling(lambda done, total: progress.append((done, total)), num_threads=2):
            while_compiling = is_compiling()
            for _ in range(3):
                one_kernel[(1,)](whole, N=1)
                one_kernel[(1,)](whole, N=2)
                like_it_kernel[(1,)](whole, M=1)
                other_kernel[(1,)](half, half)
                mistaken_kernel[(1,)](whole)
            threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("compile")]
        in_time = list(built)
        try:
            mistaken_kernel[(1,)](whole)
            raised = ""
        except triton.CompilationError as error:
            raised = type(error).__name__
    built.clear()
    try:
        with compiling(lambda done, total: None):
            one_kernel[(1,)](whole, N=3)
            raise MemoryError
    except MemoryError:
        left = sum(len(kernels) for kernels, *_ in one_kernel.device_caches.values())
    with mock.patch.object(torch.cuda, "device", return_value=nullcontext()):
        thread = wake_compiler(torch.device("cuda"))
        thread.join(300)
    json.dump(
        {
            "asked": asked, "built": in_time, "raised": raised, "progress": progress,
            "is_compiling": [while_compiling, is_compiling()], "woken": built, "is_daemon": thread.daemon,
            "threads": threads, "left": left,
        },
        sys.stdout,
    )  # fmt: skip


if __name__ == "__main__":
    main()
