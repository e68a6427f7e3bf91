"""Triton's interpreter, where it needs help."""

import math
import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

FLOATS = {32: np.float32, 16: np.float16}
WARNINGS = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),  # integers wrap, as they must
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]
"""Marks for tests that run kernels: what numpy says of ones that are right."""


def cut_decodes_coarsely(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs programs one after the other, also those without work: few of them then, and chunks so short that short
    contexts have several."""
    from octavo.model.kernels.attention import decode_work

    limits = decode_work.WorkLimits(target_items=8, min_chunk_tokens=16)
    monkeypatch.setattr(decode_work.WorkLimits, "of", lambda num_kv_heads: limits)
    monkeypatch.setattr(decode_work, "CHUNK_MULTIPLE", 16)


def convert_to_e4m3_as_devices_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6's interpreter loses the carry of what rounds up to a power of two, and does not saturate."""
    from triton.runtime import interpreter

    original: Callable[..., Any] = interpreter._convert_float

    def convert(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if target.name != "fp8e4nv" or not str(source.name).startswith("fp") or source.primitive_bitwidth not in FLOATS:
            return original(data, source, target, rounding)
        values = np.frombuffer(data.tobytes(), FLOATS[source.primitive_bitwidth]).reshape(data.shape)
        rounded = torch.from_numpy(values.copy()).float().clamp(-448, 448).to(torch.float8_e4m3fn)
        return rounded.view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert)


@cache
def prepare_interpreter() -> None:
    """Once in every process that runs kernels in the interpreter."""
    if find_spec("triton") is None:
        return
    _let_comparisons_be_booleans()
    _patch_the_language_once()
    _reduce_by_halves()
    if os.environ.get("TRITON_INTERPRET") == "1":
        _describe_each_shape_once()


def _let_comparisons_be_booleans() -> None:
    """Comparisons in triton's interpreter call their result a number of their operands' type: spread over a block it
    becomes one, and triton 3.9 takes no such masks."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder

    def boolean(compare: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, lhs, rhs: interpreter.TensorHandle(compare(self, lhs, rhs).data.astype(bool), tl.int1)

    for name in [name for name in vars(builder) if name.startswith(("create_icmp", "create_fcmp"))]:
        setattr(builder, name, boolean(getattr(builder, name)))


def _patch_the_language_once() -> None:
    """The interpreter goes through the whole language at each call of a function within a kernel, to put its own in the
    place of what a launch has replaced already, and makes a table of all types to look one up: half of its time."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch, look_up = interpreter._patch_lang, interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def patch_once(fn: Any) -> Any:
        if any(tl.core.is_builtin(language.load) for language in (tl, tl.core)):
            return patch(fn)
        return SimpleNamespace(restore=lambda: None)

    def look_up_once(kind: Any) -> Any:
        scalar = kind.scalar
        if scalar.is_ptr():
            return look_up(scalar)
        if scalar.name not in known:
            known[scalar.name] = look_up(scalar)
        return known[scalar.name]

    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, look_up_once


def _describe_each_shape_once() -> None:
    """The language makes constants and types of each dimension of each value, and the words for them: a third of what
    the interpreter does. Here values of one shape share them, and words are made where they are read."""
    import triton.language as tl

    def whole(number: Any) -> int:
        return number.value if isinstance(number, tl.constexpr) else number

    @cache
    def of_type(*shape: int) -> tuple[Any, int]:
        """As the language does it: it refuses some, and numbers may not be of any type."""
        original(described := object.__new__(tl.block_type), tl.int32, list(shape))
        return described.shape, described.numel

    @cache
    def of_value(*shape: int) -> tuple[Any, Any]:
        return tl.core.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape))

    def make_type(self: Any, element_ty: Any, shape: Any) -> None:
        self.element_ty = element_ty
        self.shape, self.numel = of_type(*map(whole, shape))

    def make_value(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_value(*type.shape) if type.is_block() else of_value()

    original = tl.block_type.__init__
    tl.block_type.__init__ = make_type
    tl.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>", lambda self, name: None)
    tl.tensor.__init__ = make_value


def _reduce_by_halves() -> None:
    """The interpreter calls functions that combine elements for one pair of elements after the other, but for a few
    functions that it knows; they take blocks, too."""
    from triton.runtime import interpreter

    def reduce(self: Any, input: tuple[Any, ...]) -> list[Any]:
        blocks, axis = self.unravel(input, self.axis)
        parts = [np.moveaxis(block.handle.data, axis, 0) for block in blocks]
        while (count := len(parts[0])) > 1:
            halves = [part[half] for half in (slice(count // 2), slice(count // 2, None)) for part in parts]
            found = self.combine_fn.fn(
                *(self.to_tensor(half, block.dtype) for half, block in zip(halves, 2 * blocks, strict=True))
            )
            parts = [each.handle.data for each in (found if isinstance(found, tuple) else (found,))]
        whole = [part[0] for part in parts]
        if self.keep_dims:
            places = axis if self.axis is not None else tuple(range(input[0].handle.data.ndim))
            whole = [np.expand_dims(part, places) for part in whole]
        return [self.to_tensor(part, block.dtype) for part, block in zip(whole, blocks, strict=True)]

    interpreter.ReduceOps.generic_reduce = reduce


def sum_products_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tl.dot` adds up every element of a tile in the same order, as a device's instruction does. numpy's product
    leaves that to a library, which on some CPUs takes another order for the last rows of a tile, or for narrow ones."""
    from triton.runtime import interpreter

    original: Callable[..., Any] = interpreter.InterpreterBuilder.create_dot

    def create_dot(builder: Any, a: Any, b: Any, d: Any, *how: Any) -> Any:
        # fp8 becomes fp16 on its way, in there: only what is multiplied is taken over.
        with monkeypatch.context() as patch:
            patch.setattr(interpreter.np, "matmul", _product_in_one_order)
            return original(builder, a, b, d, *how)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def _product_in_one_order(a_MK: np.ndarray, b_KN: np.ndarray, *, dtype: Any) -> np.ndarray:
    a_KM, b_KN = np.ascontiguousarray(a_MK.astype(dtype).T), b_KN.astype(dtype)
    total_MN = np.zeros((a_KM.shape[1], b_KN.shape[1]), dtype)
    part_MN = np.empty_like(total_MN)
    for a_M, b_N in zip(a_KM, b_KN, strict=True):
        total_MN += np.multiply(a_M[:, None], b_N, out=part_MN)
    return total_MN
