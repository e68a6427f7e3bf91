"""Compiling kernels many at a time, before the first of them is launched.

Triton compiles a kernel at its first launch, one after the other: half a minute of a first start. Most of that runs
outside Python's lock, so threads share it well.

Must not know: any particular kernel.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

import triton
from triton.runtime.jit import JITFunction

MAX_THREADS = 16

OnProgress = Callable[[int, int], None]
"""Called with (kernels compiled, kernels in all)."""


@contextmanager
def compiling(on_progress: OnProgress, *, num_threads: int | None = None) -> Iterator[None]:
    """Kernels that are launched inside do not run: what is not compiled yet is, by threads, before the end.

    Everything else runs as ever; what it computes from the kernels' outputs is worth nothing. Raises what the compiler
    raises. One at a time, in one thread.
    """
    launch = JITFunction.run

    def only_compile(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        return launch(kernel, *args, grid=grid, warmup=True, **named)

    threads = num_threads or min(MAX_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, "compile") as pool, triton.AsyncCompileMode(pool) as mode:
        JITFunction.run = only_compile
        try:
            yield
        finally:
            JITFunction.run = launch
        futures = list(mode.raw_futures)
        on_progress(0, len(futures))
        for done, future in enumerate(as_completed(futures), 1):
            future.result()
            on_progress(done, len(futures))
