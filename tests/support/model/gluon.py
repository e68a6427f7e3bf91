"""Runs Gluon kernels in Triton's interpreter, which does not support them: layouts mean nothing here, and a copy to
shared memory arrives only when it is waited for."""

from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.interpreter import InterpretedFunction, TensorHandle

tl.block_type.layout = None  # kernels ask for that of a tensor


def interpreted(module: ModuleType, kernel: str, *, instead: dict[str, Any] | None = None) -> Any:
    """The module's kernel, which may call the module's other Gluon functions. instead: replacements for some of these,
    by name."""
    names = dict(vars(module)) | {"tl": tl, "gl": _Language(), "mma_v2": _mma_v2, "async_copy": _Copies()}
    names["thread_barrier"] = lambda: None  # the interpreter runs each operation for all threads of a program at once
    for name, function in vars(module).items():
        if isinstance(function, GluonJITFunction):
            plain = function.fn
            copy = FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__)
            copy.__annotations__, copy.__kwdefaults__ = plain.__annotations__, plain.__kwdefaults__
            names[name] = InterpretedFunction(copy)
    names |= instead or {}
    rewritten = names[kernel].rewrite()
    rewritten.__annotations__ = dict.fromkeys(rewritten.__annotations__, "constexpr")  # it knows no "gl.constexpr"
    return names[kernel]


def _mma_v2(a: Any, b: Any, acc: Any) -> Any:
    return tl.dot(a, b, acc, input_precision="ieee")


def _number(value: Any) -> int:
    value = getattr(value, "value", value)  # a constexpr's
    return int(np.asarray(value.handle.data).item()) if hasattr(value, "handle") else int(value)


class _Language:
    """`gluon.language`, as far as it differs from `triton.language`."""

    def __getattr__(self, name: str) -> Any:
        return (lambda *_: None) if name.endswith("Layout") else getattr(tl, name)

    def arange(self, start: int, end: int, layout: None) -> Any:
        return tl.arange(start, end)

    def full(self, shape: list[int], value: float, dtype: Any, layout: None) -> Any:
        return tl.full(shape, value, dtype)

    def convert_layout(self, value: Any, layout: None) -> Any:
        return value

    def allocate_shared_memory(self, dtype: Any, shape: list[Any], layout: None) -> "_Shared":
        return _Shared([_number(each) for each in shape])


class _Shared:
    """Tiles in shared memory; None until their copy has arrived."""

    def __init__(self, shape: list[int]) -> None:
        self.shape, self.tiles = shape, [None] * shape[0]

    def index(self, at: Any) -> "_Tile":
        return _Tile(self, _number(at))

    def _reinterpret(self, element: Any, shape: list[Any], layout: None) -> "_Rows":
        return _Rows(self, _number(shape[1]))


class _Rows:
    """A view of the tiles that accesses some rows of one tile at a time."""

    def __init__(self, shared: _Shared, length: int) -> None:
        self.shared, self.length = shared, length

    def index(self, at: Any) -> "_Rows":
        tile, row = divmod(_number(at) * self.length, self.shared.shape[1])
        rows = _Rows(self.shared, self.length)
        rows.tile, rows.first = self.shared.tiles[tile], row
        assert rows.tile is not None, "rows are read before their copy was waited for"
        return rows

    def load(self, layout: None) -> Any:
        rows = self.tile.handle.data[self.first : self.first + self.length].copy()
        return tl.tensor(TensorHandle(rows, self.tile.dtype), tl.block_type(self.tile.dtype, list(rows.shape)))

    def store(self, value: Any) -> None:
        self.tile.handle.data[self.first : self.first + self.length] = value.handle.data


class _Tile:
    def __init__(self, shared: _Shared, at: int, *, is_turned: bool = False) -> None:
        self.shared, self.at, self.is_turned = shared, at, is_turned

    def permute(self, order: list[int]) -> "_Tile":
        return _Tile(self.shared, self.at, is_turned=True)

    def load(self, layout: None) -> Any:
        tile = self.shared.tiles[self.at]
        assert tile is not None, "a tile is read before its copy was waited for"
        return tl.trans(tile) if self.is_turned else tile


class _Copies(SimpleNamespace):
    """`async_copy`."""

    def __init__(self) -> None:
        super().__init__(open=[], groups=[])

    def async_copy_global_to_shared(self, tile: _Tile, pointer: Any, mask: Any) -> None:
        tile.shared.tiles[tile.at] = None
        self.open.append((tile, tl.load(pointer, mask=mask, other=0.0)))

    def commit_group(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def wait_group(self, num_outstanding: Any) -> None:
        while len(self.groups) > _number(num_outstanding):
            for tile, value in self.groups.pop(0):
                tile.shared.tiles[tile.at] = value
