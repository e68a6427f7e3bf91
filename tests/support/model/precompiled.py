"""Compiles kernels in parallel for a Hopper GPU, without having one.

    TRITON_INTERPRET=0 python -m tests.support.model.precompiled

Prints what happened as JSON.
"""

import json
import subprocess
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

from octavo.model.kernels.precompile import compiling, help_compiling, is_compiling, wake_compiler
from tests.support.model.pretended import PretendedDriver


class Launcher:
    """Stands for the launcher that a C compiler would build."""

    def __init__(self, source: Any, metadata: Any) -> None:
        built.append(source.fn.__name__)


built: list[str] = []
"""Names of the kernels that launchers were built for."""


class Driver(PretendedDriver):
    """Also has what compiling needs."""

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


class Helper:
    """A helper process that answers `lasts` requests and refuses further ones."""

    def __init__(self, lasts: int) -> None:
        self._left = lasts
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, "help"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.size = 1

    def ask(self, request: bytes) -> bool:
        """See model.kernels.precompile.Helpers."""
        if not self._left:
            return False
        self._left -= 1
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(request + b"\n")
        self._process.stdin.flush()
        return self._process.stdout.readline() == b"True\n"

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def help_main() -> None:
    """The main loop of a helper process."""
    for line in sys.stdin.buffer:
        try:
            help_compiling(line)
            done = True
        except Exception:
            done = False
        sys.stdout.write(f"{done}\n")
        sys.stdout.flush()


def with_helper(number: int, *, lasts: int) -> dict[str, list[str]]:
    """Names of kernels (which get this number as a constant, so that they are new) that this process compiled itself,
    for which it built launchers, and which it has at the end."""
    own, kernels = list[str](), (one_kernel, like_it_kernel, mistaken_kernel)

    def listen(*, src: Any, cache_hit: bool, **rest: Any) -> None:
        if not cache_hit:
            own.append(src.name)

    for kernel in kernels:
        kernel.device_caches.clear()
    built.clear()
    whole = torch.zeros(1, dtype=torch.int32)
    helper = Helper(lasts)
    try:
        with (
            mock.patch.object(triton.knobs.compilation, "listener", listen),
            compiling(lambda done, total: None, helpers=helper),
        ):
            one_kernel[(1,)](whole, N=number)
            like_it_kernel[(1,)](whole, M=number)
            mistaken_kernel[(1,)](whole)
    finally:
        helper.close()
    has = [each.fn.__name__ for each in kernels for found, *_ in each.device_caches.values() for _ in found]
    return {"own": sorted(own), "built": sorted(built), "has": has}


def ended_early() -> int:
    """How many of five kernels one thread begins to compile if the start is ended while it compiles the second."""
    is_over, begun, compile_one = threading.Event(), list[str](), one_kernel.compile

    def slowly(source: Any, **named: Any) -> Any:
        begun.append(source.name)
        if len(begun) > 1:
            is_over.wait(20)
        return compile_one(source, **named)

    def end(done: int, total: int) -> None:
        if done:
            raise SystemExit

    try:
        with mock.patch.object(one_kernel, "compile", slowly), compiling(end, num_threads=1):
            for number in range(5):
                one_kernel[(1,)](torch.zeros(1, dtype=torch.int32), N=100 + number)
    except SystemExit:
        is_over.set()
    for thread in threading.enumerate():
        if thread.name.startswith("compile"):
            thread.join(60)
    return len(begun)


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
    meanwhile: list[tuple[int, int]] = []
    with mock.patch.object(JITFunction, "_do_compile", note):
        with compiling(
            lambda done, total: progress.append((done, total)),
            num_threads=2,
            meanwhile=lambda: meanwhile.extend(progress),
        ):
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
            "is_compiling": [while_compiling, is_compiling()], "woken": list(built), "is_daemon": thread.daemon,
            "threads": threads, "left": left,
            "helped": with_helper(11, lasts=99), "hardly helped": with_helper(12, lasts=1),
            "begun": ended_early(), "meanwhile": meanwhile,
        },
        sys.stdout,
    )  # fmt: skip


if __name__ == "__main__":
    help_main() if sys.argv[1:] else main()
