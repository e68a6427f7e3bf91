"""Compiles many kernels in parallel, before the first of them is launched.

Triton compiles kernels one by one at their first launch, and then has a C compiler build each one's launcher, a library
for each signature: together most of a minute of a first start. Helper processes, if there are any, compile in parallel
while this process finds out what else is launched, and leave the results on disk; otherwise threads do it, since most
of the work runs outside Python's lock.

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
    """Start the work that the first kernel waits for, whichever it is: creating the device's context, reading and
    hashing the compiler's own files, building the library that talks to the driver. Runs in a daemon thread."""

    def compile_one() -> None:
        with suppress(Exception), torch.cuda.device(device):  # the first kernel will report what is wrong
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
        """The number of processes."""

    def ask(self, request: bytes) -> bool:
        """Have one of them answer, and wait for it; from any thread. False if it could not."""

    def close(self) -> None:
        """End them. Idempotent."""


class Request(NamedTuple):
    """A kernel, as triton's compiler takes it. launcher: the driver's class, if the launcher is to be built too."""

    kernel: JITFunction
    signature: Any
    constexprs: Any
    attrs: Any
    options: dict[str, Any]
    target: GPUTarget
    launcher: type | None = None

    def packed(self) -> bytes | None:
        """Serialised for another process that can import the same modules; None if that is not possible. Includes the
        kernel's cache key, which names its files on disk: because of how triton hashes constants, the key depends on
        which kernels were hashed before."""
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
        except (ValueError, SyntaxError):  # an argument that is not a plain literal
            return None
        return text.encode()


def _found(module: str, name: str) -> Any:
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def wake_helper() -> None:
    """Do the slow part of a helper's first request in the process from which helpers are forked: triton reads and
    hashes its own files, hundreds of megabytes."""
    with suppress(ImportError):  # another release of triton
        from triton.runtime.cache import triton_key

        triton_key()


def help_compiling(request: bytes) -> None:
    """Compile what is requested and leave it on disk. Raises what the compiler raises."""
    name, cache_key, signature, constexprs, attrs, options, target, source, launcher = ast.literal_eval(
        request.decode()
    )
    kernel = _found(*name)
    while not isinstance(kernel, JITFunction):  # unwrap objects that choose a kernel's settings
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
    """A kernel to be compiled. asked: whether a helper has compiled it; None: none was asked. launcher: to be built
    too, if not None."""

    future: Future[Any]
    compile: Callable[[], Any]
    asked: Future[bool] | None
    launcher: type | None


class _Tasks(Executor):
    """An executor that compiles kernels when `run` is called. A task also builds its kernel's launcher, unless another
    task builds the same one. Helpers start as soon as tasks are submitted."""

    def __init__(self, helpers: Helpers | None, num_threads: int) -> None:
        self._helpers = helpers
        self._asking = ThreadPoolExecutor(max(1, helpers.size if helpers is not None else 1), "ask")
        self._pool = ThreadPoolExecutor(num_threads, "compile")
        self._tasks: list[_Task] = []
        self._kinds = set[str]()
        self._lock = Lock()
        self._is_dropped = False
        self.request: Request | None = None
        """The request that belongs to the next `submit`."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        assert self.request is not None
        # Tensor descriptors are part of the launcher and known only once the kernel is compiled.
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
        """Run all tasks, and `meanwhile` beside them."""
        on_progress(0, len(self._tasks))
        for task in self._tasks:
            self._pool.submit(self._run, task)
        meanwhile()
        for done, _ in enumerate(as_completed([each.future for each in self._tasks]), 1):
            on_progress(done, len(self._tasks))

    def end(self) -> None:
        """Fail the tasks that have not run, so that nobody waits for them."""
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
            kernel = task.compile()  # only reads the result if a helper has compiled it
            if task.launcher is not None and not is_helped:
                with suppress(Exception):  # the first launch will report what is wrong
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
    """Whether kernels that are launched now are only compiled."""
    return _compiling


@contextmanager
def compiling(
    on_progress: OnProgress,
    *,
    helpers: Helpers | None = None,
    num_threads: int | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Kernels that are launched inside do not run. Those that are not compiled yet are compiled by helpers or threads
    before the context ends, and their launchers are built. meanwhile: called in this thread while they compile.

    Everything else runs as usual; what it computes from the kernels' outputs is meaningless. A kernel that does not
    compile raises the compiler's error at its first real launch. One context at a time, in one thread.
    """
    # Threads start after the last launch: beside them, each torch operation would wait for Python's lock, and the
    # launches, a second of work, would only end when the last kernel is compiled. Helpers need that lock only briefly.
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
    """Yields a list of the requested kernels: (table, key in it)."""
    global _compiling
    asked: list[tuple[dict[str, Any], str]] = []
    launch, compile_one = JITFunction.run, JITFunction._do_compile

    def only_compile(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        return launch(kernel, *args, grid=grid, warmup=True, **named)

    def compile_once(kernel: Any, key: str, signature: Any, device: Any, *rest: Any) -> Any:
        kernels, _, target, *_ = kernel.device_caches[device]
        constexprs, options, attrs, _ = rest
        tasks.request = Request(kernel, signature, constexprs, attrs, dict(options.__dict__), target)
        kernels[key] = compile_one(kernel, key, signature, device, *rest)  # found there by the same launch later
        asked.append((kernels, key))
        return kernels[key]

    JITFunction.run, JITFunction._do_compile, _compiling = only_compile, compile_once, True
    try:
        yield asked
    finally:
        JITFunction.run, JITFunction._do_compile, _compiling = launch, compile_one, False
