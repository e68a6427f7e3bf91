"""Compiling kernels many at a time, before the first of them is launched.

Triton compiles a kernel at its first launch, one after the other, and then has a C compiler build what launches it, a
library for each kind of arguments: together the better part of a minute of a first start. Most of that runs outside
Python's lock, so threads share it well.

Must not know: any particular kernel.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from threading import Lock, Thread
from typing import Any

import torch
import triton
import triton.language as tl
from triton.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.jit import JITFunction

MAX_THREADS = 16

OnProgress = Callable[[int, int], None]
"""Called with (kernels compiled, kernels in all)."""


@triton.jit
def _kernel(number_1):
    tl.store(number_1, 0)


def wake_compiler(device: torch.device) -> Thread:
    """Begin to do what the first kernel waits for whatever it is: the device's context, the compiler's own files read
    and hashed, what talks to the driver built. A thread does it, and never keeps the process from ending."""

    def compile_one() -> None:
        with suppress(Exception), torch.cuda.device(device):  # the first kernel says what is wrong
            source = ASTSource(fn=_kernel, signature={"number_1": "*i32"}, constexprs={})
            kernel = triton.compile(source, target=driver.active.get_current_target())
            driver.active.launcher_cls(kernel.src, kernel.metadata)

    thread = Thread(target=compile_one, name="compiler", daemon=True)
    thread.start()
    return thread


class _Tasks(Executor):
    """What compiles kernels, until `run`: each also builds what launches its kernel, where no other's is the same."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Future[Any], Callable[[], Any]]] = []
        self._built = set[str]()
        self._lock = Lock()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._waiting.append((future, lambda: fn(*args, **kwargs)))
        return future

    def run(self, num_threads: int, on_progress: OnProgress) -> None:
        """All of them."""
        on_progress(0, len(self._waiting))
        with ThreadPoolExecutor(num_threads, "compile") as pool:
            running = [pool.submit(self._run, *each) for each in self._waiting]
            for done, _ in enumerate(as_completed(running), 1):
                on_progress(done, len(running))

    def drop(self) -> None:
        """Let nobody wait for those that have not run."""
        for future, _ in self._waiting:
            if not future.done():
                future.set_exception(RuntimeError("it was not compiled"))

    def _run(self, future: Future[Any], compile_kernel: Callable[[], Any]) -> None:
        try:
            kernel = compile_kernel()
        except Exception as error:
            future.set_exception(error)
            return
        kind = str((*kernel.src.signature.values(), getattr(kernel.metadata, "tensordesc_meta", None)))
        with self._lock:
            is_new = kind not in self._built
            self._built.add(kind)
        if is_new:
            with suppress(Exception):  # the first launch says what is wrong
                driver.active.launcher_cls(kernel.src, kernel.metadata)
        future.set_result(kernel)


_compiling = False


def is_compiling() -> bool:
    """Whether kernels that are launched now are compiled only."""
    return _compiling


@contextmanager
def compiling(on_progress: OnProgress, *, num_threads: int | None = None) -> Iterator[None]:
    """Kernels that are launched inside do not run: what is not compiled yet is, by threads, before the end, and so is
    what launches them.

    Everything else runs as ever; what it computes from the kernels' outputs is worth nothing. A kernel that does not
    compile raises what the compiler does at its first launch. One at a time, in one thread.
    """
    # Threads wait for the last launch: beside them each operation of torch waits for Python's lock, and the launches,
    # a second of work, end when the last kernel is compiled.
    tasks = _Tasks()
    with triton.AsyncCompileMode(tasks, ignore_errors=True), _only_compiling() as asked:
        try:
            yield
            tasks.run(num_threads or min(MAX_THREADS, os.cpu_count() or 1), on_progress)
        finally:
            tasks.drop()
            for kernels, key in asked:
                if kernels[key].future.exception() is not None:
                    del kernels[key]


@contextmanager
def _only_compiling() -> Iterator[list[tuple[dict[str, Any], str]]]:
    """The list is of the kernels that were asked for: a table, and the key there."""
    global _compiling
    asked: list[tuple[dict[str, Any], str]] = []
    launch, compile_one = JITFunction.run, JITFunction._do_compile

    def only_compile(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        return launch(kernel, *args, grid=grid, warmup=True, **named)

    def compile_once(kernel: Any, key: str, signature: Any, device: Any, *rest: Any) -> Any:
        kernels = kernel.device_caches[device][0]
        kernels[key] = compile_one(kernel, key, signature, device, *rest)  # the same launch again finds it there
        asked.append((kernels, key))
        return kernels[key]

    JITFunction.run, JITFunction._do_compile, _compiling = only_compile, compile_once, True
    try:
        yield asked
    finally:
        JITFunction.run, JITFunction._do_compile, _compiling = launch, compile_one, False
