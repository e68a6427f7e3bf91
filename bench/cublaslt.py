"""Products by cuBLASLt with the algorithm named, which torch does not let one do: it takes the library's first guess.

    out_TO = y_TK @ weight_OK^T  [+ out_TO]

The library's guess is made for a product alone; among its further proposals some are faster for a few hundred tokens.
Must not know: layers, how an algorithm is chosen.

Legend: T tokens · O outputs · K inputs.
"""

import ctypes
from dataclasses import dataclass
from functools import cache

import torch

from octavo.model.kernels.checks import check_tensor

MAX_PROPOSALS = 32
WORKSPACE_BYTES = 32 << 20
_TYPES = {torch.bfloat16: 14, torch.float16: 2, torch.float32: 0}  # cudaDataType
_COMPUTE_32F, _REAL_32F = 68, 0
_TRANS_A, _TRANSPOSED = 3, 1
_MAX_WORKSPACE, _REDUCTIONS, _FLOAT32_SUMS = 1, 3, 3  # splits of a sum stay float32


class BlasError(RuntimeError):
    """cuBLASLt is absent, or refused."""


class _Proposal(ctypes.Structure):
    _fields_ = [
        ("algorithm", ctypes.c_uint64 * 8), ("workspace_bytes", ctypes.c_size_t), ("status", ctypes.c_int),
        ("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Algorithm:
    """The library's opaque record of one, 64 bytes."""

    record: bytes


@cache
def _library() -> ctypes.CDLL:
    major = (torch.version.cuda or "").split(".")[0]
    try:
        return ctypes.CDLL(f"libcublasLt.so.{major}")
    except OSError as error:
        raise BlasError(f"libcublasLt.so.{major} cannot be loaded: {error}") from error


def _call(name: str, *arguments: object) -> None:
    status = getattr(_library(), name)(*arguments)
    if status:
        raise BlasError(f"{name} returned {status}")


@cache
def _handle(device_index: int) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    with torch.cuda.device(device_index):
        _call("cublasLtCreate", ctypes.byref(handle))
    return handle


@cache
def _workspace(device_index: int) -> torch.Tensor:
    """One for all: products of a step run one after the other."""
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=f"cuda:{device_index}")


@cache
def _operation() -> ctypes.c_void_p:
    operation, transposed = ctypes.c_void_p(), ctypes.c_int32(_TRANSPOSED)
    _call("cublasLtMatmulDescCreate", ctypes.byref(operation), _COMPUTE_32F, _REAL_32F)
    _call("cublasLtMatmulDescSetAttribute", operation, _TRANS_A, ctypes.byref(transposed), ctypes.c_size_t(4))
    return operation


@cache
def _layout(dtype: torch.dtype, rows: int, columns: int, stride: int) -> ctypes.c_void_p:
    """Of a matrix as the library sees it: columns lie one after the other."""
    layout = ctypes.c_void_p()
    _call(
        "cublasLtMatrixLayoutCreate", ctypes.byref(layout), _TYPES[dtype], ctypes.c_uint64(rows),
        ctypes.c_uint64(columns), ctypes.c_int64(stride),
    )  # fmt: skip
    return layout


@cache
def _preference() -> ctypes.c_void_p:
    preference = ctypes.c_void_p()
    _call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
    room, sums = ctypes.c_size_t(WORKSPACE_BYTES), ctypes.c_uint32(_FLOAT32_SUMS)
    for attribute, value in ((_MAX_WORKSPACE, room), (_REDUCTIONS, sums)):
        _call(
            "cublasLtMatmulPreferenceSetAttribute", preference, attribute, ctypes.byref(value),
            ctypes.c_size_t(ctypes.sizeof(value)),
        )  # fmt: skip
    return preference


def _layouts(num_tokens: int, weight_OK: torch.Tensor) -> tuple[ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]:
    (O, K), dtype = weight_OK.shape, weight_OK.dtype
    return _layout(dtype, K, O, K), _layout(dtype, K, num_tokens, K), _layout(dtype, O, num_tokens, O)


def propose(num_tokens: int, weight_OK: torch.Tensor) -> list[Algorithm]:
    """The library's proposals for so many tokens, its best guess first. Raises BlasError."""
    found, count = (_Proposal * MAX_PROPOSALS)(), ctypes.c_int()
    weight, y, out = _layouts(num_tokens, weight_OK)
    _call(
        "cublasLtMatmulAlgoGetHeuristic", _handle(weight_OK.device.index), _operation(), weight, y, out, out,
        _preference(), MAX_PROPOSALS, found, ctypes.byref(count),
    )  # fmt: skip
    return [Algorithm(bytes(one.algorithm)) for one in found[: count.value] if one.status == 0]


def multiply(
    y_TK: torch.Tensor, weight_OK: torch.Tensor, out_TO: torch.Tensor, algorithm: Algorithm, *, beta: float = 0.0
) -> None:
    """out_TO = y_TK @ weight_OK^T + beta * out_TO, summed in float32 and rounded once. All of one dtype.

    Raises ValueError where a tensor does not fit, BlasError where the library refuses.
    """
    (T, K), O, dtype = y_TK.shape, weight_OK.shape[0], weight_OK.dtype
    check_tensor("y_TK", y_TK, shape=(T, K), dtype=dtype)
    check_tensor("weight_OK", weight_OK, shape=(O, K), dtype=dtype)
    check_tensor("out_TO", out_TO, shape=(T, O), dtype=dtype)
    weight, y, out = _layouts(T, weight_OK)
    one, times, index = ctypes.c_float(1.0), ctypes.c_float(beta), weight_OK.device.index
    room, pointer = _workspace(index), ctypes.c_void_p
    _call(
        "cublasLtMatmul", _handle(index), _operation(), ctypes.byref(one), pointer(weight_OK.data_ptr()), weight,
        pointer(y_TK.data_ptr()), y, ctypes.byref(times), pointer(out_TO.data_ptr()), out,
        pointer(out_TO.data_ptr()), out, algorithm.record, pointer(room.data_ptr()),
        ctypes.c_size_t(WORKSPACE_BYTES), pointer(torch.cuda.current_stream().cuda_stream),
    )  # fmt: skip
