"""A pytest plugin that selects the tests chosen for sanitizers, and records the kernels that each test launches.

    python -m pytest -p bench.gpu.sanitize.launches --sanitized --launches PATH tests/model/kernels

--sanitized selects tests that are marked with `@pytest.mark.sanitize`, or the cases whose parameters
`@pytest.mark.sanitize(only=...)` accepts. --launches adds a line of JSON to the file for each test that passed: its
name, its seconds, and the bytes of shared memory of each of its kernels. Kernels in Triton's interpreter have none.
"""

import inspect
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOM = "octavo.model.kernels."


def kernel_name(kernel: Any) -> str:
    """The kernel's name with its module, relative to the kernels' package."""
    return f"{kernel.fn.__module__.removeprefix(ROOM)}.{kernel.fn.__name__}"


class Launches:
    """Records launches, once it `begins`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # Imported only now: conftest decides whether Triton interprets kernels.
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction

        from octavo.model.kernels.cuda_source import CudaKernel

        self._shared: dict[str, int] = {}
        for kind in (JITFunction, InterpretedFunction):
            kind.run = self._noting(kind.run)
        CudaKernel.launch = self._noting_cuda(CudaKernel.launch)  # type: ignore[method-assign]

    def _noting(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
            compiled = launch(kernel, *args, grid=grid, warmup=warmup, **named)
            if not warmup:
                name, shared = kernel_name(kernel), getattr(getattr(compiled, "metadata", None), "shared", 0)
                self._shared[name] = max(shared, self._shared.get(name, 0))
            return compiled

        return run

    def _noting_cuda(self, launch: Callable[..., None]) -> Callable[..., None]:
        def run(kernel: Any, *args: Any) -> None:
            launch(kernel, *args)
            self._shared[kernel.name] = max(kernel.shared_bytes, self._shared.get(kernel.name, 0))

        return run

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Record the test, if it passes."""
        self._shared, start_s = {}, time.monotonic()
        yield
        told = {"test": item.nodeid, "seconds": time.monotonic() - start_s, "kernels": self._shared}
        with self._path.open("a") as file:
            file.write(json.dumps(told) + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the two options."""
    parser.addoption("--sanitized", action="store_true", help="only tests that are marked for it")
    parser.addoption("--launches", type=Path, help="note kernels of passed tests here")


def pytest_configure(config: pytest.Config) -> None:
    """Begin recording, if asked."""
    path = config.getoption("--launches")
    if path is not None:
        config.pluginmanager.register(Launches(path))


def is_chosen(item: pytest.Item) -> bool:
    """Whether the test's mark selects it."""
    mark = item.get_closest_marker("sanitize")
    only = None if mark is None else mark.kwargs.get("only")
    if only is None:
        return mark is not None
    params = item.callspec.params  # type: ignore[attr-defined]
    return bool(only(**{name: params[name] for name in inspect.signature(only).parameters}))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep only the selected tests, if asked."""
    if config.getoption("--sanitized"):
        left_out = [item for item in items if not is_chosen(item)]
        items[:] = [item for item in items if is_chosen(item)]
        config.hook.pytest_deselected(items=left_out)
