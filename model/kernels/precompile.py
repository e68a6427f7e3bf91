"""Compiling kernels many at a time, before the first of them is launched.

Triton compiles a kernel at its first launch, one after the other, and then has a C compiler build what launches it, a
library for each kind of arguments: together the better part of a minute of a first start. Processes do it beside each
other where there are some, while this one finds out what else is launched, and leave it on disk; else threads, since
most of it runs outside Python's lock.

Must not know: any particular kernel, where processes come from.
"""

import ast
import importlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from threading import Lock, Thread
from typing import Any, NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
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


class Helpers(Protocol):
    """Processes in which `help_compiling` answers requests."""

    @property
    def size(self) -> int:
        """How many there are."""

    def ask(self, request: bytes) -> bool:
        """Let one of them answer, and wait until it has, in any thread; False where it could not."""

    def close(self) -> None:
        """End them. Idempotent."""


class Request(NamedTuple):
    """A kernel, as triton's compiler takes it. launcher: of a driver, to be built, too; None for the kernel alone."""

    kernel: JITFunction
    signature: Any
    constexprs: Any
    attrs: Any
    options: dict[str, Any]
    target: GPUTarget
    launcher: type | None = None

    def packed(self) -> bytes | None:
        """For another process that can import what this one has; None where it cannot go there. With what the kernel's
        place on disk is named by: as triton hashes constants, that depends on which kernels were hashed before."""
        kernel, target = self.kernel, self.target
        classes = [each and (each.__module__, each.__qualname__) for each in (kernel.ASTSource, self.launcher)]
        dtypes = {path: str(value) for path, value in self.constexprs.items() if isinstance(value, tl.dtype)}
        plain = {path: value for path, value in self.constexprs.items() if path not in dtypes}
        text = repr(
            (
                (kernel.fn.__module__, kernel.fn.__qualname__),
                kernel.cache_key,
                self.signature,
                (plain, dtypes),
                self.attrs,
                self.options,
                (target.backend, target.arch, target.warp_size),
                *classes,
            )
        )
        try:
            ast.literal_eval(text)
        except (ValueError, SyntaxError):  # an argument that is more than numbers and words
            return None
        return text.encode()


def _found(module: str, name: str) -> Any:
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def wake_helper() -> None:
    """Do what takes a helper long before its first request, in the process of which helpers are forked: triton reads
    and hashes its own files, of hundreds of megabytes."""
    with suppress(ImportError):  # of another triton
        from triton.runtime.cache import triton_key

        triton_key()


def help_compiling(request: bytes) -> None:
    """Leave on disk what a helper is asked for. Raises what the compiler does."""
    name, cache_key, signature, constexprs, attrs, options, target, source, launcher = ast.literal_eval(
        request.decode()
    )
    kernel = _found(*name)
    while not isinstance(kernel, JITFunction):  # what chooses a kernel's settings has it so
        kernel = kernel.fn
    kernel.hash = cache_key
    plain, dtypes = constexprs
    values = plain | {path: tl.dtype(value) for path, value in dtypes.items()}
    compiled = triton.compile(
        _found(*source)(kernel, signature, values, attrs), target=GPUTarget(*target), options=options
    )
    if launcher is not None:
        _found(*launcher)(compiled.src, compiled.metadata)


class _Task(NamedTuple):
    """A kernel to be compiled. asked: whether a helper has compiled it; launcher: to be built, too."""

    future: Future[Any]
    compile: Callable[[], Any]
    asked: Future[bool] | None
    launcher: type | None


class _Tasks(Executor):
    """What compiles kernels, at `run`: each also builds what launches its kernel, where no other's is the same. Helpers
    begin as tasks are submitted."""

    def __init__(self, helpers: Helpers | None, num_threads: int) -> None:
        self._helpers = helpers
        self._asking = ThreadPoolExecutor(max(1, helpers.size if helpers is not None else 1), "ask")
        self._pool = ThreadPoolExecutor(num_threads, "compile")
        self._tasks: list[_Task] = []
        self._kinds = set[str]()
        self._lock = Lock()
        self._is_dropped = False
        self.request: Request | None = None
        """What is submitted next."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        assert self.request is not None
        # A tensor's description is part of what is launched, and is known of a compiled kernel only.
        kind = str([*self.request.signature.values()])
        is_new = kind not in self._kinds or "tensordesc" in kind
        self._kinds.add(kind)
        launcher = driver.active.launcher_cls if is_new else None
        packed = self.request._replace(launcher=launcher).packed() if self._helpers is not None else None
        asked = None
        if self._helpers is not None and packed is not None:
            asked = self._asking.submit(self._helpers.ask, packed)
        task = _Task(Future(), lambda: fn(*args, **kwargs), asked, launcher)
        self._tasks.append(task)
        return task.future

    def run(self, on_progress: OnProgress, meanwhile: Callable[[], None]) -> None:
        """All of them."""
        on_progress(0, len(self._tasks))
        for task in self._tasks:
            self._pool.submit(self._run, task)
        meanwhile()
        for done, _ in enumerate(as_completed([each.future for each in self._tasks]), 1):
            on_progress(done, len(self._tasks))

    def end(self) -> None:
        """Let nobody wait for those that have not run."""
        with self._lock:
            self._is_dropped = True
            for task in self._tasks:
                if not task.future.done():
                    task.future.set_exception(RuntimeError("it was not compiled"))
        for pool in (self._asking, self._pool):
            pool.shutdown(wait=False, cancel_futures=True)

    def _run(self, task: _Task) -> None:
        kernel, error = None, None
        try:
            is_helped = task.asked is not None and task.asked.result()
            if self._is_dropped:
                return
            kernel = task.compile()  # only read, where a helper has compiled it
            if task.launcher is not None and not is_helped:
                with suppress(Exception):  # the first launch says what is wrong
                    task.launcher(kernel.src, kernel.metadata)
        except Exception as raised:
            error = raised
        with self._lock:
            if task.future.done():
                return
            if error is not None:
                task.future.set_exception(error)
            else:
                task.future.set_result(kernel)


_compiling = False


def is_compiling() -> bool:
    """Whether kernels that are launched now are compiled only."""
    return _compiling


@contextmanager
def compiling(
    on_progress: OnProgress,
    *,
    helpers: Helpers | None = None,
    num_threads: int | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Kernels that are launched inside do not run: what is not compiled yet is, by helpers or threads, before the end,
    and so is what launches them. meanwhile: done here while they are at it.

    Everything else runs as ever; what it computes from the kernels' outputs is worth nothing. A kernel that does not
    compile raises what the compiler does at its first launch. One at a time, in one thread.
    """
    # Threads wait for the last launch: beside them each operation of torch waits for Python's lock, and the launches,
    # a second of work, end when the last kernel is compiled. Helpers need that lock for a moment only.
    num_helpers = helpers.size if helpers is not None else 0
    tasks = _Tasks(
        helpers if num_helpers else None, num_threads or num_helpers or min(MAX_THREADS, os.cpu_count() or 1)
    )
    with triton.AsyncCompileMode(tasks, ignore_errors=True), _only_compiling(tasks) as asked:
        try:
            yield
            tasks.run(on_progress, meanwhile)
        finally:
            tasks.end()
            for kernels, key in asked:
                if kernels[key].future.exception() is not None:
                    del kernels[key]


@contextmanager
def _only_compiling(tasks: _Tasks) -> Iterator[list[tuple[dict[str, Any], str]]]:
    """The list is of the kernels that were asked for: a table, and the key there."""
    global _compiling
    asked: list[tuple[dict[str, Any], str]] = []
    launch, compile_one = JITFunction.run, JITFunction._do_compile

    def only_compile(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        return launch(kernel, *args, grid=grid, warmup=True, **named)

    def compile_once(kernel: Any, key: str, signature: Any, device: Any, *rest: Any) -> Any:
        kernels, _, target, *_ = kernel.device_caches[device]
        constexprs, options, attrs, _ = rest
        tasks.request = Request(kernel, signature, constexprs, attrs, dict(options.__dict__), target)
        kernels[key] = compile_one(kernel, key, signature, device, *rest)  # the same launch again finds it there
        asked.append((kernels, key))
        return kernels[key]

    JITFunction.run, JITFunction._do_compile, _compiling = only_compile, compile_once, True
    try:
        yield asked
    finally:
        JITFunction.run, JITFunction._do_compile, _compiling = launch, compile_one, False
