"""Corrections and shortcuts for Triton's interpreter."""

import math
import os
from collections.abc import Callable
from dataclasses import replace
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
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),  # integers must wrap
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]
"""Marks for tests that run kernels: warnings of numpy about correct kernels."""


def cut_decodes_coarsely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch few programs, since the interpreter runs them one after the other, even those without work; and make
    chunks so short that even short contexts have several."""
    from octavo.model.kernels.attention import decode_work

    limits = decode_work.WorkLimits(target_items=8, min_chunk_tokens=16)
    monkeypatch.setattr(decode_work.WorkLimits, "of", lambda num_kv_heads: limits)
    monkeypatch.setattr(decode_work, "CHUNK_MULTIPLE", 16)


def convert_to_e4m3_as_devices_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6's interpreter loses the carry of numbers that round up to a power of two, and does not saturate."""
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
    """Must be called once in every process that runs kernels in the interpreter."""
    if find_spec("triton") is None:
        return
    _let_comparisons_be_booleans()
    _patch_the_language_once()
    _reduce_by_halves()
    if os.environ.get("TRITON_INTERPRET") == "1":
        _describe_each_shape_once()
        _leave_out_what_nobody_reads()
        _call_the_language_directly()
        _agree_at_once_where_types_do()


def _let_comparisons_be_booleans() -> None:
    """Comparisons in Triton's interpreter give their result the type of their operands: broadcast to a block it becomes
    such a number, and triton 3.9 accepts no such masks."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder

    def boolean(compare: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, lhs, rhs: interpreter.TensorHandle(compare(self, lhs, rhs).data.astype(bool), tl.int1)

    for name in [name for name in vars(builder) if name.startswith(("create_icmp", "create_fcmp"))]:
        setattr(builder, name, boolean(getattr(builder, name)))


def _patch_the_language_once() -> None:
    """At each call of a function in a kernel the interpreter patches the whole language again, although the launch has
    already done so, and builds a table of all types to look one up. Both together take half of its time."""
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
    """The language makes constants and types for each dimension of each value, and their names, which takes a third of
    the interpreter's time. Here values of the same shape share them, and names are made only when read."""
    import triton.language as tl

    described = dict[Any, tuple[Any, int, Any, Any]]()  # of a type and its values, by id of the shape and by sizes
    make_type = tl.block_type.__init__
    scalar = (tl.core.tuple([]), tl.constexpr(1))

    def whole(number: Any) -> int:
        return number.value if isinstance(number, tl.constexpr) else number

    def describe(shape: Any) -> tuple[Any, int, Any, Any]:
        """As the language does it: it refuses some shapes, and accepts only some types of numbers."""
        sizes = tuple(map(whole, shape))
        if sizes not in described:
            make_type(made := object.__new__(tl.block_type), tl.int32, list(sizes))
            values = tl.core.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))
            described[sizes] = described[id(made.shape)] = (made.shape, made.numel, *values)
        return described[sizes]

    def type_of_block(self: Any, element_ty: Any, shape: Any) -> None:
        self.element_ty = element_ty
        self.shape, self.numel, *self.of_value = described.get(id(shape)) or describe(shape)

    def make_value(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_value if type.is_block() else scalar

    tl.block_type.__init__ = type_of_block
    tl.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>", lambda self, name: None)
    tl.tensor.__init__ = make_value


def _leave_out_what_nobody_reads() -> None:
    """Integer sums and products are computed a second time in 64 bits, for an assertion that is made only in debug
    mode."""
    from triton.runtime import interpreter

    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)


def _call_the_language_directly() -> None:
    """Each function of the language has two wrappers that inspect keywords, and many types are checked over and
    over."""
    import triton.language as tl
    from triton.runtime import interpreter

    checked = tl.core.builtin(lambda: None).__code__
    handle, semantic = interpreter.TensorHandle, interpreter.interpreter_semantic
    unwrap, plain = tl.core._unwrap_if_constexpr, {int, bool, float, str, type(None), tl.tensor, tl.dtype}

    def patch(place: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        inner = member.__wrapped__ if getattr(member, "__code__", None) is checked else member

        def call(*arguments: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return inner(*arguments, **named)

        scope.set_attr(place, name, call)

    def make_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if type(dtype) is not tl.dtype or data.itemsize * 8 > max(8, dtype.primitive_bitwidth):
            self.__post_init__()

    def unwrap_quickly(value: Any) -> Any:
        kind = type(value)
        return value if kind in plain else value.value if kind is tl.constexpr else unwrap(value)

    interpreter._patch_attr, handle.__init__ = patch, make_handle
    tl.core._unwrap_if_constexpr = unwrap_quickly


def _agree_at_once_where_types_do() -> None:
    """Two values of the same type and shape need no common type or shape, which the language finds by some thirty
    checks. The results for other pairs of types, and for a number with a value, are computed once."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic

    check, broadcast = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value
    compute, equal = TritonSemantic.computation_type_impl, tl.dtype.__eq__
    common, numbers, shapes = dict[Any, Any](), dict[Any, Any](), dict[Any, Any]()

    def check_types(
        self: Any, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True, div_or_mod: bool = False,
    ) -> Any:  # fmt: skip
        asked = (allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
        if type(lhs) is tl.tensor and type(lhs.dtype) is tl.dtype:
            if type(rhs) is tl.tensor:
                if lhs.dtype is rhs.dtype and not div_or_mod:
                    return broadcast_shapes(self, lhs, rhs)
            elif type(rhs) in (int, float):
                key = (type(rhs), rhs, lhs.dtype.name, id(lhs.shape), *asked)
                if key in numbers:
                    return lhs, numbers[key]
                left, right = check(self, lhs, rhs, *asked)
                if left is lhs:
                    right.handle.data.flags.writeable = False
                    numbers[key] = right
                return left, right
        return check(self, lhs, rhs, *asked)

    def broadcast_shapes(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        if not (lhs.type.is_block() and rhs.type.is_block()):
            return (lhs, splat(self, rhs, lhs.type)) if lhs.type.is_block() else (splat(self, lhs, rhs.type), rhs)
        pair = (id(lhs.type.shape), id(rhs.type.shape))
        if pair in shapes:
            return spread(self, lhs, shapes[pair]), spread(self, rhs, shapes[pair])
        left, right = broadcast(self, lhs, rhs)
        if len(lhs.shape) == len(rhs.shape):
            shapes[pair] = left.type.shape
        return left, right

    def splat(self: Any, value: Any, block: Any) -> Any:
        kind = block.with_element_ty(value.dtype)
        return self.tensor(self.builder.create_splat(kind, value.handle), kind)

    def spread(self: Any, value: Any, shape: Any) -> Any:
        if value.type.shape is shape:
            return value
        return self.tensor(self.builder.create_broadcast(value.handle, shape), tl.block_type(value.dtype, shape))

    def common_type(self: Any, lhs: Any, lhs_is_scalar: bool, rhs: Any, rhs_is_scalar: bool, div_or_mod: bool) -> Any:
        pair = (lhs.name, lhs_is_scalar, rhs.name, rhs_is_scalar, div_or_mod)
        if pair not in common:
            common[pair] = compute(self, lhs, lhs_is_scalar, rhs, rhs_is_scalar, div_or_mod)
        return common[pair]

    TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value = check_types, broadcast_shapes
    TritonSemantic.computation_type_impl = common_type
    tl.dtype.__eq__ = lambda self, other: self is other or equal(self, other)


def _reduce_by_halves() -> None:
    """In reductions the interpreter calls the combining function for one pair of elements after another, except for a
    few functions that it knows. These functions also work on blocks, so combine halves."""
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
    """Make `tl.dot` sum every element of a tile in the same order, as a device's instruction does. numpy's product uses
    a library, which on some CPUs takes another order for the last rows of a tile, or for narrow tiles."""
    from triton.runtime import interpreter

    original: Callable[..., Any] = interpreter.InterpreterBuilder.create_dot

    def create_dot(builder: Any, a: Any, b: Any, d: Any, *how: Any) -> Any:
        # The original converts fp8 to fp16: only the multiplication is replaced.
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
